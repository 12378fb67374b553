//! The real small model, alone and together with a scripted one.

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::small::{SMALL, long_text};

fn options(alpha: &str, beta: &str) -> Options {
    let mut options =
        Options { models: vec![SMALL.parse().unwrap()], alpha: alpha.into(), beta: beta.into(), ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn the_small_model_drives_a_task_to_an_end() {
    let cluster = Cluster::with(options(SMALL, SMALL)).await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.alpha.max_tokens = Some(200);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(
        matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated),
        "{}: {}",
        detail.summary.state,
        detail.reason
    );
    assert!(!detail.iterations.is_empty());
    assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
    // Whatever was reviewed has a report that parsed, since decoding was constrained to its schema.
    for iteration in detail.iterations.iter().filter(|i| i.quarantine.is_none()) {
        let review = iteration.review.as_ref().expect("a review");
        assert!((0.0..=100.0).contains(&review.quality_score));
    }
    assert_eq!(repo.fingerprint(), before);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_writes_and_the_small_model_reviews() {
    let cluster = Cluster::with(options("openai:scripted/alpha", SMALL)).await;
    let text = |n: u32| Reply::Text(file("add.py", &format!("# {n}\ndef add(a, b):\n    return a + b")));
    cluster.models.script("alpha", (1..=3).map(text).collect());
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations[0].reviewer_model.as_deref(), Some(SMALL));
    assert!(cluster.models.calls("alpha") >= 1);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_small_model_writes_and_a_server_reviews() {
    let cluster = Cluster::with(options(SMALL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(3);
    spec.agents.alpha.max_tokens = Some(200);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL);
    cluster.finish().await;
}

/// One task whose node dies while the small model writes (as creator, or as critic whose report is constrained to a schema),
/// and the same task again without a fault. Returns the job that was lost, its twin, and both tasks.
async fn killed_and_not(cluster: &Cluster, small: Agent) -> [(JobSummary, TaskDetail); 2] {
    let mut both = Vec::new();
    for killed in [true, false] {
        let repo = UserRepo::with_uncommitted_changes();
        // A long answer, so that there is a middle to die in.
        let mut spec = long_text(cluster, &repo);
        let binding = spec.agents.of_mut(small);
        (binding.max_tokens, binding.seed, binding.deterministic) = (Some(300), Some(7), Some(true));
        let task = cluster.submit(&spec).await;
        if killed {
            cluster.failpoint_hit().await;
        }
        let detail = cluster.rests(task).await;
        assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
        cluster.oracle(task, &repo).await;
        let job = detail.jobs.iter().find(|j| j.role == small).unwrap().clone();
        both.push((job, detail));
    }
    both.try_into().unwrap()
}

/// What became of the job that was lost, beside its twin that was not.
async fn went_on(cluster: &Cluster, lost: &JobSummary, twin: &JobSummary) {
    assert_eq!((lost.losses, lost.failures), (1, 0), "{lost:?}");
    assert_eq!((twin.losses, twin.failures), (0, 0), "{twin:?}");
    let [first, second] = journals(cluster, lost).await.try_into().unwrap();
    assert!(!first.is_empty());
    let (usage, uncut) = (lost.usage.unwrap(), twin.usage.unwrap());
    assert_eq!(usage.resumed_tokens as usize, first.len() - 1, "all but the last, which is drawn again");
    assert!(second.starts_with(&first[..first.len() - 1]), "{first:?} then {second:?}");
    assert_eq!((usage.output_tokens, uncut.resumed_tokens), (uncut.output_tokens, 0));
}

/// The tokens each attempt of a job had told that wrote any, oldest first: a node on a busy machine may refuse a job that it
/// has no room for yet, or not take it in time, which is another attempt.
async fn journals(cluster: &Cluster, job: &JobSummary) -> Vec<Vec<i32>> {
    let mut connection = cluster.database.connect().await;
    let told = "select journal from attempts where job = $1 and outcome in ('lost', 'done') order by attempt";
    sqlx::query_scalar(told).bind(job.id.0).fetch_all(&mut connection).await.unwrap()
}

fn dies_writing() -> Option<(String, String)> {
    Some(("node".to_owned(), "node.journalled".to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_text_costs_only_what_it_had_not_told() {
    let cluster = Cluster::with(Options { failpoint: dies_writing(), ..options(SMALL, "openai:scripted/beta") }).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let [(lost, cut), (twin, uncut)] = killed_and_not(&cluster, Agent::Alpha).await;
    went_on(&cluster, &lost, &twin).await;
    assert_eq!(cut.iterations[0].content_hash, uncut.iterations[0].content_hash, "the same files to the last byte");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_cannot_be_gone_on_from_ends_with_an_error_and_is_written_from_the_beginning() {
    let cluster = Cluster::with(Options { failpoint: dies_writing(), ..options(SMALL, "openai:scripted/beta") }).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let spec = long_text(&cluster, &repo);
    let task = cluster.submit(&spec).await;
    cluster.failpoint_hit().await;
    // As if the model's file had been another one when those tokens were written.
    let mut connection = cluster.database.connect().await;
    let other = "update attempts set vocabulary = vocabulary + 1 where journal <> '{}'";
    assert_eq!(sqlx::query(other).execute(&mut connection).await.unwrap().rows_affected(), 1);
    let detail = cluster.rests(task).await;
    let job = detail.jobs.iter().find(|j| j.role == Agent::Alpha).unwrap();
    assert_eq!((job.losses, job.failures), (1, 1), "{job:?}");
    assert_eq!(job.usage.unwrap().resumed_tokens, 0);
    let failed = "select detail from attempts where job = $1 and outcome = 'failed'";
    let said: String = sqlx::query_scalar(failed).bind(job.id.0).fetch_one(&mut connection).await.unwrap();
    assert!(said.contains("of another vocabulary"), "{said}");
    cluster.oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_report_costs_only_what_it_had_not_told() {
    let cluster = Cluster::with(Options { failpoint: dies_writing(), ..options("openai:scripted/alpha", SMALL) }).await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    let [(lost, cut), (twin, uncut)] = killed_and_not(&cluster, Agent::Beta).await;
    went_on(&cluster, &lost, &twin).await;
    assert_eq!(cut.iterations[0].review, uncut.iterations[0].review);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_engine_restarts_the_node_and_counts_as_a_failure_of_the_job() {
    // The fortieth pass: in the middle of the text.
    let failpoint = Some(("node".to_owned(), "node.computing:40".to_owned()));
    let cluster = Cluster::with(Options { failpoint, ..options(SMALL, "openai:scripted/beta") }).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let [(struck, _), (twin, _)] = killed_and_not(&cluster, Agent::Alpha).await;
    assert_eq!((struck.attempt, struck.losses, struck.failures), (2, 0, 1), "{struck:?}");
    assert_eq!((twin.attempt, twin.losses, twin.failures), (1, 0, 0), "{twin:?}");
    let log = std::fs::read_to_string(cluster.log("node")).unwrap();
    for said in ["a panic at the armed failpoint node.computing", "the node ends, its supervisor starts a new one"] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
    cluster.finish().await;
}

/// What the node computed for the first try is counted on for the second, and is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_revision_is_placed_by_what_the_node_holds_of_its_prompt() {
    let cluster = Cluster::with(options(SMALL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![Reply::Text(review(50, &[])), Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.description +=
        &"\nIt takes two numbers, has a docstring of one line, returns a number and prints nothing.".repeat(50);
    spec.max_iterations = Some(2);
    let alpha = &mut spec.agents.alpha;
    (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(200), Some(7), Some(true));
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    let written: Vec<_> = detail.jobs.iter().filter(|job| job.role == Agent::Alpha).collect();
    assert!(written.len() >= 2, "{:#?}", detail.jobs);
    assert!(!written[0].placement.contains("held there"), "{:?}", written[0]);
    for job in &written[1..] {
        let held: u64 = job
            .placement
            .split_once(" and ")
            .and_then(|(_, rest)| rest.split_once(" held there"))
            .and_then(|(tokens, _)| tokens.parse().ok())
            .unwrap_or_else(|| panic!("{job:?}"));
        let found = u64::from(job.usage.unwrap().cached_tokens);
        assert!(held > 500 && found > 500, "{held} tokens counted on, {found} found");
    }
    cluster.finish().await;
}
