//! kill -9 at every durable step, and of everything at once. The oracle looks from outside.

use std::time::Duration;

use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, SERVICES};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

fn scripts(cluster: &Cluster) {
    let slow = Duration::from_millis(20);
    let add = |n: u32| Reply::Slow(file("add.py", &format!("# try {n}\ndef add(a, b):\n    return a + b")), slow);
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![Reply::Slow(review(50, &[]), slow), Reply::Slow(review(95, &[]), slow)]);
}

/// The service dies at the named place, comes back, and the task ends as if nothing had been.
async fn survives(service: &str, failpoint: &str) {
    let failpoint = Some((service.to_owned(), failpoint.to_owned()));
    let cluster = Cluster::with(Options { failpoint, ..Options::default() }).await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let spec = cluster.spec(&repo);
    // The API may die under the submit: the same key makes it one task, however often it is sent.
    let client = cluster.client.clone();
    let submitting = async {
        loop {
            match client.submit(&spec, Some("the-one")).await {
                Ok(reply) => break reply,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let (reply, ()) = tokio::join!(submitting, cluster.failpoint_hit());
    let again = cluster.submit_again(&spec, "the-one").await;
    assert_eq!(again.id, reply.id, "one key, one task");
    let task = cfq_proto::ids::TaskKey::Id(reply.id);
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.oracle(task, &repo).await;
    assert_eq!(detail.iterations.len(), 2);
    assert_eq!(detail.jobs.len(), 4, "two creator and two critic jobs");
    assert!(detail.jobs.iter().all(|j| j.failures == 0), "a loss is not a failure: {:?}", detail.jobs);
    assert_eq!(cluster.client.tasks(None, 10).await.unwrap().tasks.len(), 1);
    assert_eq!(repo.fingerprint(), before);
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}

macro_rules! killed_at {
    ($($name:ident: $service:literal, $failpoint:literal;)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            survives($service, $failpoint).await;
        })*
    };
}

killed_at! {
    scheduler_before_submit_commits: "scheduler", "scheduler.submit.before_commit";
    scheduler_after_submit_commits: "scheduler", "scheduler.submit.after_commit";
    scheduler_before_placement_commits: "scheduler", "scheduler.place.before_commit";
    scheduler_after_placement_commits: "scheduler", "scheduler.place.after_commit";
    scheduler_after_placement_is_published: "scheduler", "scheduler.place.after_publish";
    scheduler_before_a_grant_commits: "scheduler", "scheduler.grant.before_commit";
    scheduler_after_a_grant_commits: "scheduler", "scheduler.grant.after_commit";
    scheduler_before_a_job_commits: "scheduler", "scheduler.job.before_commit";
    scheduler_after_a_job_commits: "scheduler", "scheduler.job.after_commit";
    scheduler_before_an_acceptance_commits: "scheduler", "scheduler.accept.before_commit";
    scheduler_after_an_acceptance_commits: "scheduler", "scheduler.accept.after_commit";
    scheduler_before_result_commits: "scheduler", "scheduler.result.before_commit";
    scheduler_after_result_commits: "scheduler", "scheduler.result.after_commit";
    scheduler_before_step_commits: "scheduler", "scheduler.step.before_commit:3";
    scheduler_after_step_commits: "scheduler", "scheduler.step.after_commit:3";
    node_after_accepting: "node", "node.accepted";
    node_in_the_middle_of_a_generation: "node", "node.generating:5";
    node_before_reporting: "node", "node.before_report";
    node_after_reporting: "node", "node.reported";
    runner_before_an_artifact_is_recorded: "runner", "runner.before_step.generated";
    runner_after_an_artifact_is_recorded: "runner", "runner.after_step.generated";
    runner_after_a_review_is_recorded: "runner", "runner.after_step.reviewed";
    runner_after_a_decision: "runner", "runner.after_step.decided:2";
    runner_before_the_merge: "runner", "runner.before_merge_ref";
    runner_after_the_merge: "runner", "runner.after_merge_ref";
    runner_before_the_delivery: "runner", "runner.before_deliver";
    runner_after_the_delivery: "runner", "runner.after_deliver";
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_killed_in_the_middle_of_a_generation_goes_on() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    for service in SERVICES {
        cluster.kill9(service);
    }
    for service in SERVICES {
        cluster.start_service(service);
    }
    cluster.is_ready().await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.oracle(task, &repo).await;
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_runner_that_wakes_up_late_changes_nothing() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    cluster.signal("runner", libc::SIGSTOP);
    cluster.lease_swept(task).await;
    cluster.signal("runner", libc::SIGCONT);
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.oracle(task, &repo).await;
    assert!(detail.attempt >= 2, "another attempt took over");
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nats_server_whose_store_is_wiped_loses_nothing() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    cluster.nats.restart_wiped().await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.oracle(task, &repo).await;
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}
