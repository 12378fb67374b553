//! Two nodes with the same model: one goes on where the other was killed, and a revision goes where its prompt is held.

use cfq_proto::http::{JobSummary, NodeView, TaskDetail};
use cfq_proto::node::Residency;
use cfq_proto::task::{Agent, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, review};
use cfq_tests::small::{SMALL, first_journal, long_text};
use cfq_tests::wait;

async fn cluster() -> Cluster {
    let mut options =
        Options { models: vec![SMALL.parse().unwrap()], alpha: SMALL.into(), neighbour: true, ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    // What nodes hold is known to the leader alone: one that a busy machine deposes in the middle takes it along.
    let slow = Timing::default();
    (options.timing.leader_beat_ms, options.timing.leader_ttl_ms) = (slow.leader_beat_ms, slow.leader_ttl_ms);
    Cluster::with(options).await
}

/// The service that is this node.
fn service(node: &str) -> &'static str {
    match node {
        "n1" => "node",
        "n2" => "neighbour",
        other => panic!("{other}?"),
    }
}

fn written(detail: &TaskDetail) -> Vec<&JobSummary> {
    detail.jobs.iter().filter(|job| job.role == Agent::Alpha).collect()
}

/// Killed from outside, wherever it is; not started again before its task has come to rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_finished_by_another_node_where_its_own_is_killed() {
    let cluster = cluster().await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (repo, other) = (UserRepo::with_uncommitted_changes(), UserRepo::with_uncommitted_changes());
    let uncut = cluster.submit(&long_text(&cluster, &repo)).await;
    let uncut = cluster.rests(uncut).await;
    let task = cluster.submit(&long_text(&cluster, &other)).await;
    let killed = first_journal(&cluster, task).await;
    cluster.kill9(service(&killed));
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    cluster.start_service(service(&killed));
    cluster.oracle(task, &other).await;
    let (cut, whole) = (written(&detail)[0], written(&uncut)[0]);
    assert_eq!((cut.losses, cut.failures), (1, 0), "{cut:?}");
    assert_ne!(cut.node.as_ref().unwrap().as_str(), killed);
    let (usage, all) = (cut.usage.unwrap(), whole.usage.unwrap());
    assert!(usage.resumed_tokens > 0 && usage.resumed_tokens < all.output_tokens, "{usage:?} {all:?}");
    assert_eq!(usage.output_tokens, all.output_tokens);
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "the same files to the last byte");
    cluster.finish().await;
}

/// The first text is written where only one node is up, the revision asked for when both are idle; once with each as the
/// one that holds the prompt, so that it is not the order of their names, or which was measured faster, that decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_revision_goes_to_the_node_that_holds_its_prompt() {
    let cluster = cluster().await;
    for (holder, away) in [("n1", "n2"), ("n2", "n1")] {
        let gate = Gate::closed();
        let (said, rest) = (review(50, &[]), review(95, &[]));
        cluster.models.script("beta", vec![Reply::Held(String::new(), said, gate.clone()), Reply::Text(rest)]);
        cluster.kill9(service(away));
        let repo = UserRepo::with_uncommitted_changes();
        let mut spec = cluster.spec(&repo);
        spec.description +=
            &"\nIt takes two numbers, has a docstring of one line, returns a number and prints nothing.".repeat(150);
        spec.max_iterations = Some(2);
        let alpha = &mut spec.agents.alpha;
        (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(100), Some(7), Some(true));
        let before = cluster.models.calls("beta");
        let task = cluster.submit(&spec).await;
        wait::until("the review begins", PATIENCE, || async {
            if cluster.models.calls("beta") > before { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
        cluster.start_service(service(away));
        wait::until("both have the model ready and nothing to do with it", PATIENCE, || async {
            let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
            let idle = |node: &NodeView| {
                let small = node.ledger.models.iter().find(|m| m.model.as_str() == SMALL);
                node.alive && small.is_some_and(|m| m.residency == Residency::Resident && m.running == 0)
            };
            if nodes.len() == 2 && nodes.iter().all(idle) { Ok(()) } else { Err(format!("{nodes:?}")) }
        })
        .await;
        gate.open();
        let detail = cluster.rests(task).await;
        let jobs = written(&detail);
        assert!(jobs.len() >= 2, "{:#?}", detail.jobs);
        for job in &jobs[1..] {
            let placed = &job.placement;
            assert!(placed.starts_with(&format!("{holder} of 2 open")) && placed.contains("held there"), "{placed}");
            assert!(job.usage.unwrap().cached_tokens > 2000, "{job:?}");
        }
        assert_eq!(jobs[0].node.as_ref().unwrap().as_str(), holder);
    }
    cluster.finish().await;
}
