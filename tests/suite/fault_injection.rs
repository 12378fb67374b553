//! Fault injection: every service is killed at every durable step, all are killed at once, a runner is suspended, NATS
//! loses its store. The oracle checks the result from outside.

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

/// Runs a task during which the service aborts at the failpoint and is restarted. The task must end as it does without
/// the fault.
async fn survives_crash_at(service: &str, failpoint: &str) {
    let failpoint = Some((service.to_owned(), failpoint.to_owned()));
    let cluster = Cluster::start_with(Options { failpoint, ..Options::default() }).await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let spec = cluster.spec(&repo);
    // The API may abort during the submission; repeated submissions with the same key create only one task.
    let client = cluster.client.clone();
    let submitting = async {
        loop {
            match client.submit(&spec, Some("the-one")).await {
                Ok(reply) => break reply,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let (reply, ()) = tokio::join!(submitting, cluster.restart_after_failpoint());
    let again = cluster.submit_with_retries(&spec, "the-one").await;
    assert_eq!(again.id, reply.id, "one key, one task");
    let task = cfq_proto::ids::TaskKey::Id(reply.id);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.run_oracle(task, &repo).await;
    assert_eq!(detail.iterations.len(), 2);
    assert_eq!(detail.jobs.len(), 4, "two creator and two critic jobs");
    assert!(detail.jobs.iter().all(|j| j.failures == 0), "a loss is not a failure: {:?}", detail.jobs);
    assert_eq!(cluster.client.tasks(None, 10).await.unwrap().tasks.len(), 1);
    assert_eq!(repo.fingerprint(), before);
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}

macro_rules! crash_tests {
    ($($name:ident: $service:literal, $failpoint:literal;)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            survives_crash_at($service, $failpoint).await;
        })*
    };
}

crash_tests! {
    scheduler_crash_before_submit_commit: "scheduler", "scheduler.submit.before_commit";
    scheduler_crash_after_submit_commit: "scheduler", "scheduler.submit.after_commit";
    scheduler_crash_before_placement_commit: "scheduler", "scheduler.place.before_commit";
    scheduler_crash_after_placement_commit: "scheduler", "scheduler.place.after_commit";
    scheduler_crash_after_placement_publish: "scheduler", "scheduler.place.after_publish";
    scheduler_crash_before_grant_commit: "scheduler", "scheduler.grant.before_commit";
    scheduler_crash_after_grant_commit: "scheduler", "scheduler.grant.after_commit";
    scheduler_crash_before_job_commit: "scheduler", "scheduler.job.before_commit";
    scheduler_crash_after_job_commit: "scheduler", "scheduler.job.after_commit";
    scheduler_crash_before_accept_commit: "scheduler", "scheduler.accept.before_commit";
    scheduler_crash_after_accept_commit: "scheduler", "scheduler.accept.after_commit";
    scheduler_crash_before_result_commit: "scheduler", "scheduler.result.before_commit";
    scheduler_crash_after_result_commit: "scheduler", "scheduler.result.after_commit";
    scheduler_crash_before_step_commit: "scheduler", "scheduler.step.before_commit:3";
    scheduler_crash_after_step_commit: "scheduler", "scheduler.step.after_commit:3";
    node_crash_after_accept: "node", "node.accepted";
    node_crash_during_generation: "node", "node.generating:5";
    node_crash_before_report: "node", "node.before_report";
    node_crash_after_report: "node", "node.reported";
    runner_crash_before_artifact_is_recorded: "runner", "runner.before_step.generated";
    runner_crash_after_artifact_is_recorded: "runner", "runner.after_step.generated";
    runner_crash_after_review_is_recorded: "runner", "runner.after_step.reviewed";
    runner_crash_after_decision: "runner", "runner.after_step.decided:2";
    runner_crash_before_merge: "runner", "runner.before_merge_ref";
    runner_crash_after_merge: "runner", "runner.after_merge_ref";
    runner_crash_before_delivery: "runner", "runner.before_deliver";
    runner_crash_while_the_branch_is_locked: "runner", "runner.branch_locked";
    runner_crash_after_delivery: "runner", "runner.after_deliver";
}

#[tokio::test(flavor = "multi_thread")]
async fn all_services_killed_during_generation_resume() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    for service in SERVICES {
        cluster.kill9(service);
    }
    for service in SERVICES {
        cluster.start_service(service);
    }
    cluster.wait_until_ready().await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.run_oracle(task, &repo).await;
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_runner_resuming_after_lease_expiry_has_no_effect() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    cluster.signal("runner", libc::SIGSTOP);
    cluster.wait_until_lease_swept(task).await;
    cluster.signal("runner", libc::SIGCONT);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.run_oracle(task, &repo).await;
    assert!(detail.attempt >= 2, "another attempt took the task over");
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wiped_nats_store_loses_no_work() {
    let cluster = Cluster::start().await;
    scripts(&cluster);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    cluster.nats.restart_wiped().await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.run_oracle(task, &repo).await;
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}
