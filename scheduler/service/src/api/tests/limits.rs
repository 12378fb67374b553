//! Tests of the limits of one token, of the rotation of the token, and of models that no node can serve.

use std::time::Duration;

use cfq_proto::http::BulkReply;
use cfq_proto::ids::TaskNumber;
use http_body_util::BodyExt;

use super::*;
use crate::testing::replace_token;

/// Maximum wait of a test for the end of a feed.
const WAIT: Duration = Duration::from_secs(20);

fn error(body: &[u8]) -> cfq_proto::http::ErrorBody {
    read::<ErrorReply>(body).error
}

#[tokio::test]
async fn task_above_the_limit_is_refused_but_a_repeated_submit_is_not() {
    let env = TestEnv::new().await;
    let limits = SchedulerLimits { open_tasks: 2, ..SchedulerLimits::default() };
    let service = Service::within(limits, env.store.clone(), Some(env));
    let key = [("idempotency-key", "k1")];
    assert_eq!(service.post("/api/v1/tasks", &key, &task()).await.0, StatusCode::CREATED);
    assert_eq!(service.post("/api/v1/tasks", &[], &task()).await.0, StatusCode::CREATED);
    for headers in [&[][..], &[("idempotency-key", "k2")]] {
        let request = request(Method::POST, "/api/v1/tasks", headers, Body::from(task().to_string()));
        let response = service.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers().get("retry-after").unwrap(), "30");
        let (status, body) = (response.status(), to_bytes(response.into_body(), usize::MAX).await.unwrap());
        let error = error(&body);
        assert_eq!((status, error.code), (StatusCode::TOO_MANY_REQUESTS, ErrorCode::TooManyRequests), "{error:?}");
        assert!(error.message.contains("2 tasks are open") && error.message.contains("cancel"), "{error:?}");
    }
    let (status, body) = service.post("/api/v1/tasks", &key, &task()).await;
    assert_eq!((status, read::<SubmitReply>(&body).created), (StatusCode::OK, false));
    let mut other = task();
    other["description"] = "another".into();
    assert_eq!(error(&service.post("/api/v1/tasks", &key, &other).await.1).code, ErrorCode::KeyReused);

    assert_eq!(service.post("/api/v1/tasks/t1/cancel", &[], &json!({})).await.0, StatusCode::OK);
    let accepted = async {
        while service.post("/api/v1/tasks", &[], &task()).await.0 != StatusCode::CREATED {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(WAIT, accepted).await.expect("a task ended, so another one is accepted");
}

/// Requests are counted before the token is checked.
#[tokio::test]
async fn unknown_methods_add_no_metrics() {
    let service = Service::new().await;
    for n in 0..20 {
        let method = Method::from_bytes(format!("X{n}").as_bytes()).unwrap();
        let unauthorized = Request::builder().method(method).uri("/api/v1/tasks").body(Body::empty()).unwrap();
        service.send(unauthorized).await;
    }
    let (status, page) = service.get("/metrics").await;
    let page = String::from_utf8(page).unwrap();
    let series = page.lines().filter(|line| line.starts_with("cfq_http_requests_total{"));
    let series: Vec<&str> = series.collect();
    assert!(status == StatusCode::OK && series.len() == 1 && series[0].contains("method=\"other\""), "{page}");
}

#[tokio::test]
async fn selection_goes_on_after_tasks_that_the_limit_refuses() {
    let env = TestEnv::new().await;
    env.submit().await;
    env.store
        .raw(
            "insert into tasks (id, body_hash, spec, title, state, priority, threshold, max_iterations, ended_at)
             select gen_random_uuid(), 'h', '{}', 'many', 'failed', 3, 85, 5, now() from generate_series(1, 101)",
        )
        .await;
    let limits = SchedulerLimits { open_tasks: 1, ..SchedulerLimits::default() };
    let service = Service::within(limits, env.store.clone(), Some(env));
    let mut request = json!({"action": {"type": "retry"}, "all": true});
    let mut numbers = Vec::new();
    loop {
        let reply = read::<BulkReply>(&service.post("/api/v1/tasks/actions", &[], &request).await.1);
        numbers.extend(reply.results.iter().map(|result| result.number.unwrap()));
        let Some(next) = reply.next else { break };
        assert_eq!(Some(&next.task), numbers.last(), "the next page begins after this one");
        request["after"] = json!(next);
    }
    assert_eq!(numbers, (2..=102).map(TaskNumber).collect::<Vec<_>>());
}

#[tokio::test]
async fn list_with_an_unknown_parameter_is_refused() {
    let service = Service::new().await;
    let (status, body) = service.send(request(Method::GET, "/api/v1/tasks?labels=x", &[], Body::empty())).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(error(&body).message.contains("labels"), "{:?}", error(&body));
}

#[tokio::test]
async fn rotated_token_replaces_the_old_one_and_ends_its_feeds() {
    let service = Service::new().await;
    service.post("/api/v1/tasks", &[], &task()).await;
    let feed = request(Method::GET, "/api/v1/tasks/t1/feed", &[], Body::empty());
    let mut stream = service.router.clone().oneshot(feed).await.unwrap().into_body();
    assert!(stream.frame().await.is_some(), "the feed is open");

    let new = [("authorization", "Bearer fedcba9876543210")];
    let status = async |headers: &[(&str, &str)]| {
        service.send(request(Method::GET, "/api/v1/tasks", headers, Body::empty())).await.0
    };
    assert_eq!((status(&[]).await, status(&new).await), (StatusCode::OK, StatusCode::UNAUTHORIZED));
    replace_token(&service.token_file, "fedcba9876543210");
    assert_eq!((status(&[]).await, status(&new).await), (StatusCode::UNAUTHORIZED, StatusCode::OK));
    let ended = async { while stream.frame().await.is_some() {} };
    tokio::time::timeout(WAIT, ended).await.expect("the feed of the old token ends");
    // The feed's permit is free again.
    let feed = request(Method::GET, "/api/v1/tasks/t1/feed", &new, Body::empty());
    assert_eq!(service.router.clone().oneshot(feed).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn model_behind_an_unknown_endpoint_is_refused_while_a_node_is_alive() {
    let service = Service::new().await;
    let env = service.env.as_ref().unwrap();
    let mut typo = task();
    typo["agents"] = json!({"alpha": {"model": "openai:typo/m"}});
    let key = [("idempotency-key", "k1")];
    // Without a node, the task is accepted with a warning.
    let (status, body) = service.post("/api/v1/tasks", &key, &typo).await;
    let warnings = read::<SubmitReply>(&body).warnings;
    assert_eq!(status, StatusCode::CREATED);
    assert!(warnings.iter().any(|warning| warning.contains("openai:typo/m")), "{warnings:?}");

    env.join_node().await;
    let (status, body) = service.post("/api/v1/tasks", &[], &typo).await;
    let refused = error(&body);
    assert_eq!((status, refused.field.as_deref()), (StatusCode::BAD_REQUEST, Some("agents.alpha.model")));
    assert!(refused.message.contains("typo") && refused.message.contains("known endpoints: box"), "{refused:?}");
    assert_eq!(service.post("/api/v1/tasks", &key, &typo).await.0, StatusCode::OK, "the task exists already");
    let (status, body) = service.post("/api/v1/tasks", &[], &task()).await;
    assert_eq!((status, read::<SubmitReply>(&body).warnings), (StatusCode::CREATED, vec![]));

    let switch = json!({"action": {"type": "switch_llm", "target_agent": "alpha", "suggested_model": "openai:typo/m"}});
    let (status, body) = service.post("/api/v1/tasks/t1/resolve", &[], &switch).await;
    assert_eq!((status, error(&body).field.as_deref()), (StatusCode::BAD_REQUEST, Some("action.suggested_model")));

    env.store.raw("update nodes set last_seen = now() - interval '1 hour'").await;
    let (status, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let warnings = read::<SubmitReply>(&body).warnings;
    assert_eq!(status, StatusCode::CREATED);
    assert!(warnings.iter().any(|warning| warning.contains("no node is running")), "{warnings:?}");
}

#[tokio::test]
async fn too_large_body_names_the_limit() {
    let service = Service::new().await;
    let large = json!({"description": "x".repeat(2_000_000), "repo": "/r"});
    let (status, body) = service.post("/api/v1/tasks", &[], &large).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(error(&body).message.contains("1048576 bytes"), "{}", String::from_utf8_lossy(&body));
}
