//! Test of `cfq status`.

use std::time::{Duration, Instant};

use cfq_proto::http::ClusterStatus;
use cfq_tests::cluster::Options;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn status_names_what_runs_what_waits_and_what_needs_the_user() {
    // A busy machine must not depose the leader while the status is read.
    let cluster = Cluster::start_with(Options::default().with_leader_times_of_the_product()).await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let idle = stdout(&run(&["status"]));
    for words in ["is ready, up for", "tasks    none open", "nodes    1 alive", "runners  1 alive", "cfq submit"] {
        assert!(idle.contains(words), "{words:?} is not in {idle}");
    }
    let running = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(running).await;
    cluster
        .database
        .raw(
            "insert into tasks (id, body_hash, spec, title, state, priority, threshold, max_iterations)
             select gen_random_uuid(), 'h', '{}', 'a question', 'escalated', 2, 85, 5",
        )
        .await;
    let busy = stdout(&run(&["ps"]));
    for words in ["1 running, 1 needs you", "t2  escalated  a question", "calls    1 running, 0 waiting", "cfq show t2"]
    {
        assert!(busy.contains(words), "{words:?} is not in {busy}");
    }
    let json: ClusterStatus = serde_json::from_str(&stdout(&run(&["--json", "status"]))).unwrap();
    assert_eq!((json.tasks_in(&[TaskState::Escalated]), json.nodes_alive, json.not_ready), (1, 1, None));

    cluster.stop("runner").await;
    let (began, mut stopped) = (Instant::now(), run(&["status"]));
    while stopped.status.success() && began.elapsed() < Duration::from_secs(60) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        stopped = run(&["status"]);
    }
    let text = String::from_utf8_lossy(&stopped.stdout).into_owned();
    assert_eq!(stopped.status.code(), Some(5), "{text}");
    assert!(text.contains("is not ready") && text.contains("cfq logs --process runner"), "{text}");

    cluster.stop("scheduler").await;
    refused(&run(&["status"]), 5, &["no server responds"]);
    cluster.start_service("scheduler");
    cluster.wait_until_ready().await;
    cluster.finish().await;
}
