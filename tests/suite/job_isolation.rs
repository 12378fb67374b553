//! Tests of the effects of one job or task on others: a job that crashes its node, tasks that occupy a runner's slots
//! while they wait, and a result or step that cannot be written.

use std::time::Duration;

use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::task::{AgentBinding, TaskSpec, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

fn add() -> String {
    file("add.py", "def add(a, b):\n    return a + b")
}

/// Specification of a small task whose creator uses `model` instead of the configured model.
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

/// The test kills the node whenever the poison job's model is called, as if an engine aborted on that job's prompt.
/// Other jobs on the node are lost with it; they must run again and must not become dead letters.
#[tokio::test(flavor = "multi_thread")]
async fn poison_job_ends_alone_in_the_dead_letter() {
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
        let ended = wait::until("a call of the poison job, or its end", WAIT_LIMIT, || async {
            let detail = cluster.client.task(poison).await.map_err(|e| e.to_string())?;
            match (detail.summary.state.is_settled(), cluster.models.call_count("alpha2") > crashes) {
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
            // The first two times, both jobs run at the same time and are lost together.
            wait::until("both jobs to run", WAIT_LIMIT, || async {
                let states = job_states(&cluster, &[innocent, poison]).await?;
                if states == [JobState::Running; 2] { Ok(()) } else { Err(format!("{states:?}")) }
            })
            .await;
        }
        crashes = cluster.models.call_count("alpha2");
        cluster.kill9("node");
        cluster.start_service("node");
    }
    let evidence = cluster.client.task(poison).await.unwrap();
    assert_eq!(evidence.summary.state, TaskState::Escalated, "{}", evidence.reason);
    assert!(evidence.reason.contains("lost its node 4 times"), "{}", evidence.reason);
    assert_eq!((evidence.jobs.len(), evidence.jobs[0].state, evidence.jobs[0].losses), (1, JobState::Dead, 4));
    let detail = cluster.wait_until_settled(innocent).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let detail = cluster.run_oracle(innocent, &good).await;
    let losses: Vec<i32> = detail.jobs.iter().map(|j| j.losses).collect();
    assert_eq!(losses, [2, 0], "the innocent job was lost only while both jobs ran at once");
    cluster.finish().await;
}

/// The node aborts each time before it accepts the job, as if the preparation of the prompt crashed it.
#[tokio::test(flavor = "multi_thread")]
async fn job_that_crashes_its_node_before_acceptance_ends_in_the_dead_letter() {
    let crash = ("CFQ_FAILPOINT".to_owned(), "node.before_accept".to_owned());
    let mut cluster = Cluster::start_with(Options { node_environment: vec![crash], ..Options::default() }).await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (bad, good) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let poison = cluster.submit(&cluster.spec(&bad)).await;
    let mut crashes = 0;
    while !wait::until("a crash of the node, or the end of the task", WAIT_LIMIT, || async {
        let detail = cluster.client.task(poison).await.map_err(|e| e.to_string())?;
        match (detail.summary.state.is_settled(), cluster.has_exited("node")) {
            (true, _) => Ok(true),
            (false, true) => Ok(false),
            (false, false) => Err(format!("{:?}", detail.jobs)),
        }
    })
    .await
    {
        crashes += 1;
        // A crash while the database was slow says nothing about the job, so it is not counted.
        let counted = cluster.client.task(poison).await.unwrap().jobs[0].unaccepted;
        assert!(
            counted < 4 && crashes <= 12,
            "the job is placed again and again: {crashes} crashes, {counted} counted"
        );
        cluster.kill9("node");
        cluster.start_service("node");
    }
    let detail = cluster.client.task(poison).await.unwrap();
    assert_eq!(
        (detail.summary.state, detail.jobs[0].state),
        (TaskState::Escalated, JobState::Dead),
        "{}",
        detail.reason
    );
    assert!(detail.reason.contains("was not accepted by its node 4 times"), "{}", detail.reason);
    // Which of the two is noticed first depends on the time until the restart.
    let noticed = ["n1 stopped unexpectedly and was restarted", "n1 was lost"];
    for attempt in 1..=crashes {
        let evidence =
            noticed.map(|what| format!("attempt {attempt} on n1: unplaced ({what} before it accepted the job) at 2"));
        assert!(evidence.iter().any(|e| detail.reason.contains(e)), "{evidence:?} is not in {}", detail.reason);
    }
    assert_eq!(cluster.models.call_count("alpha"), 0, "no attempt was accepted");
    let home = tempfile::tempdir().unwrap();
    let shown = cfq(&cluster, home.path(), &["show", &detail.summary.number.to_string()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("attempts: 0 lost, 4 not accepted, 0 failed"), "{shown}");
    cluster.options.node_environment.clear();
    cluster.kill9("node");
    cluster.start_service("node");
    let task = cluster.submit(&cluster.spec(&good)).await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged, "other work continues");
    cluster.finish().await;
}

/// The preparation of each prompt takes longer than a node has to accept a job, resends included.
#[tokio::test(flavor = "multi_thread")]
async fn slow_preparation_of_a_prompt_loses_no_attempt() {
    let mut options = Options::default();
    let delay_ms = 4 * options.timing.accept_timeout_ms;
    options.timing.prepare_timeout_ms = 60_000;
    options.node_environment = vec![("CFQ_FAILPOINT_DELAY".to_owned(), format!("node.preparing:{delay_ms}"))];
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let attempts: Vec<(i32, i32)> = detail.jobs.iter().map(|job| (job.attempt, job.unaccepted)).collect();
    assert_eq!(attempts, [(1, 0), (1, 0)]);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn preparation_without_end_fails_the_task_with_the_reason() {
    let mut options = Options::default();
    options.timing.prepare_timeout_ms = 2_000;
    options.node_environment = vec![("CFQ_FAILPOINT_DELAY".to_owned(), "node.preparing:3600000".to_owned())];
    let cluster = Cluster::start_with(options).await;
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert!(detail.reason.contains("preparing the prompt takes longer than 2 s"), "{}", detail.reason);
    assert!(detail.jobs[0].failures > 0, "{:?}", detail.jobs);
    assert_eq!(cluster.models.call_count("alpha"), 0);
    cluster.finish().await;
}

/// While two tasks wait for an absent model on a runner with two slots, a third task with an available model is merged.
#[tokio::test(flavor = "multi_thread")]
async fn task_waiting_for_a_model_holds_no_runner_slot() {
    let fast = Options::default().timing;
    let timing = Timing { retry_ceiling_ms: 120_000, slot_wait_ms: 500, ..fast };
    let cluster = Cluster::start_with(Options { timing, ..Options::default() }).await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repos: Vec<UserRepo> = (0..3).map(|_| UserRepo::with_uncommitted_changes()).collect();
    let mut waiting = Vec::new();
    for repo in &repos[..2] {
        waiting.push(cluster.submit(&with_creator(&cluster, repo, "openai:scripted/absent")).await);
    }
    for task in &waiting {
        wait::until("a task whose reason names the model", WAIT_LIMIT, || async {
            let detail = cluster.client.task(*task).await.map_err(|e| e.to_string())?;
            let named = detail.reason.contains("no running node has the model openai:scripted/absent");
            match (detail.summary.state, named) {
                (TaskState::Ready, true) => Ok(()),
                _ => Err(format!("{} {}", detail.summary.state, detail.reason)),
            }
        })
        .await;
    }
    let task = cluster.submit(&cluster.spec(&repos[2])).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    for task in waiting {
        assert_eq!(cluster.client.task(task).await.unwrap().summary.state, TaskState::Ready, "still waiting");
        cluster.client.cancel(task, "enough").await.unwrap();
        assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Cancelled);
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unwritable_result_fails_with_the_reason() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.database.raw("alter table jobs add constraint no_results check (completion is null)").await;
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert!(detail.reason.contains("the result could not be written"), "{}", detail.reason);
    assert_eq!(
        cluster.models.call_count("alpha"),
        u64::from(detail.jobs[0].attempt.unsigned_abs()),
        "{:?}",
        detail.jobs
    );
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unwritable_step_escalates_with_the_database_error() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(add())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    cluster.database.raw("alter table steps add constraint no_checks check (kind <> 'checked')").await;
    let (bad, good) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let task = cluster.submit(&cluster.spec(&bad)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("Postgres refused a statement (writing a step)"), "{}", detail.reason);
    cluster.database.raw("alter table steps drop constraint no_checks").await;
    let task = cluster.submit(&cluster.spec(&good)).await;
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged, "the runner still works");
    cluster.finish().await;
}
