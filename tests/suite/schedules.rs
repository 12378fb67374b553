//! Tests of schedules, through the command line. A schedule is made due by moving its next instant into the past, as if
//! cfq had not run since then.

use cfq_proto::http::ScheduleView;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// More than three hours with an instant in each.
const MAKE_DUE: &str = "update schedules set next_at = date_trunc('hour', now()) - interval '3 hours'";

async fn start(options: Options) -> (Cluster, UserRepo, tempfile::TempDir) {
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("alpha", vec![Reply::Text(file("a.py", "def f():\n    return 1\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    (cluster, UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap())
}

fn run(cluster: &Cluster, home: &tempfile::TempDir, args: &[&str]) -> (Option<i32>, String) {
    let output = cfq(cluster, home.path(), args);
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

fn add(cluster: &Cluster, repo: &UserRepo, home: &tempfile::TempDir, cron: &str) -> (Option<i32>, String) {
    let repo = repo.path().display().to_string();
    let task = ["schedule", "add", "nightly", "Write a.py", "--language", "python", "--repo", &repo];
    run(cluster, home, &[&task[..], &["--cron", cron, "--zone", "Europe/Berlin"]].concat())
}

async fn schedule(cluster: &Cluster) -> ScheduleView {
    cluster.client.schedules().await.unwrap().schedules.pop().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn schedule_submits_tasks_and_missed_instants_fire_once() {
    let (cluster, repo, home) = start(Options::default()).await;
    for (cron, words) in
        [("0 6 * *", "has 4 fields instead of 5"), ("0 25 * * *", "\"25\" is not valid in the field hour")]
    {
        let (code, text) = add(&cluster, &repo, &home, cron);
        assert!(code == Some(2) && text.contains("cron: ") && text.contains(words), "{text}");
    }
    let (code, text) = add(&cluster, &repo, &home, "0 * * * *");
    assert!(code == Some(0) && text.contains("schedule nightly added, next task at 20"), "{text}");
    let (code, text) = add(&cluster, &repo, &home, "0 * * * *");
    assert!(code != Some(0) && text.contains("there is a schedule nightly: choose another name"), "{text}");
    assert!(run(&cluster, &home, &["schedule", "pause", "nightly"]).1.contains("nightly paused"));
    assert!(run(&cluster, &home, &["schedule", "ls"]).1.contains("paused"));
    let (code, text) = run(&cluster, &home, &["schedule", "resume", "nightly"]);
    assert!(code == Some(0) && text.contains("nightly continues, next task at 20"), "{text}");
    assert!(cluster.client.tasks(None, 10).await.unwrap().tasks.is_empty());

    cluster.database.raw(MAKE_DUE).await;
    let view = wait::until("the schedule to fire", WAIT_LIMIT, || async {
        let view = schedule(&cluster).await;
        if view.last_task.is_some() { Ok(view) } else { Err(format!("{view:?}")) }
    })
    .await;
    let (next, last) = (view.next_at.unwrap(), view.last_at.unwrap());
    assert!(next % 3600 == 0 && last % 3600 == 0 && next - last >= 4 * 3600, "{view:?}");
    let tasks = cluster.client.tasks(None, 10).await.unwrap().tasks;
    assert_eq!(tasks.len(), 1, "three missed instants fire once");
    let detail = cluster.wait_until_settled(cfq_proto::ids::TaskKey::Id(tasks[0].id)).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(detail.spec.base, None, "each task starts from HEAD");
    assert!(run(&cluster, &home, &["schedule", "ls"]).1.contains("t1"));

    assert_eq!(run(&cluster, &home, &["schedule", "rm", "nightly"]).0, Some(0));
    let (code, text) = run(&cluster, &home, &["schedule", "rm", "nightly"]);
    assert!(code != Some(0) && text.contains("there is no schedule \"nightly\": `cfq schedule ls`"), "{text}");
    assert_eq!(cluster.client.tasks(None, 10).await.unwrap().tasks.len(), 1, "its task stays");
    cluster.finish().await;
}

/// The leader is killed while it fires a schedule, and the other scheduler takes over.
async fn fires_once_although_the_leader_is_killed_at(failpoint: &str) {
    let failpoint = Some(("scheduler".to_owned(), failpoint.to_owned()));
    let (cluster, repo, home) = start(Options { failpoint, ..Options::default() }).await;
    // Started after the first one leads, so that the one with the failpoint fires.
    wait::until("a leader", WAIT_LIMIT, || async { cluster.client.check_ready().await.map_err(|e| e.to_string()) })
        .await;
    cluster.start_service("second_scheduler");
    let (code, text) = add(&cluster, &repo, &home, "0 * * * *");
    assert_eq!(code, Some(0), "{text}");
    cluster.database.raw(MAKE_DUE).await;
    cluster.restart_after_failpoint().await;
    wait::until("the schedule to fire", WAIT_LIMIT, || async {
        match cluster.client.schedules().await {
            Ok(list) if list.schedules.iter().any(|schedule| schedule.last_task.is_some()) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let tasks = cluster.client.tasks(None, 10).await.unwrap().tasks;
    assert_eq!(tasks.len(), 1);
    cluster.wait_for_state(cfq_proto::ids::TaskKey::Id(tasks[0].id), TaskState::Merged).await;
    assert_eq!(cluster.client.tasks(None, 10).await.unwrap().tasks.len(), 1);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedule_fires_once_if_the_leader_is_killed_before_the_commit() {
    fires_once_although_the_leader_is_killed_at("scheduler.schedule.before_commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedule_fires_once_if_the_leader_is_killed_after_the_commit() {
    fires_once_although_the_leader_is_killed_at("scheduler.schedule.after_commit").await;
}
