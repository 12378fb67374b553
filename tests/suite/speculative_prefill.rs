//! Tests speculative prefill: if a critic's prompt was computed while the creator generated, the review prefills fewer
//! tokens and its text is the same.

use cfq_proto::http::TaskDetail;
use cfq_proto::job::Usage;
use cfq_proto::task::Agent;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT};
use cfq_tests::oracle::assert_state_follows_review;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply};
use cfq_tests::small_model::SMALL_MODEL;
use cfq_tests::task_rows::TaskRows;
use cfq_tests::wait;

/// Upper estimate of the bytes per token, so that the expected token counts are lower bounds.
const MAX_BYTES_PER_TOKEN: usize = 5;

/// A task and the creator's reply, whose first part is sent at once and the rest after the gate is opened.
struct Script {
    description: String,
    first: String,
    rest: String,
    /// Whether the artifact contains the first part unchanged, so that the speculative prefill is useful.
    first_kept: bool,
}

fn functions(names: &[&str]) -> String {
    names.iter().map(|name| format!("def {name}(left, right):\n    \"\"\"The {name} of two numbers, as a number.\"\"\"\n    return {name}_of(left, right)\n\n")).collect()
}

fn scripts() -> [Script; 2] {
    let rules = "Every function takes two numbers, has a docstring of one line, returns a number and never prints.\n";
    let describe = |what: &str| format!("Write {what} in add.py.\n{}", rules.repeat(20));
    let first =
        format!("Here.\n\nadd.py\n```python\n{}", functions(&["add", "subtract", "multiply", "divide", "power"]));
    let rest = format!("{}```\n", functions(&["modulo"]));
    // In the second script another file of the same name follows, and replaces the first.
    let other = format!("```\n\nNo, rather:\n\nadd.py\n```python\n{}```\n", functions(&["maximum", "minimum"]));
    [
        Script { description: describe("six functions of arithmetic"), first: first.clone(), rest, first_kept: true },
        Script { description: describe("two functions that compare"), first, rest: other, first_kept: false },
    ]
}

/// Lengths of the prompts that the node has prefilled speculatively, in tokens, in order. The number of tokens in its KV
/// pool does not say this: where a block takes long, a chunk is smaller than a block, and the pool holds parts of a block
/// several times.
fn prefilled(cluster: &Cluster) -> Vec<usize> {
    let log = std::fs::read_to_string(cluster.log("node")).unwrap();
    let lines = log.lines().filter(|line| line.contains("prompt prefilled"));
    let tokens = |line: &str| line.split_once("tokens=")?.1.split(' ').next()?.parse().ok();
    lines.map(|line| tokens(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

/// Runs both tasks, one after the other; returns each with the usage of its review.
async fn reviews(speculative_prefill: bool) -> Vec<(TaskDetail, Usage)> {
    let models = vec![SMALL_MODEL.parse().unwrap()];
    let mut options = Options { models, beta: SMALL_MODEL.into(), speculative_prefill, ..Options::default() };
    // On two busy cores a real model needs longer for its first token than the cluster's default limit.
    options.timing.job_step_timeout_ms = 60_000;
    let cluster = Cluster::start_with(options).await;
    let mut reviews = Vec::new();
    let gates = [Gate::closed(), Gate::closed()];
    let scripts = scripts();
    let reply =
        |(script, gate): (&Script, &Gate)| Reply::Gated(script.first.clone(), script.rest.clone(), gate.clone());
    cluster.models.script("alpha", scripts.iter().zip(&gates).map(reply).collect());
    for (script, gate) in scripts.iter().zip(&gates) {
        let repo = UserRepo::with_uncommitted_changes();
        let mut spec = cluster.spec(&repo);
        spec.description = script.description.clone();
        spec.max_iterations = Some(1);
        let beta = &mut spec.agents.beta;
        (beta.max_tokens, beta.seed, beta.deterministic) = (Some(300), Some(7), Some(true));
        let before = prefilled(&cluster).len();
        let task = cluster.submit(&spec).await;
        cluster.wait_until_generating(task).await;
        if speculative_prefill {
            // Lower bound of the tokens known in advance: the creator's text so far, except the end that the next
            // prefill hint would send.
            let known = (script.description.len() + script.first.len() - 512) / MAX_BYTES_PER_TOKEN;
            wait::until("the speculative prefill", WAIT_LIMIT, || async {
                let done = prefilled(&cluster).split_off(before);
                if done.last() >= Some(&known) { Ok(()) } else { Err(format!("{done:?}, and {known} are known")) }
            })
            .await;
        }
        gate.open();
        let detail = cluster.wait_until_settled(task).await;
        assert_state_follows_review(&detail);
        // Only one attempt was accepted: a second one would find its own prompt in the cache.
        let job = detail.jobs.iter().find(|job| job.role == Agent::Beta).unwrap();
        let rows = TaskRows::of(&mut cluster.database.connect().await, &detail.summary.id.to_string()).await;
        let row = rows.jobs.iter().find(|row| row.id == job.id.to_string()).unwrap();
        assert_eq!(row.attempts.iter().filter(|attempt| attempt.accepted).count(), 1, "{row:?}");
        let usage = job.usage.unwrap();
        reviews.push((detail, usage));
        cluster.wait_until_nodes_idle().await;
    }
    cluster.finish().await;
    reviews
}

#[tokio::test(flavor = "multi_thread")]
async fn critic_reuses_prefill_computed_during_generation() {
    let (cold, warm) = (reviews(false).await, reviews(true).await);
    for (((cold, cost), (warm, less)), script) in cold.iter().zip(&warm).zip(scripts()) {
        let known = script.description.len() + if script.first_kept { script.first.len() - 512 } else { 0 };
        let context = format!("{} tokens known; {cost:?} cold, {less:?} warm", known / MAX_BYTES_PER_TOKEN);
        assert_eq!((less.prompt_tokens, less.output_tokens), (cost.prompt_tokens, cost.output_tokens), "{context}");
        assert!(cost.cached_tokens < 64, "without it, only the common beginning is cached: {context}");
        assert!(less.cached_tokens as usize >= known / MAX_BYTES_PER_TOKEN, "{context}");
        assert!(less.cached_tokens < less.prompt_tokens, "{context}");
        // If the predicted prompt was wrong, its cache is usable up to the first wrong token.
        assert!(script.first_kept || less.cached_tokens < less.prompt_tokens / 2 + 256, "{context}");
        assert_eq!(cold.jobs.len(), warm.jobs.len(), "a speculative prefill is not a job: {context}");
        assert!(cold.iterations[0].review.is_some());
        assert_eq!(cold.iterations[0].review, warm.iterations[0].review, "{context}");
        assert_eq!(cold.summary.state, warm.summary.state, "{context}");
        assert_eq!(cold.iterations[0].content_hash, warm.iterations[0].content_hash);
    }
}
