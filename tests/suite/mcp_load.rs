//! Many tasks of one editor's AI: they start in order, and none is lost when the bridge is killed.

use cfq_proto::event::{EventBody, RunnerChange};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use serde_json::{Value, json};

/// Tasks that run at once.
const RUNNING: usize = 5;
/// Tasks that wait for a place.
const WAITING: usize = 20;

fn delegated(n: usize) -> Value {
    json!({ "spec": { "description": format!("Write file {n}."), "idempotency_key": format!("key-{n}") } })
}

/// Time at which a runner got the task.
async fn granted_at(cluster: &Cluster, task: TaskKey) -> f64 {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    let granted = events
        .iter()
        .find(|event| matches!(event.body, EventBody::RunnerChanged { change: RunnerChange::Granted, .. }));
    granted.expect("a runner got the task").at
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_tasks_start_in_order_although_the_bridge_is_killed_twice() {
    // On a busy machine, a lease of the other tests' time may be lost, and another task starts.
    let timing = Timing::default();
    let cluster = Cluster::start_with(Options { runner_slots: RUNNING, timing, ..Options::default() }).await;
    let gate = Gate::closed();
    let replies = (0..RUNNING + WAITING).map(|n| {
        let reply = file(&format!("file{n}.py"), &format!("N = {n}\n"));
        let (first, rest) = reply.split_at(5);
        Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone())
    });
    cluster.models.script("alpha", replies.collect());
    cluster.models.script("beta", vec![Reply::Text(review(93, &[])); RUNNING + WAITING]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let mut sessions = Vec::new();
    for n in 0..RUNNING + WAITING {
        if n == RUNNING + 7 {
            // The bridge is killed in the middle of a call, before the caller knows its result.
            let params = json!({ "name": "execute_task_spec", "arguments": delegated(n) });
            mcp.send("tools/call", params).await;
            drop(mcp);
            mcp = McpClient::start(&cluster, &repo.path(), "2025-11-25").await;
        }
        let accepted = mcp.call("execute_task_spec", delegated(n)).await;
        let task: TaskKey = accepted["session_id"].as_str().unwrap().parse().unwrap();
        sessions.push(task);
        if n < RUNNING {
            cluster.wait_for_state(task, TaskState::Running).await;
        }
    }
    for (n, task) in sessions.iter().enumerate().skip(RUNNING) {
        let progress = mcp.call("get_progress_summary", json!({ "session_id": task.to_string() })).await;
        assert_eq!(
            (&progress["state"], &progress["tasks_before"]),
            (&json!("ready"), &json!(n - RUNNING)),
            "{progress}"
        );
    }
    let listed = mcp.call("list_tasks", json!({ "limit": 100 })).await;
    assert_eq!(
        listed["tasks"].as_array().unwrap().len(),
        RUNNING + WAITING,
        "the repeated call created no second task"
    );

    // The bridge is killed in the middle of a wait, then the models continue.
    let wait = json!({ "session_id": sessions[0].to_string(), "wait_s": 45 });
    mcp.send("tools/call", json!({ "name": "get_progress_summary", "arguments": wait })).await;
    drop(mcp);
    gate.open();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    for task in &sessions {
        let mut arguments = json!({ "session_id": task.to_string(), "wait_s": 45 });
        let ended = loop {
            let progress = mcp.call("get_progress_summary", arguments.clone()).await;
            if progress["ended"] == json!(true) || progress["needs_decision"] == json!(true) {
                break progress;
            }
            arguments["after_event"] = progress["last_event"].clone();
        };
        assert_eq!(ended["state"], json!("merged"), "{ended}");
    }
    let mut granted = Vec::new();
    for task in &sessions {
        granted.push(granted_at(&cluster, *task).await);
    }
    assert!(granted.is_sorted(), "{granted:?}");
    assert_eq!(cluster.models.call_count("alpha"), (RUNNING + WAITING) as u64);
    cluster.finish().await;
}
