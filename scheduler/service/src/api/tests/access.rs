//! Tests of what each token may do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cfq_proto::http::{ApiTokenList, ApiTokenReply, ApiTokenRole, BulkOutcome, BulkReply};
use cfq_proto::ids::TaskNumber;
use http_body_util::BodyExt;

use super::*;

/// Maximum wait of a test for something that happens within seconds.
pub(super) const WAIT: Duration = Duration::from_secs(20);

/// Creates a token with the token in the data folder, and returns the header that sends it.
pub(super) async fn token(service: &Service, name: &str, role: &str, limits: Value) -> String {
    let body = json!({ "name": name, "role": role, "limits": limits });
    let (status, body) = service.post("/api/v1/tokens", &[], &body).await;
    assert_eq!(status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
    format!("Bearer {}", read::<ApiTokenReply>(&body).token)
}

pub(super) async fn submit(service: &Service, token: &str) -> SubmitReply {
    let (status, body) = service.post("/api/v1/tasks", &[("authorization", token)], &task()).await;
    assert_eq!(status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
    read(&body)
}

pub(super) fn error(body: &[u8]) -> cfq_proto::http::ErrorBody {
    read::<ErrorReply>(body).error
}

/// Each method and path of the document, with the role that it needs, and the paths that are served besides.
fn routes() -> Vec<(Method, String, Option<ApiTokenRole>)> {
    let document = openapi_document();
    let mut routes = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let role = operation["security"][0]["token"][0].as_str().map(|role| role.parse().unwrap());
            let path = path.replace("{key}", "t1").replace("{number}", "1").replace("{which}", "1");
            let path =
                path.replace("{id}", "x").replace("{name}", "x").replace("{agent}", "alpha").replace("{model}", "x");
            assert!(!path.contains('{'), "{path}");
            routes.push((method.to_ascii_uppercase().parse().unwrap(), path, role));
        }
    }
    for (method, path, role) in [
        (Method::GET, "/v1/models/", ApiTokenRole::Read),
        (Method::POST, "/v1/chat/completions/", ApiTokenRole::Submit),
        (Method::POST, "/v1/completions/", ApiTokenRole::Submit),
        (Method::GET, "/added", ApiTokenRole::Read),
    ] {
        routes.push((method, path.to_owned(), Some(role)));
    }
    routes
}

#[tokio::test]
async fn every_route_is_refused_without_a_token_of_its_role() {
    let service = Service::new().await;
    let mut tokens = vec![("nobody".to_owned(), String::new(), None)];
    for role in ApiTokenRole::ALL {
        tokens.push((role.to_string(), token(&service, role.as_str(), role.as_str(), json!({})).await, Some(role)));
    }
    // A stranger's token has the right form, or is a join token.
    for stranger in ["Bearer cfqa_bm9ib2R5", "Bearer cfqj_bm9ib2R5", "Bearer ", "Basic MDEyMzQ1Njc4OWFiY2RlZg=="] {
        tokens.push((stranger.to_owned(), stranger.to_owned(), None));
    }
    for (method, path, needed) in routes() {
        for (who, authorization, role) in &tokens {
            let headers = [("authorization", authorization.as_str())];
            // An unreadable body: no route that is reached changes anything that a later one needs.
            let request = request(method.clone(), &path, &headers, Body::from("{"));
            let response = service.router.clone().oneshot(request).await.unwrap();
            let status = response.status();
            let expected = match (needed, role) {
                (None, _) => None,
                (Some(_), None) => Some(StatusCode::UNAUTHORIZED),
                (Some(needed), Some(role)) => (*role < needed).then_some(StatusCode::FORBIDDEN),
            };
            match expected {
                Some(expected) => assert_eq!(status, expected, "{method} {path} as {who}"),
                None => assert!(
                    !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::METHOD_NOT_ALLOWED),
                    "{method} {path} as {who}: {status}"
                ),
            }
            // With the role of an administrator, nothing is forbidden.
            if *role == Some(ApiTokenRole::Admin) {
                assert_ne!(status, StatusCode::FORBIDDEN, "{method} {path}");
            }
        }
    }
}

