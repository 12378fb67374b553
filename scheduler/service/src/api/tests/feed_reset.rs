//! Tests of readers of the event feeds whose position is no longer valid.

use std::time::Duration;

use cfq_proto::http::{FeedReset, FeedResetReason, GcReply};
use http_body_util::BodyExt;

use super::*;

/// Maximum wait for the frames; keep-alive comments do not extend it.
const WAIT: Duration = Duration::from_secs(20);

/// The name, id and data of the first `count` frames of a feed.
async fn frames(service: &Service, path: &str, last_id: Option<&str>, count: usize) -> Vec<(String, String, Value)> {
    let frames = read_frames(service, path, last_id, count);
    tokio::time::timeout(WAIT, frames).await.expect("all frames in time")
}

async fn read_frames(
    service: &Service,
    path: &str,
    last_id: Option<&str>,
    count: usize,
) -> Vec<(String, String, Value)> {
    let headers: Vec<(&str, &str)> = last_id.map(|id| ("last-event-id", id)).into_iter().collect();
    let response = service.router.clone().oneshot(request(Method::GET, path, &headers, Body::empty())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body();
    let mut text = String::new();
    let mut found = Vec::new();
    while found.len() < count {
        let frame = body.frame().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        while let Some((block, rest)) = text.split_once("\n\n") {
            let field =
                |name: &str| block.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().trim().to_owned();
            if let Ok(data) = serde_json::from_str(&field("data:")) {
                found.push((field("event:"), field("id:"), data));
            }
            text = rest.to_owned();
        }
    }
    found
}

fn reason(frame: &(String, String, Value)) -> FeedResetReason {
    assert_eq!((frame.0.as_str(), frame.1.as_str()), ("reset", ""), "{frame:?}");
    serde_json::from_value::<FeedReset>(frame.2.clone()).unwrap().reason
}

/// The task number and `task_seq` of each event.
fn events(frames: &[(String, String, Value)]) -> Vec<(i64, i64)> {
    let number = |value: &Value| value.as_i64().unwrap();
    frames.iter().map(|(_, _, event)| (number(&event["number"]), number(&event["task_seq"]))).collect()
}

#[tokio::test]
async fn reader_that_missed_deleted_events_gets_a_reset() {
    let service = Service::new().await;
    for _ in 0..2 {
        assert_eq!(service.post("/api/v1/tasks", &[], &task()).await.0, StatusCode::CREATED);
    }
    let first = frames(&service, "/api/v1/events", None, 1).await.remove(0);
    service.post("/api/v1/tasks/t1/cancel", &[], &json!({})).await;
    let resumed = frames(&service, "/api/v1/events", Some(&first.1), 2).await;
    assert_eq!(events(&resumed), [(2, 1), (1, 2)], "nothing is deleted yet");

    let (_, body) = service.post("/api/v1/gc", &[], &json!({"dry_run": true, "older_than_days": 0})).await;
    let counted: GcReply = read(&body);
    assert_eq!((counted.tasks, counted.events, counted.finished), (1, 2, true));
    let (_, body) = service.post("/api/v1/gc", &[], &json!({})).await;
    assert_eq!(read::<GcReply>(&body).tasks, 0, "the configured retention is longer");
    let (_, body) = service.post("/api/v1/gc", &[], &json!({"older_than_days": 0})).await;
    assert_eq!(read::<GcReply>(&body).tasks, 1);
    assert_eq!(service.get("/api/v1/tasks/t1").await.0, StatusCode::NOT_FOUND);
    assert_eq!(service.post("/api/v1/gc", &[], &json!({"older_than_days": -1})).await.0, StatusCode::BAD_REQUEST);

    let received = frames(&service, "/api/v1/events", Some(&first.1), 2).await;
    assert_eq!(reason(&received[0]), FeedResetReason::Deleted);
    assert_eq!(events(&received[1..]), [(2, 1)], "the kept events follow");
    let current = resumed.last().unwrap().1.clone();
    service.post("/api/v1/tasks", &[], &task()).await;
    assert_eq!(events(&frames(&service, "/api/v1/events", Some(&current), 1).await), [(3, 1)], "it missed nothing");
    assert_eq!(events(&frames(&service, "/api/v1/events", None, 2).await), [(2, 1), (3, 1)], "a new reader");
}

#[tokio::test]
async fn reader_of_a_restored_database_gets_a_reset_and_every_event() {
    let env = TestEnv::new().await;
    env.submit().await;
    let (env, restored) = env.copied().await;
    let old = Service::over(env.store.clone(), Some(env));
    let restored = Service::over(restored.store.clone(), Some(restored));
    // The restored database gets its own task t2, before the original one does.
    restored.env.as_ref().unwrap().submit().await;
    old.env.as_ref().unwrap().submit().await;
    let last = frames(&old, "/api/v1/events", None, 2).await.remove(1).1;
    let before_epochs = last.rsplit_once('-').unwrap().0.to_owned();
    for position in [last, before_epochs] {
        let received = frames(&restored, "/api/v1/events", Some(&position), 3).await;
        assert_eq!(reason(&received[0]), FeedResetReason::Restored, "{position}");
        assert_eq!(events(&received[1..]), [(1, 1), (2, 1)]);
        let resumed = frames(&restored, "/api/v1/events", Some(&received[1].1), 1).await;
        assert_eq!(events(&resumed), [(2, 1)], "the new positions are valid");
    }
    let of_task = frames(&old, "/api/v1/tasks/t1/feed", None, 1).await.remove(0).1;
    assert!(of_task.starts_with("1-"), "{of_task}");
    for position in [&*of_task, "9"] {
        let received = frames(&restored, "/api/v1/tasks/t1/feed", Some(position), 2).await;
        assert_eq!(reason(&received[0]), FeedResetReason::Restored, "{position}");
        assert_eq!(events(&received[1..]), [(1, 1)]);
    }
}
