//! Tests with the real small model, alone and together with a scripted model.

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::oracle::assert_state_follows_review;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::small_model::{SMALL_MODEL, long_generation_spec, rejection};

fn options(alpha: &str, beta: &str) -> Options {
    let models = vec![SMALL_MODEL.parse().unwrap()];
    let mut options = Options { models, alpha: alpha.into(), beta: beta.into(), ..Options::default() };
    // On two busy cores a real model needs longer for its first token than the cluster's default limit, and a node
    // longer to start again and load it.
    options.timing.job_step_timeout_ms = 60_000;
    options.timing.retry_ceiling_ms = 120_000;
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn task_with_the_small_model_as_both_agents_ends() {
    let cluster = Cluster::start_with(options(SMALL_MODEL, SMALL_MODEL)).await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.alpha.max_tokens = Some(100);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_state_follows_review(&detail);
    assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
    // Every review has a report that parses, since decoding is constrained to its schema.
    for iteration in detail.iterations.iter().filter(|i| i.quarantine.is_none()) {
        let review = iteration.review.as_ref().expect("every parsed artifact has a review");
        assert!((0.0..=100.0).contains(&review.quality_score));
    }
    assert_eq!(repo.fingerprint(), before);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_writes_and_small_model_reviews() {
    let cluster = Cluster::start_with(options("openai:scripted/alpha", SMALL_MODEL)).await;
    let text = |n: u32| Reply::Text(file("add.py", &format!("# {n}\ndef add(a, b):\n    return a + b")));
    cluster.models.script("alpha", (1..=3).map(text).collect());
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.beta.max_tokens = Some(300);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_state_follows_review(&detail);
    assert_eq!(detail.iterations[0].reviewer_model.as_deref(), Some(SMALL_MODEL));
    assert!(cluster.models.call_count("alpha") >= 1);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn small_model_writes_and_endpoint_reviews() {
    let cluster = Cluster::start_with(options(SMALL_MODEL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![rejection()]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(2);
    spec.agents.alpha.max_tokens = Some(100);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL_MODEL);
    cluster.finish().await;
}

/// Runs a task whose node dies while the small model generates (as creator, or as critic with a schema), and the same
/// task again without a fault. Returns the small model's job and the task, first with the fault and then without it.
async fn run_with_and_without_fault(cluster: &Cluster, small: Agent) -> [(JobSummary, TaskDetail); 2] {
    let mut both = Vec::new();
    for fault in [true, false] {
        let repo = UserRepo::with_uncommitted_changes();
        // The generation is long, so that the fault occurs in the middle of it.
        let mut spec = long_generation_spec(cluster, &repo);
        let binding = spec.agents.of_mut(small);
        (binding.max_tokens, binding.seed, binding.deterministic) = (Some(300), Some(7), Some(true));
        let task = cluster.submit(&spec).await;
        if fault {
            cluster.restart_after_failpoint().await;
        }
        let detail = cluster.wait_until_settled(task).await;
        assert_state_follows_review(&detail);
        cluster.run_oracle(task, &repo).await;
        let job = detail.jobs.iter().find(|j| j.role == small).unwrap().clone();
        both.push((job, detail));
    }
    let [(_, faulted), (_, reference)] = &both[..] else { panic!("two runs") };
    assert_eq!(faulted.summary.state, reference.summary.state, "{}; {}", faulted.reason, reference.reason);
    both.try_into().unwrap()
}

/// Asserts that the lost job resumed from its journal and generated as many tokens as the reference job without a
/// fault.
async fn assert_resumed(cluster: &Cluster, lost: &JobSummary, reference: &JobSummary) {
    assert_eq!((lost.losses, lost.failures), (1, 0), "{lost:?}");
    assert_eq!((reference.losses, reference.failures), (0, 0), "{reference:?}");
    let [first, second] = journals(cluster, lost).await.try_into().unwrap();
    assert!(!first.is_empty());
    let (usage, uncut) = (lost.usage.unwrap(), reference.usage.unwrap());
    assert_eq!(usage.resumed_tokens as usize, first.len() - 1, "all but the last token, which is sampled again");
    assert!(second.starts_with(&first[..first.len() - 1]), "{first:?} then {second:?}");
    assert_eq!((usage.output_tokens, uncut.resumed_tokens), (uncut.output_tokens, 0));
}

/// Journalled tokens of each attempt that was lost or is done, oldest attempt first. Other attempts have no journal: a
/// node on a busy machine may reject a job because it has no capacity, or not accept it in time.
async fn journals(cluster: &Cluster, job: &JobSummary) -> Vec<Vec<i32>> {
    let mut connection = cluster.database.connect().await;
    let query = "select journal from attempts where job = $1 and outcome in ('lost', 'done') order by attempt";
    sqlx::query_scalar(query).bind(job.id.0).fetch_all(&mut connection).await.unwrap()
}

/// Options with a node that aborts after its first journal entry.
fn options_with_failpoint(alpha: &str, beta: &str) -> Options {
    let failpoint = Some(("node".to_owned(), "node.journalled".to_owned()));
    Options { failpoint, ..options(alpha, beta) }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_node_loses_only_unjournalled_tokens_of_a_text() {
    let cluster = Cluster::start_with(options_with_failpoint(SMALL_MODEL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![rejection()]);
    let [(lost, resumed), (reference, uncut)] = run_with_and_without_fault(&cluster, Agent::Alpha).await;
    assert_resumed(&cluster, &lost, &reference).await;
    assert_eq!(resumed.iterations[0].content_hash, uncut.iterations[0].content_hash, "identical files");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unresumable_journal_fails_the_attempt_and_restarts_the_text() {
    let cluster = Cluster::start_with(options_with_failpoint(SMALL_MODEL, "openai:scripted/beta")).await;
    cluster.models.script("beta", vec![rejection()]);
    let repo = UserRepo::with_uncommitted_changes();
    let spec = long_generation_spec(&cluster, &repo);
    let task = cluster.submit(&spec).await;
    cluster.restart_after_failpoint().await;
    // Changes the stored vocabulary, as if these tokens had been generated with another model file.
    let mut connection = cluster.database.connect().await;
    let change = "update attempts set vocabulary = vocabulary + 1 where journal <> '{}'";
    assert_eq!(sqlx::query(change).execute(&mut connection).await.unwrap().rows_affected(), 1);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let job = detail.jobs.iter().find(|j| j.role == Agent::Alpha).unwrap();
    assert_eq!((job.losses, job.failures), (1, 1), "{job:?}");
    assert_eq!(job.usage.unwrap().resumed_tokens, 0);
    let failed = "select detail from attempts where job = $1 and outcome = 'failed'";
    let error: String = sqlx::query_scalar(failed).bind(job.id.0).fetch_one(&mut connection).await.unwrap();
    assert!(error.contains("belong to another vocabulary"), "{error}");
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_node_loses_only_unjournalled_tokens_of_a_report() {
    let cluster = Cluster::start_with(options_with_failpoint("openai:scripted/alpha", SMALL_MODEL)).await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    let [(lost, resumed), (reference, uncut)] = run_with_and_without_fault(&cluster, Agent::Beta).await;
    assert_resumed(&cluster, &lost, &reference).await;
    assert_eq!(resumed.iterations[0].review, uncut.iterations[0].review);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_panic_restarts_the_node_and_counts_as_a_job_failure() {
    // The failpoint is reached at the fortieth forward pass, in the middle of the text.
    let failpoint = Some(("node".to_owned(), "node.computing:40".to_owned()));
    let cluster = Cluster::start_with(Options { failpoint, ..options(SMALL_MODEL, "openai:scripted/beta") }).await;
    cluster.models.script("beta", vec![rejection()]);
    let [(panicked, _), (reference, _)] = run_with_and_without_fault(&cluster, Agent::Alpha).await;
    assert_eq!((panicked.losses, panicked.failures), (0, 1), "{panicked:?}");
    // On a slow machine, the starting node may not accept an attempt in time; such attempts are counted apart.
    assert_eq!(panicked.attempt - panicked.unaccepted, 2, "{panicked:?}");
    assert_eq!((reference.attempt, reference.losses, reference.failures), (1, 0, 0), "{reference:?}");
    let log = std::fs::read_to_string(cluster.log("node")).unwrap();
    for event in
        ["a panic at the armed failpoint node.computing", "the node exits, and its supervisor starts a new one"]
    {
        assert!(log.contains(event), "{event:?} is not in {log}");
    }
    cluster.finish().await;
}

/// When the scheduler places the revision, it counts the beginning of the prompt as cached on the node since the first
/// iteration. The node does find that beginning in its cache.
#[tokio::test(flavor = "multi_thread")]
async fn revision_is_placed_by_its_cached_prefix() {
    let options = options(SMALL_MODEL, "openai:scripted/beta").with_leader_times_of_the_product();
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("beta", vec![Reply::Text(review(50, &[])), Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.description +=
        &"\nIt takes two numbers, has a docstring of one line, returns a number and prints nothing.".repeat(50);
    spec.max_iterations = Some(2);
    let alpha = &mut spec.agents.alpha;
    (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(100), Some(7), Some(true));
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    let jobs: Vec<_> = detail.jobs.iter().filter(|job| job.role == Agent::Alpha).collect();
    assert_eq!(jobs.len(), 2, "{:#?}", detail.jobs);
    assert!(!jobs[0].placement.contains(" cached)"), "{:?}", jobs[0]);
    for job in &jobs[1..] {
        let held: u64 = job
            .placement
            .split_once(" tokens (")
            .and_then(|(_, rest)| rest.split_once(" cached)"))
            .and_then(|(tokens, _)| tokens.parse().ok())
            .unwrap_or_else(|| panic!("{job:?}"));
        let found = u64::from(job.usage.unwrap().cached_tokens);
        assert!(held > 500 && found > 500, "{held} cached tokens expected, {found} found");
    }
    cluster.finish().await;
}
