//! What one job may do to others: break the node under them, hold a runner's slot, or have a result that cannot be written.

use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::task::{AgentBinding, TaskSpec, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

fn add() -> String {
    file("add.py", "def add(a, b):\n    return a + b")
}

/// The task, with another creator than the configured one.
fn with_creator(cluster: &Cluster, repo: &UserRepo, model: &str) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.agents.alpha = AgentBinding { model: model.parse().ok(), ..AgentBinding::default() };
    spec
}

async fn job_states(cluster: &Cluster, tasks: &[TaskKey]) -> Result<Vec<JobState>, String> {
    let mut states = Vec::new();
    for task in tasks {
        let detail = cluster.client.task(*task).await.map_err(|e| e.to_string())?;
        states.extend(detail.jobs.iter().map(|j| j.state));
    }
    Ok(states)
}

/// The node dies whenever this model is asked, as by an engine that aborts on one prompt. Its neighbours lose the node with
/// it, but not their lives.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_breaks_its_node_ends_alone_in_the_dead_letter() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha2", vec![Reply::Hang]);
    let slow = Duration::from_millis(150);
    cluster.models.script("alpha", vec![Reply::Slow(add(), slow)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (bad, good) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let poison = with_creator(&cluster, &bad, "openai:scripted/alpha2");
    let innocent = cluster.submit(&cluster.spec(&good)).await;
    let poison = cluster.submit(&poison).await;
    let mut crashes = 0;
    loop {
        let ended = wait::until("a call of the poison, or its end", PATIENCE, || async {
            let detail = cluster.client.task(poison).await.map_err(|e| e.to_string())?;
            match (detail.summary.state.is_resting(), cluster.models.calls("alpha2") > crashes) {
                (true, _) => Ok(true),
                (false, true) => Ok(false),
                (false, false) => Err(format!("{:?}", detail.jobs)),
            }
        })
        .await;
        if ended {
            break;
        }
        if crashes < 2 {
            // The first two times they run side by side, and go down together.
            wait::until("both at work", PATIENCE, || async {
                let states = job_states(&cluster, &[innocent, poison]).await?;
                if states == [JobState::Running; 2] { Ok(()) } else { Err(format!("{states:?}")) }
            })
            .await;
        }
        crashes = cluster.models.calls("alpha2");
        cluster.kill9("node");
        cluster.start_service("node");
    }
    let evidence = cluster.client.task(poison).await.unwrap();
    assert_eq!(evidence.summary.state, TaskState::Escalated, "{}", evidence.reason);
    assert!(evidence.reason.contains("lost its node 4 times"), "{}", evidence.reason);
    assert_eq!((evidence.jobs.len(), evidence.jobs[0].state, evidence.jobs[0].losses), (1, JobState::Dead, 4));
    let detail = cluster.rests(innocent).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.oracle(innocent, &good).await;
    let losses: Vec<i32> = detail.jobs.iter().map(|j| j.losses).collect();
    assert_eq!(losses, [2, 0], "only while they ran side by side");
    cluster.finish().await;
}

/// With both of a runner's slots taken by tasks that wait for a model, a third whose model is there is done all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_a_place_does_not_hold_a_slot() {
    let fast = Options::default().timing;
    let timing = Timing { retry_ceiling_ms: 120_000, slot_wait_ms: 500, ..fast };
    let cluster = Cluster::with(Options { timing, ..Options::default() }).await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repos: Vec<UserRepo> = (0..3).map(|_| UserRepo::with_uncommitted_changes()).collect();
    let mut waiting = Vec::new();
    for repo in &repos[..2] {
        waiting.push(cluster.submit(&with_creator(&cluster, repo, "openai:scripted/absent")).await);
    }
    for task in &waiting {
        wait::until("a task that says what it waits for", PATIENCE, || async {
            let detail = cluster.client.task(*task).await.map_err(|e| e.to_string())?;
            let says = detail.reason.contains("no node that is up has the model openai:scripted/absent");
            match (detail.summary.state, says) {
                (TaskState::Ready, true) => Ok(()),
                _ => Err(format!("{} {}", detail.summary.state, detail.reason)),
            }
        })
        .await;
    }
    let task = cluster.submit(&cluster.spec(&repos[2])).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    for task in waiting {
        assert_eq!(cluster.client.task(task).await.unwrap().summary.state, TaskState::Ready, "it waits on");
        cluster.client.cancel(task, "enough").await.unwrap();
        assert_eq!(cluster.rests(task).await.summary.state, TaskState::Cancelled);
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_can_never_be_written_ends_as_a_failure_that_says_so() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.database.raw("alter table jobs add constraint no_results check (completion is null)").await;
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.rests(task).await;
    assert!(detail.reason.contains("the result could not be written"), "{}", detail.reason);
    assert_eq!(cluster.models.calls("alpha"), u64::from(detail.jobs[0].attempt.unsigned_abs()), "{:?}", detail.jobs);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_can_never_be_written_ends_the_task_with_the_databases_word() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    cluster.database.raw("alter table steps add constraint no_checks check (kind <> 'checked')").await;
    let (bad, good) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let task = cluster.submit(&cluster.spec(&bad)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("Postgres refused a statement (writing a step)"), "{}", detail.reason);
    cluster.database.raw("alter table steps drop constraint no_checks").await;
    let task = cluster.submit(&cluster.spec(&good)).await;
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Merged, "the runner works on");
    cluster.finish().await;
}
