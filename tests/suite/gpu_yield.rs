//! Tests that a node yields its GPU to another program. A fake NVML library reports that the other program uses the
//! GPU.

use std::path::Path;

use cfq_proto::http::{JobSummary, TaskDetail};
use cfq_proto::task::{Agent, TaskState};
use cfq_tests::cluster::{self, Cluster, Options, WAIT_LIMIT};
use cfq_tests::fake_gpus::{FakeGpus, rtx_3090};
use cfq_tests::foreign_process::ForeignProcess;
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::{SMALL_MODEL, long_generation_spec, rejection, wait_for_first_journal};
use cfq_tests::wait;

const GIB: u64 = 1 << 30;

fn alpha_job(detail: &TaskDetail) -> &JobSummary {
    detail.jobs.iter().find(|job| job.role == Agent::Alpha).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_yields_its_gpu_to_a_foreign_process_and_returns() {
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::make_traversable(home.path());
    let test = "node_yields_its_gpu_to_a_foreign_process_and_returns";
    let Some(gpus) = FakeGpus::install(test, home.path(), &rtx_3090()) else { return };
    let mut options = Options {
        models: vec![SMALL_MODEL.parse().unwrap()],
        alpha: SMALL_MODEL.into(),
        second_node: true,
        node_environment: gpus.environment(),
        yield_bytes: Some(GIB),
        ..Options::default()
    };
    options.timing.job_step_timeout_ms = 60_000;
    // The node polls the GPUs with each heartbeat; this interval is short enough for a text that a fast machine
    // generates in a second.
    options.timing.heartbeat_ms = 40;
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("beta", vec![rejection()]);
    let (repo, other, third) = (
        UserRepo::with_uncommitted_changes(),
        UserRepo::with_uncommitted_changes(),
        UserRepo::with_uncommitted_changes(),
    );
    let uncut = cluster.submit(&long_generation_spec(&cluster, &repo)).await;
    let uncut = cluster.wait_until_settled(uncut).await;
    assert_eq!(uncut.summary.state, TaskState::Escalated, "{}", uncut.reason);

    // Now `n1` is the only running node, and it is in the middle of a generation.
    cluster.kill9("second_node");
    let task = cluster.submit(&long_generation_spec(&cluster, &other)).await;
    wait_for_first_journal(&cluster, task).await;
    let game = ForeignProcess::start();
    let (pid, used) = (game.pid(), 2 * GIB);
    gpus.set_scenario(&format!("{}used = {used}\ngraphics = {pid} {used}\n", rtx_3090()));
    let waits = "n1 yields to sleep on cuda:0";
    wait::until("the job to wait for the GPU", WAIT_LIMIT, || async {
        let detail = cluster.client.task(task).await.map_err(|e| e.to_string())?;
        let job = alpha_job(&detail);
        if job.placement.contains(waits) { Ok(()) } else { Err(format!("{job:?}")) }
    })
    .await;
    let nodes = cluster::cfq(&cluster, home.path(), &["nodes"]);
    let nodes = String::from_utf8(nodes.stdout).unwrap();
    assert!(nodes.contains("yields to sleep on cuda:0"), "{nodes}");
    let other_model =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models/llama");
    let other_model = format!("path:{}", other_model.display());
    let load = cluster::cfq(&cluster, home.path(), &["models", "load", &other_model, "--node", "n1"]);
    let refused = String::from_utf8(load.stderr).unwrap();
    assert!(!load.status.success() && refused.contains("yields to sleep"), "{refused}");

    // The other node finishes the text from the journal.
    cluster.start_service("second_node");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let job = alpha_job(&detail);
    assert_eq!((job.losses, job.failures, job.node.as_ref().unwrap().as_str()), (0, 0, "n2"), "{job:?}");
    assert!(job.usage.unwrap().resumed_tokens > 0, "{job:?}");
    assert_eq!(detail.iterations[0].content_hash, uncut.iterations[0].content_hash, "identical files");
    let mut connection = cluster.database.connect().await;
    let released = "select detail from attempts where job = $1 and outcome = 'released'";
    let details: Vec<String> = sqlx::query_scalar(released).bind(job.id.0).fetch_all(&mut connection).await.unwrap();
    assert!(matches!(&details[..], [one] if one.contains("yields to sleep on cuda:0")), "{details:?}");
    cluster.run_oracle(task, &other).await;

    // The other program ends, and the node runs jobs again.
    cluster.kill9("second_node");
    drop(game);
    gpus.set_scenario(&rtx_3090());
    let mut short = cluster.spec(&third);
    (short.max_iterations, short.agents.alpha.max_tokens) = (Some(1), Some(20));
    let task = cluster.submit(&short).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(alpha_job(&detail).node.as_ref().unwrap().as_str(), "n1");
    cluster.start_service("second_node");
    wait::until("both nodes to be up", WAIT_LIMIT, || async {
        let nodes = cluster.client.nodes().await.map_err(|e| e.to_string())?;
        if nodes.iter().all(|node| node.alive) { Ok(()) } else { Err(format!("{nodes:?}")) }
    })
    .await;
    cluster.finish().await;
}
