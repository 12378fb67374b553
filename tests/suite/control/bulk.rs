//! Tests of actions on one or many tasks: their results for each task, dry runs, and the order that a priority changes.

use cfq_proto::event::EventBody;
use cfq_proto::http::{BulkOutcome, BulkRequest, BulkResult, MAX_TASKS_PER_BULK_REQUEST, TaskAction};
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::task::{Priority, TaskState};

use super::*;

fn key(number: i64) -> TaskKey {
    TaskKey::Number(TaskNumber(number))
}

/// The tasks' states, in the order of their numbers.
async fn states(cluster: &Cluster) -> Vec<TaskState> {
    let mut tasks = cluster.client.tasks(None, 1000).await.unwrap().tasks;
    tasks.sort_by_key(|task| task.number);
    tasks.into_iter().map(|task| task.state).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn actions_on_many_tasks_report_each_task_and_one_faulty_row_stops_no_other() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    cluster.stop("runner").await;
    for _ in 0..5 {
        cluster.submit(&cluster.spec(&repo)).await;
    }
    // A row that cfq cannot read.
    cluster.database.raw("update tasks set runner = 'NOT VALID' where number = 3").await;

    let tried = stdout_of(&run(&["pause", "t1", "t2", "--dry-run"]));
    assert_eq!(tried, "t1 would be paused\nt2 would be paused\n");
    let tried: BulkResult = cfq_tests::cli_json::parse(&stdout_of(&run(&["--json", "pause", "t1", "--dry-run"])));
    assert_eq!(tried.outcome, BulkOutcome::WouldChange);
    assert_eq!(states(&cluster).await, [TaskState::Ready; 5]);

    let paused = run(&["pause", "--all"]);
    assert_eq!(paused.status.code(), Some(5), "{paused:?}");
    assert_eq!(stdout_of(&paused), "t1 is paused\nt2 is paused\nt4 is paused\nt5 is paused\n");
    let errors = String::from_utf8_lossy(&paused.stderr).into_owned();
    assert!(errors.contains("t3 could not be changed") && errors.contains("4 changed, 1 failed"), "{errors}");
    cluster.database.raw("update tasks set runner = null where number = 3").await;
    assert_eq!(states(&cluster).await[2], TaskState::Ready);

    let mixed = run(&["resume", "t1", "t3", "t99", "t1"]);
    assert_eq!(mixed.status.code(), Some(2), "{mixed:?}");
    assert_eq!(stdout_of(&mixed), "t1 is ready\n");
    let errors = String::from_utf8_lossy(&mixed.stderr).into_owned();
    for words in ["t3 is ready: only a paused task", "there is no task t99", "1 changed, 2 refused"] {
        assert!(errors.contains(words), "{words:?} is not in {errors}");
    }

    let cancelled = run(&["--json", "cancel", "--state", "paused", "--reason", "not needed"]);
    let lines: Vec<BulkResult> =
        stdout_of(&cancelled).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<i64> = lines.iter().map(|line| line.number.unwrap().0).collect();
    assert_eq!(numbers, [2, 4, 5]);
    assert!(lines.iter().all(|line| (line.outcome, line.state) == (BulkOutcome::Done, Some(TaskState::Cancelled))));
    let shown = cluster.client.task(key(4)).await.unwrap();
    assert_eq!(shown.reason, "cancelled by a client: not needed");
    assert_eq!(stdout_of(&run(&["cancel", "t2"])), "t2 is cancelled already\n");
    let none = run(&["resume", "--all"]);
    assert!(
        none.stdout.is_empty() && String::from_utf8_lossy(&none.stderr).contains("no task is selected"),
        "{none:?}"
    );
    cluster.finish().await;
}

