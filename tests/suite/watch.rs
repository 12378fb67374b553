//! `cfq watch` where a task changes between two of its requests. A double of the HTTP API, outside the product, answers in an
//! order that the real scheduler gives only now and then: the feed of a task that has come to rest says nothing for ever.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{EventList, StateReply, TaskDetail, TaskSummary};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::looping::LoopState;
use cfq_proto::task::Priority;
use cfq_proto::task::TaskState::{self, Escalated, Failed, Merged, Ready, Running};
use cfq_tests::started::Started;
use futures::StreamExt;

/// What the double says. The n-th answer is the n-th of a list, and the last one from then on.
struct Script {
    states: Vec<TaskState>,
    /// How many of the events there are when they are asked for as a page.
    pages: Vec<usize>,
    /// What the task became, in the order of its events.
    events: Vec<TaskState>,
    /// How many of the events there are when the feed is opened; it says those the client has not seen, then nothing.
    feed: usize,
}

#[derive(Default)]
struct Asked {
    details: usize,
    pages: usize,
    feeds: usize,
}

struct Double {
    script: Script,
    asked: Mutex<Asked>,
    id: TaskId,
}

impl Double {
    async fn serve(script: Script) -> (Arc<Self>, SocketAddr) {
        let double = Arc::new(Self { script, asked: Mutex::default(), id: TaskId::fresh() });
        let app = Router::new()
            .route("/api/v1/tasks/{key}", get(detail))
            .route("/api/v1/tasks/{key}/events", get(page))
            .route("/api/v1/tasks/{key}/feed", get(feed))
            .route("/api/v1/tasks/{key}/resolve", post(resolve))
            .with_state(double.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        (double, addr)
    }

    fn events(&self, after: i64, to: usize) -> Vec<Event> {
        let mut from = Ready;
        let mut events = Vec::new();
        for (index, state) in self.script.events[..to].iter().enumerate() {
            let seq = index as i64 + 1;
            let body = EventBody::TaskStateChanged { from, to: *state, reason: String::new() };
            from = *state;
            if seq > after {
                events.push(Event { id: seq, task: self.id, number: TaskNumber(1), task_seq: seq, at: 0.0, body });
            }
        }
        events
    }
}

/// The n-th of a list, or its last.
fn nth<T: Copy>(list: &[T], n: &mut usize) -> T {
    *n += 1;
    *list.get(*n - 1).or(list.last()).unwrap()
}

async fn detail(State(double): State<Arc<Double>>) -> Json<TaskDetail> {
    let state = nth(&double.script.states, &mut double.asked.lock().unwrap().details);
    Json(TaskDetail {
        summary: TaskSummary {
            id: double.id,
            number: TaskNumber(1),
            state,
            loop_state: LoopState::Idle,
            title: "add".into(),
            priority: Priority::P2,
            iteration: 1,
            max_iterations: 5,
            best_score: None,
            threshold: 85.0,
            created_at: 0.0,
            updated_at: 0.0,
            retry_of: None,
        },
        spec: serde_json::from_value(serde_json::json!({ "description": "add", "repo": "/r" })).unwrap(),
        reason: String::new(),
        iterations: vec![],
        best_iteration: None,
        escalation: None,
        pr: None,
        delivered_branch: None,
        delivered_commit: None,
        jobs: vec![],
        runner: None,
        attempt: 1,
        active_ms: 0,
    })
}

#[derive(serde::Deserialize)]
struct After {
    after: i64,
}

async fn page(State(double): State<Arc<Double>>, Query(query): Query<After>) -> Json<EventList> {
    let to = nth(&double.script.pages, &mut double.asked.lock().unwrap().pages);
    Json(EventList { events: double.events(query.after, to) })
}

async fn feed(State(double): State<Arc<Double>>, headers: HeaderMap) -> Response {
    double.asked.lock().unwrap().feeds += 1;
    let after = headers["Last-Event-ID"].to_str().unwrap().parse().unwrap();
    let said = double.events(after, double.script.feed).into_iter().map(|event| {
        let text =
            format!("event: event\nid: {}\ndata: {}\n\n", event.task_seq, serde_json::to_string(&event).unwrap());
        Ok::<_, Infallible>(Bytes::from(text))
    });
    // It stays open, as the real one does.
    let frames = futures::stream::iter(said).chain(futures::stream::pending());
    Response::builder().header("content-type", "text/event-stream").body(Body::from_stream(frames)).unwrap()
}

async fn resolve(State(double): State<Arc<Double>>) -> Json<StateReply> {
    Json(StateReply { id: double.id, number: TaskNumber(1), state: Ready })
}

/// Runs `cfq ARGS` against the double to its end; returns its exit code, and what it said.
async fn ends(addr: SocketAddr, args: &[&str]) -> (Option<i32>, String) {
    let home = tempfile::tempdir().unwrap();
    let mut watch = Started::start(home.path(), args, &format!("http://{addr}"));
    let status = watch.ends().await;
    (status.code(), watch.said())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_comes_to_rest_between_two_answers_ends_the_watch() {
    for (rest, code) in [(Merged, 0), (Escalated, 3), (Failed, 4)] {
        // It runs when it is asked for, and rests when its events are.
        let script = Script { states: vec![Running, rest], pages: vec![2], events: vec![Running, rest], feed: 2 };
        let (double, addr) = Double::serve(script).await;
        let (ended, said) = ends(addr, &["watch", "t1"]).await;
        assert_eq!(ended, Some(code), "{said}");
        assert!(said.contains(&format!("t1 is {rest}")), "{said}");
        assert_eq!(double.asked.lock().unwrap().details, 2, "its state was asked for again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_rests_again_at_once_ends_the_watch_of_its_answer() {
    let events = vec![Running, Escalated, Ready, Running, Escalated];
    let script = Script { states: vec![Running, Escalated], pages: vec![2, 5], events, feed: 5 };
    let (double, addr) = Double::serve(script).await;
    let args = ["resolve", "t1", "--action", "retry_with_constraints", "--constraint", "be short", "--watch"];
    let (ended, said) = ends(addr, &args).await;
    assert_eq!(ended, Some(3), "{said}");
    assert_eq!(said.matches("is escalated").count(), 1, "the rest before the answer is not told: {said}");
    assert_eq!(double.asked.lock().unwrap().pages, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rest_that_was_answered_meanwhile_does_not_end_the_watch() {
    let events = vec![Running, Escalated, Ready, Running, Merged];
    let script = Script { states: vec![Running, Ready], pages: vec![2], events, feed: 5 };
    let (double, addr) = Double::serve(script).await;
    let (ended, said) = ends(addr, &["watch", "t1"]).await;
    assert_eq!(ended, Some(0), "{said}");
    assert!(said.contains("t1 is merged"), "{said}");
    assert_eq!(double.asked.lock().unwrap().feeds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rest_that_comes_after_the_page_of_events_is_in_the_feed() {
    let script = Script { states: vec![Running], pages: vec![1], events: vec![Running, Escalated], feed: 2 };
    let (double, addr) = Double::serve(script).await;
    let (ended, said) = ends(addr, &["watch", "t1"]).await;
    assert_eq!(ended, Some(3), "{said}");
    assert_eq!(double.asked.lock().unwrap().feeds, 1);
}
