//! Tests with two nodes that have the same model: one resumes the text of the other after a kill, and a revision is
//! placed on the node that has its prompt cached.

use cfq_proto::http::{JobSummary, NodeView, TaskDetail};
use cfq_proto::node::Residency;
use cfq_proto::task::{Agent, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, review};
use cfq_tests::small_model::{SMALL_MODEL, long_generation_spec, rejection, wait_for_first_journal};
use cfq_tests::wait;

async fn cluster() -> Cluster {
    let models = vec![SMALL_MODEL.parse().unwrap()];
    let mut options = Options { models, alpha: SMALL_MODEL.into(), second_node: true, ..Options::default() };
    // On two busy cores a real model needs longer for its first token than the cluster's default limit.
    options.timing.job_step_timeout_ms = 60_000;
    // Only the leader knows the nodes' cached prefixes, and a busy machine must neither depose it nor delay the nodes'
    // heartbeats beyond their leases during the test.
    options = options.with_leader_times_of_the_product();
    let slow = Timing::default();
    (options.timing.heartbeat_ms, options.timing.lease_ttl_ms) = (slow.heartbeat_ms, slow.lease_ttl_ms);
    Cluster::start_with(options).await
}

/// Name of the service that runs the node with this id.
fn service(node: &str) -> &'static str {
    match node {
        "n1" => "node",
        "n2" => "second_node",
        other => panic!("unknown node {other}"),
    }
}

fn alpha_jobs(detail: &TaskDetail) -> Vec<&JobSummary> {
    detail.jobs.iter().filter(|job| job.role == Agent::Alpha).collect()
}

/// One node is killed in the middle of the generation, and restarted only after the task has ended.
#[tokio::test(flavor = "multi_thread")]
async fn second_node_finishes_the_text_of_a_killed_node() {
    let cluster = cluster().await;
    cluster.models.script("beta", vec![rejection()]);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let uncut = cluster.submit(&long_generation_spec(&cluster, &repo)).await;
    let uncut = cluster.wait_until_settled(uncut).await;
    assert_eq!(uncut.summary.state, TaskState::Escalated, "{}", uncut.reason);
    let task = cluster.submit(&long_generation_spec(&cluster, &other)).await;
    let killed = wait_for_first_journal(&cluster, task).await;
    cluster.kill9(service(&killed));
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    cluster.start_service(service(&killed));
    cluster.run_oracle(task, &other).await;
    let (resumed, reference) = (alpha_jobs(&detail)[0], alpha_jobs(&uncut)[0]);
    assert_eq!((resumed.losses, resumed.failures), (1, 0), "{resumed:?}");
    assert_ne!(resumed.node.as_ref().unwrap().as_str(), killed);
    let (usage, all) = (resumed.usage.unwrap(), reference.usage.unwrap());
    assert!(usage.resumed_tokens > 0 && usage.resumed_tokens < all.output_tokens, "{usage:?} {all:?}");
    assert_eq!(usage.output_tokens, all.output_tokens);
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "identical files");
    cluster.finish().await;
}

/// Sum of the durations in an estimate of a placement: `..., prefill 215 tokens (4000 cached) 0.3 s, decode 1.2 s, ...`.
fn estimated_seconds(estimate: &str) -> f64 {
    let seconds =
        estimate.split(',').filter_map(|part| part.strip_suffix(" s")?.rsplit(' ').next()?.parse::<f64>().ok());
    seconds.sum()
}

/// The first text is generated while only one node runs; the revision is placed while both nodes are idle, where it is
/// expected to finish first. Rates that were measured on a busy machine can outweigh the cached prefix, so the test
/// reads the estimates for both nodes. It runs once with each of the nodes as the first one, so that the order of names
/// does not explain the placement.
#[tokio::test(flavor = "multi_thread")]
async fn revision_is_placed_on_the_node_with_its_cached_prefix() {
    let cluster = cluster().await;
    for (holder, away) in [("n1", "n2"), ("n2", "n1")] {
        let gate = Gate::closed();
        let (first, second) = (review(50, &[]), review(95, &[]));
        cluster.models.script("beta", vec![Reply::Gated(String::new(), first, gate.clone()), Reply::Text(second)]);
        cluster.kill9(service(away));
        let repo = UserRepo::with_uncommitted_changes();
        let mut spec = cluster.spec(&repo);
        spec.description +=
            &"\nIt takes two numbers, has a docstring of one line, returns a number and prints nothing.".repeat(60);
        spec.max_iterations = Some(2);
        let alpha = &mut spec.agents.alpha;
        // Enough for a complete reply: one that is cut off is revised without a review.
        (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(200), Some(7), Some(true));
        let before = cluster.models.call_count("beta");
        wait::until("the killed node to be lost", WAIT_LIMIT, || async {
            let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
            let alive = nodes.iter().filter(|node| node.alive).count();
            if alive == 1 { Ok(()) } else { Err(format!("{alive} nodes are alive")) }
        })
        .await;
        let task = cluster.submit(&spec).await;
        // The prompt has more than a thousand tokens, and a busy machine needs a minute for them.
        wait::until("the first review to begin", 4 * WAIT_LIMIT, || async {
            if cluster.models.call_count("beta") > before { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
        cluster.start_service(service(away));
        wait::until("both nodes to be idle with the model loaded", WAIT_LIMIT, || async {
            let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
            let idle = |node: &NodeView| {
                let small = node.ledger.models.iter().find(|m| m.model.as_str() == SMALL_MODEL);
                node.alive && small.is_some_and(|m| m.residency == Residency::Resident && m.running == 0)
            };
            if nodes.len() == 2 && nodes.iter().all(idle) { Ok(()) } else { Err(format!("{nodes:?}")) }
        })
        .await;
        gate.open();
        let detail = cluster.wait_until_settled(task).await;
        let jobs = alpha_jobs(&detail);
        assert_eq!(jobs.len(), 2, "{:#?}", detail.jobs);
        let placement = &jobs[1].placement;
        let (placed, next) = placement.split_once("; next ").unwrap_or_else(|| panic!("one candidate: {placement}"));
        assert!(placed.contains(" of 2 open nodes: "), "{placement}");
        for estimate in [placed, next] {
            assert_eq!(estimate.contains(" cached)"), estimate.starts_with(holder), "{placement}");
        }
        let (best, other) = (estimated_seconds(placed), estimated_seconds(next));
        // Both are sums of two rounded durations.
        assert!(best <= other + 0.2, "{placement}");
        if placed.starts_with(holder) {
            assert!(jobs[1].usage.unwrap().cached_tokens > 800, "{:?}", jobs[1]);
        }
        assert_eq!(jobs[0].node.as_ref().unwrap().as_str(), holder);
    }
    cluster.finish().await;
}
