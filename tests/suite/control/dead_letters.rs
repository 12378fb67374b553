//! Test of dead letters: their evidence, and a requeue after which the task continues with the same job.

use cfq_proto::http::DeadLetterDetail;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn dead_letter_shows_its_attempts_and_continues_after_a_requeue() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![gated(&gate)]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    assert_eq!(stdout(&run(&["dead", "ls"])).trim(), "no dead letters");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    // One more lost node makes the job a dead letter.
    cluster.database.raw("update jobs set losses = 1000").await;
    cluster.kill9("node");
    let detail = cluster.wait_for_state(task, TaskState::Escalated).await;
    assert_eq!(detail.jobs[0].state, JobState::Dead, "{:?}", detail.jobs);
    cluster.start_service("node");
    cluster.wait_until_ready().await;

    let task_shown = stdout(&run(&["show", "t1"]));
    assert!(task_shown.contains("`cfq dead show t1`"), "{task_shown}");
    let listed = stdout(&run(&["dead", "ls"]));
    let job = detail.jobs[0].id.to_string();
    assert!(listed.contains("t1") && listed.contains("escalated") && listed.contains(&job), "{listed}");
    let shown = stdout(&run(&["dead", "show", "t1"]));
    for words in [job.as_str(), "attempt 1 on n1", "lost after", "n1 was lost", "cfq dead requeue t1"] {
        assert!(shown.contains(words), "{words:?} is not in {shown}");
    }
    let json: DeadLetterDetail = cfq_tests::cli_json::parse(&stdout(&run(&["--json", "dead", "show", &job])));
    assert_eq!((json.attempts.len(), json.attempts[0].outcome.as_deref()), (1, Some("lost")));
    refused(&run(&["dead", "show", "t99"]), 2, &["t99", "cfq dead ls"]);
    refused(&run(&["dead", "requeue"]), 2, &["Usage:", "--help"]);

    gate.open();
    let requeued = run(&["dead", "requeue", "t99", "t1"]);
    refused(&requeued, 2, &["t99 has no dead letter"]);
    assert_eq!(String::from_utf8_lossy(&requeued.stdout), format!("job {job} is queued, t1 is ready\n"));
    let detail = cluster.wait_for_state(task, TaskState::Merged).await;
    assert_eq!(detail.jobs.len(), 2, "the requeued job is the next call: {:?}", detail.jobs);
    assert_eq!((detail.jobs[0].id.to_string(), detail.jobs[0].state), (job, JobState::Done));
    refused(&run(&["dead", "requeue", "t1"]), 2, &["t1", "no dead letter"]);
    cluster.finish().await;
}