/// The roles that differ from reading for GET, and administration for other methods.
#[test]
fn roles_of_the_routes_are_those_of_the_documentation() {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (method, path, role) in routes() {
        let usual = if method == Method::GET { ApiTokenRole::Read } else { ApiTokenRole::Admin };
        if role != Some(usual) {
            let role = role.map_or_else(|| "none".to_owned(), |role| role.to_string());
            found.entry(role).or_default().insert(format!("{method} {path}"));
        }
    }
    let of = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<BTreeSet<_>>();
    let expected = BTreeMap::from([
        ("none".to_owned(), of(&["GET /healthz", "GET /readyz", "POST /api/v1/join"])),
        ("metrics".to_owned(), of(&["GET /metrics"])),
        ("admin".to_owned(), of(&["GET /api/v1/join-tokens", "GET /api/v1/tokens"])),
        (
            "submit".to_owned(),
            of(&[
                "PATCH /api/v1/tasks/t1",
                "POST /api/v1/dead-letters/t1/requeue",
                "POST /api/v1/tasks",
                "POST /api/v1/tasks/actions",
                "POST /api/v1/tasks/t1/acknowledge",
                "POST /api/v1/tasks/t1/cancel",
                "POST /api/v1/tasks/t1/defects",
                "POST /api/v1/tasks/t1/pause",
                "POST /api/v1/tasks/t1/resolve",
                "POST /api/v1/tasks/t1/resume",
                "POST /api/v1/tasks:batch",
                "POST /api/v1/tasks:check",
                "POST /v1/chat/completions",
                "POST /v1/chat/completions/",
                "POST /v1/completions",
                "POST /v1/completions/",
            ]),
        ),
    ]);
    assert_eq!(found, expected);
}

