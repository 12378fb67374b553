//! Somebody else's program takes the card of a node's machine, by a library of make-believe cards.

use std::path::Path;

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cards::{Cards, Other, rtx_3090};
use cfq_tests::cluster::{self, Cluster, Options, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};
use cfq_tests::small::{SMALL, first_journal, long_text};
use cfq_tests::wait;

const GIB: u64 = 1 << 30;

fn of_alpha(detail: &TaskDetail) -> &JobSummary {
    detail.jobs.iter().find(|job| job.role == Agent::Alpha).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_makes_way_for_a_game_its_work_moves_on_and_it_comes_back() {
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::open_to_all(home.path());
    let Some(cards) = Cards::new(home.path(), &rtx_3090()) else { return };
    let mut options = Options {
        models: vec![SMALL.parse().unwrap()],
        alpha: SMALL.into(),
        neighbour: true,
        node_environment: cards.environment(),
        yield_at: Some(GIB),
        ..Options::default()
    };
    options.timing.job_step_ms = 60_000;
    // Looks at its cards often enough for a text that a fast machine writes in a second.
    options.timing.beat_ms = 40;
    let cluster = Cluster::with(options).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let (repo, other, third) = (
        UserRepo::with_uncommitted_changes(),
        UserRepo::with_uncommitted_changes(),
        UserRepo::with_uncommitted_changes(),
    );
    let uncut = cluster.submit(&long_text(&cluster, &repo)).await;
    let uncut = cluster.rests(uncut).await;

    // The only node that is up, in the middle of a text.
    cluster.kill9("neighbour");
    let task = cluster.submit(&long_text(&cluster, &other)).await;
    first_journal(&cluster, task).await;
    let game = Other::start();
    let (pid, used) = (game.id(), 2 * GIB);
    cards.change_to(&format!("{}used = {used}\ngraphics = {pid} {used}\n", rtx_3090()));
    let waits = "n1 makes way for sleep on cuda:0";
    wait::until("the job waits for the card", PATIENCE, || async {
        let detail = cluster.client.task(task).await.map_err(|e| e.to_string())?;
        let job = of_alpha(&detail);
        if job.placement.contains(waits) { Ok(()) } else { Err(format!("{job:?}")) }
    })
    .await;
    let nodes = cluster::cfq(&cluster, home.path(), &["nodes"]);
    let nodes = String::from_utf8(nodes.stdout).unwrap();
    assert!(nodes.contains("makes way for sleep on cuda:0"), "{nodes}");
    let other_model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/node/tests/fixtures/models/llama");
    let other_model = format!("path:{}", other_model.display());
    let load = cluster::cfq(&cluster, home.path(), &["models", "load", &other_model, "--node", "n1"]);
    let refused = String::from_utf8(load.stderr).unwrap();
    assert!(!load.status.success() && refused.contains("makes way for sleep"), "{refused}");

    // Another node finishes what was begun here.
    cluster.start_service("neighbour");
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    let job = of_alpha(&detail);
    assert_eq!((job.losses, job.failures, job.node.as_ref().unwrap().as_str()), (0, 0, "n2"), "{job:?}");
    assert!(job.usage.unwrap().resumed_tokens > 0, "{job:?}");
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "the same files to the last byte");
    let mut connection = cluster.database.connect().await;
    let released = "select detail from attempts where job = $1 and outcome = 'released'";
    let said: Vec<String> = sqlx::query_scalar(released).bind(job.id.0).fetch_all(&mut connection).await.unwrap();
    assert!(matches!(&said[..], [one] if one.contains("makes way for sleep on cuda:0")), "{said:?}");
    cluster.oracle(task, &other).await;

    // The game is over: the node works again.
    cluster.kill9("neighbour");
    drop(game);
    cards.change_to(&rtx_3090());
    let task = cluster.submit(&long_text(&cluster, &third)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(of_alpha(&detail).node.as_ref().unwrap().as_str(), "n1");
    cluster.start_service("neighbour");
    wait::until("both nodes are up", PATIENCE, || async {
        let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
        if nodes.iter().all(|node| node.alive) { Ok(()) } else { Err(format!("{nodes:?}")) }
    })
    .await;
    cluster.finish().await;
}
