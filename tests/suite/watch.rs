//! Tests of `cfq watch` with a task that changes between two of the command's requests. A fake HTTP API produces
//! sequences of replies that the real scheduler produces only rarely. As with the real scheduler, the feed of a task
//! that has ended stays open without events.

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
use cfq_proto::loop_step::LoopState;
use cfq_proto::task::Priority;
use cfq_proto::task::TaskState::{self, Escalated, Failed, Merged, Ready, Running};
use cfq_tests::cfq_process::CfqProcess;
use futures::StreamExt;

/// Replies of the fake API. The n-th reply is the n-th element of a list; after the end of the list, it is the last
/// element.
struct Script {
    states: Vec<TaskState>,
    /// Number of events that exist at each request of the event page.
    pages: Vec<usize>,
    /// The states that the task enters, one per event.
    events: Vec<TaskState>,
    /// Number of events that exist when the feed is opened. The feed sends those that the client has not seen, and then
    /// nothing.
    feed: usize,
}

/// Number of requests of each kind so far.
#[derive(Default)]
struct RequestCounts {
    details: usize,
    pages: usize,
    feeds: usize,
}

struct FakeApi {
    script: Script,
    requests: Mutex<RequestCounts>,
    id: TaskId,
}

impl FakeApi {
    async fn serve(script: Script) -> (Arc<Self>, SocketAddr) {
        let api = Arc::new(Self { script, requests: Mutex::default(), id: TaskId::fresh() });
        let app = Router::new()
            .route("/api/v1/tasks/{key}", get(detail))
            .route("/api/v1/tasks/{key}/events", get(page))
            .route("/api/v1/tasks/{key}/feed", get(feed))
            .route("/api/v1/tasks/{key}/resolve", post(resolve))
            .with_state(api.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        (api, addr)
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

/// The n-th element of a list, or its last.
fn nth<T: Copy>(list: &[T], n: &mut usize) -> T {
    *n += 1;
    *list.get(*n - 1).or(list.last()).unwrap()
}

async fn detail(State(api): State<Arc<FakeApi>>) -> Json<TaskDetail> {
    let state = nth(&api.script.states, &mut api.requests.lock().unwrap().details);
    Json(TaskDetail {
        summary: TaskSummary {
            id: api.id,
            number: TaskNumber(1),
            state,
            loop_state: LoopState::Idle,
            title: "add".into(),
            repo: String::new(),
            base: None,
            priority: Priority::P2,
            iteration: 1,
            max_iterations: 5,
            best_score: None,
            threshold: 85.0,
            created_at: 0.0,
            updated_at: 0.0,
            labels: vec![],
            retry_of: None,
            waiting_reason: None,
            reason: None,
            is_bottleneck: false,
            is_acknowledged: false,
        },
        spec: serde_json::from_value(serde_json::json!({ "description": "add", "repo": "/r" })).unwrap(),
        reason: String::new(),
        iterations: vec![],
        best_iteration: None,
        escalation: None,
        pr: None,
        merge_checks: Vec::new(),
        delivered_branch: None,
        delivered_commit: None,
        jobs: vec![],
        runner: None,
        activity: None,
        attempt: 1,
        active_ms: 0,
        predecessors: vec![],
        dependents: vec![],
        reported_defects: vec![],
    })
}

#[derive(serde::Deserialize)]
struct After {
    after: i64,
}

async fn page(State(api): State<Arc<FakeApi>>, Query(query): Query<After>) -> Json<EventList> {
    let to = nth(&api.script.pages, &mut api.requests.lock().unwrap().pages);
    Json(EventList { events: api.events(query.after, to) })
}

async fn feed(State(api): State<Arc<FakeApi>>, headers: HeaderMap) -> Response {
    api.requests.lock().unwrap().feeds += 1;
    let after = headers["Last-Event-ID"].to_str().unwrap().parse().unwrap();
    let frames = api.events(after, api.script.feed).into_iter().map(|event| {
        let text =
            format!("event: event\nid: {}\ndata: {}\n\n", event.task_seq, serde_json::to_string(&event).unwrap());
        Ok::<_, Infallible>(Bytes::from(text))
    });
    // The feed stays open, as the real one does.
    let frames = futures::stream::iter(frames).chain(futures::stream::pending());
    Response::builder().header("content-type", "text/event-stream").body(Body::from_stream(frames)).unwrap()
}

async fn resolve(State(api): State<Arc<FakeApi>>) -> Json<StateReply> {
    Json(StateReply { id: api.id, number: TaskNumber(1), state: Ready, note: String::new() })
}

/// Runs `cfq ARGS` against the fake API until it exits. Returns its exit code and its output.
async fn run_cfq(addr: SocketAddr, args: &[&str]) -> (Option<i32>, String) {
    let home = tempfile::tempdir().unwrap();
    let mut cfq = CfqProcess::start(home.path(), args, &format!("http://{addr}"));
    let status = cfq.wait_for_exit().await;
    (status.code(), cfq.output())
}

#[tokio::test(flavor = "multi_thread")]
async fn task_that_ends_between_two_replies_ends_watch() {
    for (end, code) in [(Merged, 0), (Escalated, 3), (Failed, 4)] {
        // The task is running at the first request of the task, and has ended at the request of its events.
        let script = Script { states: vec![Running, end], pages: vec![2], events: vec![Running, end], feed: 2 };
        let (api, addr) = FakeApi::serve(script).await;
        let (exit_code, output) = run_cfq(addr, &["watch", "t1"]).await;
        assert_eq!(exit_code, Some(code), "{output}");
        assert!(output.contains(&format!("t1 is {end}")), "{output}");
        // The state was requested again; at the end of a merged task, also its branch.
        assert_eq!(api.requests.lock().unwrap().details, if end == Merged { 3 } else { 2 });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn escalation_after_a_resolve_ends_its_watch() {
    let events = vec![Running, Escalated, Ready, Running, Escalated];
    let script = Script { states: vec![Running, Escalated], pages: vec![2, 5], events, feed: 5 };
    let (api, addr) = FakeApi::serve(script).await;
    let args = ["resolve", "t1", "--action", "retry_with_constraints", "--constraint", "be short", "--watch"];
    let (exit_code, output) = run_cfq(addr, &args).await;
    assert_eq!(exit_code, Some(3), "{output}");
    assert_eq!(output.matches("is escalated").count(), 1, "the first escalation is not reported again: {output}");
    assert_eq!(api.requests.lock().unwrap().pages, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn escalation_that_is_already_resolved_does_not_end_watch() {
    let events = vec![Running, Escalated, Ready, Running, Merged];
    let script = Script { states: vec![Running, Ready], pages: vec![2], events, feed: 5 };
    let (api, addr) = FakeApi::serve(script).await;
    let (exit_code, output) = run_cfq(addr, &["watch", "t1"]).await;
    assert_eq!(exit_code, Some(0), "{output}");
    assert!(output.contains("t1 is merged"), "{output}");
    assert_eq!(api.requests.lock().unwrap().feeds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn escalation_after_the_event_page_ends_watch() {
    let script = Script { states: vec![Running], pages: vec![1], events: vec![Running, Escalated], feed: 2 };
    let (api, addr) = FakeApi::serve(script).await;
    let (exit_code, output) = run_cfq(addr, &["watch", "t1"]).await;
    assert_eq!(exit_code, Some(3), "{output}");
    assert_eq!(api.requests.lock().unwrap().feeds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_reports_the_state_in_which_a_task_settles() {
    for (end, code) in [(Merged, 0), (Escalated, 3), (Failed, 4)] {
        let script = Script { states: vec![Running, Running, end], pages: vec![2], events: vec![Running], feed: 2 };
        let (_api, addr) = FakeApi::serve(script).await;
        let (exit_code, output) = run_cfq(addr, &["wait", "t1"]).await;
        assert_eq!((exit_code, output.contains(&format!("t1 is {end}"))), (Some(code), true), "{output}");
    }
    let script = Script { states: vec![Running], pages: vec![2], events: vec![Running], feed: 2 };
    let (_api, addr) = FakeApi::serve(script).await;
    let (exit_code, output) = run_cfq(addr, &["wait", "t1", "--timeout", "1s"]).await;
    assert!(exit_code == Some(6) && output.contains("not ended in time: t1; the tasks continue"), "{output}");
}
