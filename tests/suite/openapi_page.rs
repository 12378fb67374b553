//! The OpenAPI document and the page that shows it need no token and no other server.

use cfq_tests::cluster::Cluster;
use reqwest::StatusCode;
use serde_json::Value;

#[tokio::test(flavor = "multi_thread")]
async fn document_and_page_are_served_without_a_token() {
    let cluster = Cluster::start().await;
    let http = cfq_link::outbound::api_client().unwrap();
    let url = cluster.client.url().to_owned();
    let get = async |path: &str| http.get(format!("{url}{path}")).send().await.unwrap();
    let document = get("/openapi.json").await;
    assert_eq!(document.headers()["content-type"], "application/json");
    let document: Value = document.json().await.unwrap();
    assert_eq!(document["openapi"], "3.1.1");
    assert!(document["paths"]["/api/v1/tasks"]["post"].is_object());

    let page = get("/docs").await;
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self';"), "{policy}");
    let page = page.text().await.unwrap();
    // Everything that the page loads comes from this server.
    let mut loaded: Vec<&str> = Vec::new();
    for attribute in ["src=\"", "href=\""] {
        loaded.extend(page.split(attribute).skip(1).map(|rest| rest.split('"').next().unwrap()));
    }
    assert!(loaded.len() > 3, "{page}");
    for path in loaded.into_iter().filter(|path| *path != "data:,") {
        let response = get(path).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        assert!(!response.bytes().await.unwrap().is_empty(), "{path}");
    }

    for path in ["/docs/assets", "/docs/assets/", "/docs/assets/swagger-ui.css.map", "/docs/other"] {
        assert_eq!(get(path).await.status(), StatusCode::NOT_FOUND, "{path}");
    }
    // Other paths need the token. All paths need an allowed host.
    for path in ["/docsx", "/openapi.jsonx", "/api/v1/status"] {
        assert_eq!(get(path).await.status(), StatusCode::UNAUTHORIZED, "{path}");
    }
    let foreign = http.get(format!("{url}/docs")).header("Host", "example.org").send().await.unwrap();
    assert_eq!(foreign.status(), StatusCode::FORBIDDEN);
    cluster.finish().await;
}