fn stdout_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_select_tasks() {
    let cluster = Cluster::start().await;
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let repo_path = repo.path().to_str().unwrap().to_owned();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let submit = |labels: &str| stdout(&run(&["submit", "add a function", "--repo", &repo_path, "--label", labels]));
    cluster.stop("runner").await;
    submit("nightly,team=web");
    submit("nightly");
    refused(&run(&["submit", "x", "--repo", &repo_path, "--label", "a b"]), 2, &["\"a b\" is not a label", "letters"]);
    let listed = stdout(&run(&["ls", "--label", "nightly", "--label", "team=web"]));
    assert!(listed.contains("t1") && listed.contains("nightly, team=web") && !listed.contains("t2"), "{listed}");
    assert!(stdout(&run(&["show", "t1"])).contains("  labels      nightly, team=web\n"));
    assert_eq!(stdout(&run(&["ls", "--label", "weekly"])), "no such tasks\n");
    assert_eq!(stdout(&run(&["pause", "--label", "team=web"])), "t1 is paused\n");
    // As if t2 had escalated in the step after which it was to be paused.
    cluster
        .database
        .raw("update tasks set state = 'escalated', pause_requested = 'paused by a user' where number = 2")
        .await;
    assert_eq!(stdout(&run(&["resume", "--label", "team=web", "--dry-run"])), "t1 would be ready\n");
    let resumed = stdout(&run(&["resume", "--label", "nightly"]));
    assert_eq!(resumed, "t1 is ready\nt2 is escalated: it will not be paused\n");
    assert_eq!(stdout(&run(&["pause", "--label", "team=web"])), "t1 is paused\n");
    assert_eq!(stdout(&run(&["cancel", "--label", "nightly", "--state", "escalated"])), "t2 is cancelled\n");
    refused(&run(&["cancel", "t1", "--label", "nightly"]), 2, &["cannot be used with"]);
    assert_eq!(stdout(&run(&["cancel", "--label", "nightly"])), "t1 is cancelled\n");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_submits_an_ended_task_again_once() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![gated(&gate)]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    refused(&run(&["retry", "t1"]), 2, &["only failed, cancelled and accepted tasks can be retried"]);
    cluster.wait_until_generating(task).await;
    assert_eq!(stdout(&run(&["prioritize", "P1", "t1"])), "t1 has priority P1 now, before P2\n");
    assert_eq!(stdout(&run(&["cancel", "t1"])), "t1 is cancelled\n");
    gate.open();
    assert_eq!(stdout(&run(&["retry", "t1", "--dry-run"])), "t1 would be retried\n");
    assert_eq!(stdout(&run(&["retry", "--all"])), "t1 is retried by t2\n");
    assert_eq!(stdout(&run(&["retry", "t1"])), "t1 is retried by t2 already\n");
    let json: serde_json::Value = serde_json::from_str(&stdout(&run(&["--json", "retry", "t1"]))).unwrap();
    assert_eq!((&json["number"], &json["retried_by"]), (&1.into(), &2.into()), "{json}");
    let retried = cluster.wait_for_state(key(2), TaskState::Merged).await;
    let first = cluster.client.task(task).await.unwrap();
    assert_eq!(first.summary.state, TaskState::Cancelled, "the first task stays as it is");
    assert_eq!(retried.summary.retry_of, Some(first.summary.id));
    assert_eq!((retried.spec.base, retried.summary.priority), (first.spec.base, Priority::P1));
    refused(&run(&["retry", "t2"]), 2, &["t2 is merged", "submit"]);
    refused(&run(&["prioritize", "P0", "t2"]), 2, &["t2 is merged"]);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn priority_changes_the_order_of_waiting_tasks() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    cluster.stop("runner").await;
    for _ in 0..3 {
        cluster.submit(&cluster.spec(&repo)).await;
    }
    let raised = cfq(&cluster, home.path(), &["prioritize", "P0", "t3"]);
    assert_eq!(stdout(&raised), "t3 has priority P0 now, before P2\n");
    cluster.start_service("runner");
    let mut grants = Vec::new();
    for number in 1..=3 {
        cluster.wait_for_state(key(number), TaskState::Merged).await;
        let events = cluster.client.events(key(number), 0).await.unwrap().events;
        let granted = events.iter().find(|e| matches!(e.body, EventBody::RunnerChanged { .. })).unwrap();
        grants.push((granted.id, number));
        let changed = events.iter().any(|e| matches!(e.body, EventBody::PriorityChanged { .. }));
        assert_eq!(changed, number == 3);
    }
    grants.sort_unstable();
    assert_eq!(grants.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [3, 1, 2]);
    let shown = cluster.client.task(key(3)).await.unwrap();
    assert_eq!((shown.summary.priority, shown.spec.priority), (Priority::P0, Priority::P0));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_process_a_bounded_number_of_tasks() {
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    cluster.stop("runner").await;
    cluster
        .database
        .raw(
            "insert into tasks (id, body_hash, spec, title, state, priority, threshold, max_iterations)
             select gen_random_uuid(), 'h', '{}', 'many', 'ready', n % 4, 85, 5 from generate_series(1, 250) as n",
        )
        .await;
    let request = BulkRequest {
        action: TaskAction::Pause { reason: String::new() },
        tasks: Vec::new(),
        state: None,
        labels: Vec::new(),
        all: true,
        dry_run: true,
        after: None,
    };
    // A slow server processes fewer tasks in a request than it may.
    let (mut numbers, mut page) = (Vec::new(), request.clone());
    loop {
        let reply = cluster.client.act_on_tasks(&page).await.unwrap();
        assert!((1..=MAX_TASKS_PER_BULK_REQUEST).contains(&reply.results.len()), "{}", reply.results.len());
        numbers.extend(reply.results.iter().map(|result| result.number.unwrap().0));
        page.after = reply.next;
        let Some(next) = reply.next else { break };
        assert_eq!((next.task.0, next.until), (numbers[numbers.len() - 1], TaskNumber(250)));
    }
    assert_eq!(numbers, (1..=250).collect::<Vec<_>>());
    let named = BulkRequest { tasks: (1..=101).map(|n| format!("t{n}")).collect(), all: false, ..request };
    assert!(cluster.client.act_on_tasks(&named).await.unwrap_err().to_string().contains("at most 100"));
    // The command repeats the request until all tasks are processed.
    let paused = stdout(&cfq(&cluster, home.path(), &["pause", "--all"]));
    assert_eq!(paused.lines().count(), 250);
    assert!(states(&cluster).await.iter().all(|state| *state == TaskState::Paused));
    cluster.finish().await;
}
