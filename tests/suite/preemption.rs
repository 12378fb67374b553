//! Tests of preemption: a task of P0 gets the runner slot of a task of a lower class after that task's next step.

use cfq_proto::event::EventBody;
use cfq_proto::task::{Priority, TaskState};
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, tail};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;

/// The only runner slot is in use by a task of P3 that needs two iterations. A task of P0 that is submitted in the first
/// one is merged before it, and nothing of the first task is done twice.
#[tokio::test(flavor = "multi_thread")]
async fn urgent_task_gets_the_only_slot_after_the_next_step() {
    let cluster = Cluster::start_with(Options { runner_slots: 1, ..Options::default() }).await;
    let (gate, repo) = (Gate::closed(), UserRepo::with_uncommitted_changes());
    let first = Reply::Gated(String::new(), file("add.py", "# try 1\n"), gate.clone());
    cluster.models.script("alpha", vec![first, Reply::Text(file("add.py", "# try 2\n"))]);
    cluster.models.script("alpha2", vec![Reply::Text(file("mul.py", "# urgent\n"))]);
    // The review of the urgent task is the first one.
    cluster.models.script("beta", [95, 50, 95].map(|score| Reply::Text(review(score, &[]))).to_vec());
    let mut spec = cluster.spec(&repo);
    spec.priority = Priority::P3;
    let long = cluster.submit(&spec).await;
    cluster.wait_until_generating(long).await;
    (spec.priority, spec.agents.alpha.model) = (Priority::P0, Some(cluster.model("alpha2")));
    let urgent = cluster.submit(&spec).await;
    wait::until("a victim to be named", WAIT_LIMIT, || async {
        let log = std::fs::read_to_string(cluster.log("scheduler")).unwrap_or_default();
        let is_named = log.contains("task is preempted after its next step");
        if is_named { Ok(()) } else { Err(tail(&cluster.log("scheduler"))) }
    })
    .await;
    gate.open();
    let urgent_end = cluster.wait_until_settled(urgent).await;
    let long_end = cluster.wait_until_settled(long).await;

    assert_eq!(urgent_end.summary.state, TaskState::Merged, "{}", urgent_end.reason);
    assert_eq!(long_end.summary.state, TaskState::Merged, "{}", long_end.reason);
    assert!(urgent_end.summary.updated_at < long_end.summary.updated_at, "the task of P0 was merged first");
    assert_eq!((urgent_end.attempt, long_end.attempt), (1, 2), "one preemption");
    let events = cluster.client.events(long, 0).await.unwrap().events;
    let released = events.iter().find_map(|event| match &event.body {
        EventBody::TaskStateChanged { to: TaskState::Ready, reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(released.as_ref().is_some_and(|reason| reason.contains("preempted by t2")), "{released:?}");
    let calls = ["alpha", "alpha2", "beta"].map(|model| cluster.models.call_count(model));
    assert_eq!(calls, [2, 1, 3], "no call was repeated");
    assert!(long_end.jobs.iter().all(|job| (job.attempt, job.losses) == (1, 0)), "{:?}", long_end.jobs);
    for task in [urgent, long] {
        cluster.run_oracle(task, &repo).await;
    }
    cluster.finish().await;
}
