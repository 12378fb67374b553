//! The page that shows the document: Swagger UI, served from this process, so that it needs no other server.

use axum::Router;
use axum::extract::Request;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{Html, Response};
use axum::routing::get;
use swagger_ui_dist::{ApiDefinition, OpenApiSource};

use super::DOCUMENT_PATH;
use crate::api::error_form;

/// Path of the page.
pub const PAGE_PATH: &str = "/docs";
/// Path of the script that starts Swagger UI.
const SCRIPT_PATH: &str = "/docs/start.js";
/// Path of the files of Swagger UI.
const ASSETS_PATH: &str = "/docs/assets";

/// The files of Swagger UI that the page loads.
const USED_ASSETS: [&str; 2] = ["/docs/assets/swagger-ui-bundle.js", "/docs/assets/swagger-ui.css"];

const PAGE: &str = r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API of cfq</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
</head>
<body>
<noscript>This page needs JavaScript. The document that it shows is at <a href="/openapi.json">/openapi.json</a>.</noscript>
<div id="page"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"#;

const SCRIPT: &str = r##"SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#page",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: -1,
  filter: true,
  validatorUrl: null,
});
"##;

/// Swagger UI sets styles of elements and has images in its style sheet. Everything else is loaded from this server only,
/// so that no script of another origin can read a token that is typed here.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// True for the document, the page and its files, which contain nothing secret and need no token.
pub fn is_public(path: &str) -> bool {
    path == DOCUMENT_PATH || path == PAGE_PATH || path.strip_prefix(PAGE_PATH).is_some_and(|rest| rest.starts_with('/'))
}

/// The routes of the page and its files.
pub fn page() -> Router {
    let assets = swagger_ui_dist::generate_routes(ApiDefinition {
        uri_prefix: ASSETS_PATH,
        api_definition: OpenApiSource::Uri(DOCUMENT_PATH),
        title: None,
    });
    Router::new()
        .route(PAGE_PATH, get(async || Html(PAGE)))
        .route(SCRIPT_PATH, get(async || ([(CONTENT_TYPE, "text/javascript")], SCRIPT)))
        .merge(assets)
        .layer(middleware::from_fn(set_policy))
}

async fn set_policy(request: Request, next: Next) -> Response {
    // The package also serves a page of its own, maps of its sources and files for other ways to log in.
    let path = request.uri().path();
    if path.starts_with(ASSETS_PATH) && !USED_ASSETS.contains(&path) {
        return error_form::unknown_path(request.into_parts().0.uri).await;
    }
    let mut response = next.run(request).await;
    let mut set = |name: HeaderName, value| response.headers_mut().insert(name, HeaderValue::from_static(value));
    set(CONTENT_SECURITY_POLICY, POLICY);
    set(X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(REFERRER_POLICY, "no-referrer");
    response
}