#[tokio::test]
async fn token_changes_only_the_tasks_that_were_submitted_with_it() {
    let service = Service::new().await;
    let editor = token(&service, "editor", "submit", json!({})).await;
    let other = token(&service, "other", "submit", json!({})).await;
    let admin = token(&service, "boss", "admin", json!({})).await;
    let own = submit(&service, &editor).await.number;
    let foreign = submit(&service, &other).await.number;
    let (_, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let of_owner = read::<SubmitReply>(&body).number;
    let headers = [("authorization", editor.as_str())];
    for task in [foreign, of_owner] {
        for (action, body) in [
            ("cancel", json!({})),
            ("pause", json!({})),
            ("resume", json!({})),
            ("acknowledge", json!({})),
            ("resolve", json!({ "action": { "type": "abort" } })),
            ("defects", json!({ "location": "a.py:1", "description": "x" })),
        ] {
            let (status, body) = service.post(&format!("/api/v1/tasks/{task}/{action}"), &headers, &body).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{action}: {}", String::from_utf8_lossy(&body));
            assert!(
                error(&body).message.contains("was submitted with another token than that of the client editor"),
                "{:?}",
                error(&body)
            );
        }
        let patch = Body::from(json!({ "priority": "P0" }).to_string());
        let (status, _) = service.send(request(Method::PATCH, &format!("/api/v1/tasks/{task}"), &headers, patch)).await;
        assert_eq!(status, StatusCode::FORBIDDEN);
        let retry = json!({ "description": "x", "repo": "/home/me/project", "retry_of": task.to_string() });
        assert_eq!(service.post("/api/v1/tasks", &headers, &retry).await.0, StatusCode::FORBIDDEN);
        let batch = json!({ "tasks": [retry] });
        let (status, body) = service.post("/api/v1/tasks:batch", &headers, &batch).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{}", String::from_utf8_lossy(&body));
    }

    let cancel = json!({ "action": { "type": "cancel" }, "tasks": [own.to_string(), foreign.to_string(), of_owner.to_string()] });
    let (_, body) = service.post("/api/v1/tasks/actions", &headers, &cancel).await;
    let outcomes: Vec<_> = read::<BulkReply>(&body).results.iter().map(|result| result.outcome).collect();
    assert_eq!(outcomes, [BulkOutcome::Done, BulkOutcome::Refused, BulkOutcome::Refused]);
    let own = submit(&service, &editor).await.number;
    let all = json!({ "action": { "type": "pause" }, "all": true });
    let (_, body) = service.post("/api/v1/tasks/actions", &headers, &all).await;
    let numbers = |body: &[u8]| -> Vec<TaskNumber> {
        read::<BulkReply>(body).results.iter().filter_map(|result| result.number).collect()
    };
    assert_eq!(numbers(&body), [own]);
    // An administrator may change all tasks, and the record names the token.
    let (_, body) = service.post("/api/v1/tasks/actions", &[("authorization", admin.as_str())], &all).await;
    assert_eq!(numbers(&body), [foreign, of_owner], "the other one is paused");
    let (_, body) = service.get(&format!("/api/v1/tasks/{own}")).await;
    assert!(read::<TaskDetail>(&body).reason.contains("the client editor"), "{}", String::from_utf8_lossy(&body));
}

#[tokio::test]
async fn revoked_token_is_refused_and_its_feed_ends() {
    let service = Service::new().await;
    let reader = token(&service, "reader", "read", json!({})).await;
    service.post("/api/v1/tasks", &[], &task()).await;
    let headers = [("authorization", reader.as_str())];
    let feed = request(Method::GET, "/api/v1/tasks/t1/feed", &headers, Body::empty());
    let mut stream = service.router.clone().oneshot(feed).await.unwrap().into_body();
    assert!(stream.frame().await.is_some(), "the feed is open");
    let used = async {
        loop {
            let tokens = read::<ApiTokenList>(&service.get("/api/v1/tokens").await.1).tokens;
            match &tokens[..] {
                [token] if token.last_used_at.is_some() => return,
                [_] => tokio::time::sleep(Duration::from_millis(50)).await,
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(WAIT, used).await.expect("the use of the token is recorded");

    let revoke = || request(Method::DELETE, "/api/v1/tokens/reader", &[], Body::empty());
    assert_eq!(service.send(revoke()).await.0, StatusCode::OK);
    let list = async || service.send(request(Method::GET, "/api/v1/tasks", &headers, Body::empty())).await;
    let (status, body) = list().await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert!(error(&body).message.contains("revoked"), "{:?}", error(&body));
    let ended = async { while stream.frame().await.is_some() {} };
    tokio::time::timeout(WAIT, ended).await.expect("the feed of the token ends");
    assert_eq!(service.send(revoke()).await.0, StatusCode::NOT_FOUND);
    // The name is free again, and the new token is another one.
    let new = token(&service, "reader", "read", json!({})).await;
    assert_ne!(new, reader);
    assert_eq!(list().await.0, StatusCode::UNAUTHORIZED);
}

/// Another scheduler revokes a token by a change of the database only.
#[tokio::test]
async fn token_that_another_scheduler_revoked_is_refused_within_seconds() {
    let service = Service::new().await;
    let reader = token(&service, "reader", "read", json!({})).await;
    let list = async || {
        service.send(request(Method::GET, "/api/v1/tasks", &[("authorization", &reader)], Body::empty())).await.0
    };
    assert_eq!(list().await, StatusCode::OK);
    service.env.as_ref().unwrap().store.raw("update api_tokens set revoked_at = now()").await;
    let refused = async {
        while list().await != StatusCode::UNAUTHORIZED {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(WAIT, refused).await.expect("the token is refused");
}

#[tokio::test]
async fn expired_token_is_refused_and_its_name_is_free() {
    let service = Service::new().await;
    let body = json!({ "name": "brief", "role": "read", "ttl_seconds": 1 });
    let (_, created) = service.post("/api/v1/tokens", &[], &body).await;
    let bearer = format!("Bearer {}", read::<ApiTokenReply>(&created).token);
    let refused = async {
        loop {
            let headers = [("authorization", bearer.as_str())];
            if service.send(request(Method::GET, "/api/v1/tasks", &headers, Body::empty())).await.0
                == StatusCode::UNAUTHORIZED
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(WAIT, refused).await.expect("the token expires");
    assert_eq!(service.post("/api/v1/tokens", &[], &body).await.0, StatusCode::CREATED);
}

#[tokio::test]
async fn unusable_tokens_are_refused_with_the_field() {
    let service = Service::new().await;
    token(&service, "taken", "read", json!({})).await;
    for (body, status, field) in [
        (json!({ "name": "taken", "role": "read" }), StatusCode::CONFLICT, Some("name")),
        (json!({ "name": "A b", "role": "read" }), StatusCode::BAD_REQUEST, Some("name")),
        (json!({ "name": "a", "role": "root" }), StatusCode::BAD_REQUEST, Some("role")),
        (json!({ "name": "a", "role": "read", "ttl_seconds": 0 }), StatusCode::BAD_REQUEST, Some("ttl_seconds")),
        (json!({ "name": "a", "role": "read", "limits": { "calls": 1 } }), StatusCode::BAD_REQUEST, Some("limits")),
        (
            json!({ "name": "a", "role": "submit", "limits": { "open_tasks": 0 } }),
            StatusCode::BAD_REQUEST,
            Some("limits.open_tasks"),
        ),
        (
            json!({ "name": "a", "role": "submit", "limits": { "repositories": ["shop"] } }),
            StatusCode::BAD_REQUEST,
            Some("limits.repositories"),
        ),
    ] {
        let (found, reply) = service.post("/api/v1/tokens", &[], &body).await;
        let error = error(&reply);
        assert_eq!((found, error.field.as_deref()), (status, field), "{body}: {error:?}");
    }
}

#[tokio::test]
async fn rotated_token_keeps_its_name_limits_and_tasks() {
    let service = Service::new().await;
    let old = token(&service, "editor", "submit", json!({ "open_tasks": 1 })).await;
    let number = submit(&service, &old).await.number;
    let (status, body) = service.post("/api/v1/tokens/editor/rotate", &[], &json!({})).await;
    assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&body));
    let new = format!("Bearer {}", read::<ApiTokenReply>(&body).token);
    let cancel = async |token: &str| {
        service.post(&format!("/api/v1/tasks/{number}/cancel"), &[("authorization", token)], &json!({})).await.0
    };
    assert_eq!(cancel(&old).await, StatusCode::UNAUTHORIZED);
    let (status, _) = service.post("/api/v1/tasks", &[("authorization", &new)], &task()).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "the open task counts");
    assert_eq!(cancel(&new).await, StatusCode::OK);
    assert_eq!(service.post("/api/v1/tokens/nobody/rotate", &[], &json!({})).await.0, StatusCode::NOT_FOUND);
}

/// A repeated retry, whose first reply may have been lost, finds the new task although the limit is reached.
#[tokio::test]
async fn token_that_expires_creates_none_that_is_valid_for_longer() {
    let service = Service::new().await;
    let body = json!({ "name": "brief", "role": "admin", "ttl_seconds": 600 });
    let (_, created) = service.post("/api/v1/tokens", &[], &body).await;
    let bearer = format!("Bearer {}", read::<ApiTokenReply>(&created).token);
    let create = async |ttl: Option<u32>| {
        let mut body = json!({ "name": "child", "role": "admin" });
        if let Some(ttl) = ttl {
            body["ttl_seconds"] = json!(ttl);
        }
        service.post("/api/v1/tokens", &[("authorization", bearer.as_str())], &body).await
    };
    for ttl in [None, Some(601)] {
        let (status, body) = create(ttl).await;
        let error = error(&body);
        assert_eq!((status, error.field.as_deref()), (StatusCode::BAD_REQUEST, Some("ttl_seconds")), "{error:?}");
    }
    token(&service, "boss", "admin", json!({})).await;
    let rotate = async |name: &str| {
        let path = format!("/api/v1/tokens/{name}/rotate");
        service.post(&path, &[("authorization", bearer.as_str())], &json!({})).await.0
    };
    assert_eq!(rotate("boss").await, StatusCode::FORBIDDEN, "it would be valid for longer");
    let (status, created) = create(Some(60)).await;
    assert_eq!(rotate("child").await, StatusCode::OK);
    let by = read::<ApiTokenReply>(&created).view.created_by;
    assert_eq!((status, by.as_str()), (StatusCode::CREATED, "the client brief"));
}

/// A table is locked, so each read of the tokens lasts until its time limit. A token that was used before is accepted, and no
/// request waits for more than one read.
#[tokio::test]
async fn known_token_is_accepted_while_the_database_does_not_answer() {
    let service = Service::new().await;
    let store = service.env.as_ref().unwrap().store.clone();
    let metrics = token(&service, "prometheus", "metrics", json!({})).await;
    let scrape = async |token: &str| {
        service.send(request(Method::GET, "/added", &[("authorization", token)], Body::empty())).await.0
    };
    assert_eq!(scrape(&metrics).await, StatusCode::FORBIDDEN, "the token is known");
    let _lock = store.hold("lock table api_tokens in access exclusive mode").await;
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let many = (0..50).map(async |n| scrape(if n % 2 == 0 { &metrics } else { "Bearer cfqa_unknown" }).await);
    let statuses =
        tokio::time::timeout(WAIT, futures::future::join_all(many)).await.expect("no request waits for long");
    for (n, status) in statuses.into_iter().enumerate() {
        let expected = if n % 2 == 0 { StatusCode::FORBIDDEN } else { StatusCode::SERVICE_UNAVAILABLE };
        assert_eq!(status, expected, "request {n}");
    }
}

/// The client disconnects before its task is written.
/// A token with limits of a later version is refused, and the others are not affected.
#[tokio::test]
async fn unreadable_token_is_refused_and_can_be_revoked() {
    let service = Service::new().await;
    let odd = token(&service, "odd", "submit", json!({})).await;
    let reader = token(&service, "reader", "read", json!({})).await;
    let store = service.env.as_ref().unwrap().store.clone();
    store.raw("update api_tokens set limits = '{\"feeds\": 1, \"running_tasks\": \"many\"}' where name = 'odd'").await;
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    for (token, status) in [(&odd, StatusCode::UNAUTHORIZED), (&reader, StatusCode::OK)] {
        let headers = [("authorization", token.as_str())];
        let request = request(Method::GET, "/api/v1/tasks", &headers, Body::empty());
        assert_eq!(service.send(request).await.0, status);
    }
    let names: Vec<String> = read::<ApiTokenList>(&service.get("/api/v1/tokens").await.1)
        .tokens
        .iter()
        .map(|t| t.name.to_string())
        .collect();
    assert_eq!(names, ["reader"]);
    let revoke = request(Method::DELETE, "/api/v1/tokens/odd", &[], Body::empty());
    assert_eq!(service.send(revoke).await.0, StatusCode::OK);
}
