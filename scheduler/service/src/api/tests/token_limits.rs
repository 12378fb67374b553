//! Tests of the limits of named tokens, and of their idempotency keys.

use std::collections::BTreeSet;
use std::time::Duration;

use cfq_proto::http::{BulkOutcome, BulkReply};

use super::access::{error, submit, token};
use super::*;

#[tokio::test]
async fn limits_of_a_token_hold_for_it_alone() {
    let service = Service::new().await;
    service.env.as_ref().unwrap().join_node().await;
    let limits = json!({ "open_tasks": 1, "calls": 1, "repositories": ["/home/me/project"] });
    let editor = token(&service, "editor", "submit", limits).await;
    let headers = [("authorization", editor.as_str())];
    let mut elsewhere = task();
    elsewhere["repo"] = json!("/home/me/other");
    for path in ["/api/v1/tasks", "/api/v1/tasks:check"] {
        let (status, body) = service.post(path, &headers, &elsewhere).await;
        let refused = error(&body);
        assert_eq!((status, refused.field.as_deref()), (StatusCode::FORBIDDEN, Some("repo")), "{refused:?}");
        assert!(refused.message.contains("/home/me/project"), "{refused:?}");
    }
    submit(&service, &editor).await;
    let (status, body) = service.post("/api/v1/tasks", &headers, &task()).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert!(error(&body).message.contains("1 tasks of the token editor are open"), "{:?}", error(&body));
    let batch = json!({ "tasks": [task()] });
    assert_eq!(service.post("/api/v1/tasks:batch", &headers, &batch).await.0, StatusCode::TOO_MANY_REQUESTS);
    let call = json!({ "model": "alpha", "messages": [{ "role": "user", "content": "x" }] });
    let first = service.post("/v1/chat/completions", &headers, &call);
    tokio::pin!(first);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut first).await.is_err(), "the call waits for its model");
    let (status, body) = service.post("/v1/chat/completions", &headers, &call).await;
    let body = String::from_utf8_lossy(&body);
    assert!(status == StatusCode::TOO_MANY_REQUESTS && body.contains("1 calls of the token editor"), "{status} {body}");
    let (status, _) = service.post("/api/v1/tasks", &[], &elsewhere).await;
    assert_eq!(status, StatusCode::CREATED, "the token in the data folder has no limits");
}

#[tokio::test]
async fn idempotency_keys_of_two_tokens_are_two_keys() {
    let service = Service::new().await;
    let tokens = [
        token(&service, "one", "submit", json!({})).await,
        token(&service, "two", "submit", json!({})).await,
        "Bearer 0123456789abcdef".to_owned(),
    ];
    let mut numbers = BTreeSet::new();
    for _ in 0..2 {
        for token in &tokens {
            let headers = [("authorization", token.as_str()), ("idempotency-key", "k")];
            let (status, body) = service.post("/api/v1/tasks", &headers, &task()).await;
            assert!(status.is_success(), "{}", String::from_utf8_lossy(&body));
            numbers.insert(read::<SubmitReply>(&body).number);
        }
    }
    assert_eq!(numbers.len(), 3);
}

#[tokio::test]
async fn concurrent_submissions_keep_the_limit_of_their_token() {
    let service = Service::new().await;
    let editor = token(&service, "editor", "submit", json!({ "open_tasks": 3 })).await;
    let batch = json!({ "tasks": [task(), task()] });
    let one = task();
    let submissions = (0..20).map(async |n| {
        let headers = [("authorization", editor.as_str())];
        let (path, body) = if n % 2 == 0 { ("/api/v1/tasks", &one) } else { ("/api/v1/tasks:batch", &batch) };
        service.post(path, &headers, body).await.0
    });
    let accepted = futures::future::join_all(submissions).await;
    assert!(accepted.iter().filter(|status| status.is_success()).count() >= 2, "{accepted:?}");
    let open = service.env.as_ref().unwrap().store.count_open_tasks().await.unwrap();
    assert_eq!(open, 3, "{accepted:?}");
}

#[tokio::test]
async fn repeated_retry_finds_its_task_at_the_limit() {
    let service = Service::new().await;
    let editor = token(&service, "editor", "submit", json!({ "open_tasks": 1 })).await;
    let headers = [("authorization", editor.as_str())];
    let number = submit(&service, &editor).await.number;
    service.post(&format!("/api/v1/tasks/{number}/cancel"), &headers, &json!({})).await;
    let retry = json!({ "action": { "type": "retry" }, "tasks": [number.to_string()] });
    let mut retried = Vec::new();
    for outcome in [BulkOutcome::Done, BulkOutcome::Unchanged] {
        let reply = read::<BulkReply>(&service.post("/api/v1/tasks/actions", &headers, &retry).await.1);
        assert_eq!(reply.results[0].outcome, outcome, "{:?}", reply.results);
        retried.push(reply.results[0].retried_by);
    }
    assert_eq!(retried[0], retried[1]);
}

#[tokio::test]
async fn named_token_gets_half_of_the_feeds() {
    let env = TestEnv::new().await;
    let limits = SchedulerLimits { feeds: 3, ..SchedulerLimits::default() };
    let service = Service::within(limits, env.store.clone(), Some(env));
    let reader = token(&service, "reader", "read", json!({})).await;
    let feed = async |token: &str| {
        let request = request(Method::GET, "/api/v1/events", &[("authorization", token)], Body::empty());
        service.router.clone().oneshot(request).await.unwrap()
    };
    let open = [feed(&reader).await, feed(&reader).await];
    assert!(open.iter().all(|feed| feed.status() == StatusCode::OK));
    assert_eq!(feed(&reader).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(feed("Bearer 0123456789abcdef").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn aborted_submission_counts_against_the_limit_of_its_token() {
    let service = Service::new().await;
    let store = service.env.as_ref().unwrap().store.clone();
    let editor = token(&service, "editor", "submit", json!({ "open_tasks": 1 })).await;
    submit(&service, "Bearer 0123456789abcdef").await;
    let lock = store.hold("lock table task_labels in access exclusive mode").await;
    let headers = [("authorization", editor.as_str())];
    let body = task();
    let aborted = service.post("/api/v1/tasks", &headers, &body);
    assert!(tokio::time::timeout(Duration::from_millis(300), aborted).await.is_err(), "the task waits for the lock");
    let again = async { service.post("/api/v1/tasks", &headers, &body).await.0 };
    let release = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(lock);
    };
    let (status, ()) = tokio::join!(again, release);
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(store.count_open_tasks().await.unwrap(), 2);
}
