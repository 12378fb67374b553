//! An agent of a task is a program, such as the command line of a coding agent.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use cfq_inference_node::CommandConfig;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

const ADD: &str = "def add(a, b):\n    return a + b\n";

/// A cluster whose critic is a shell script that runs `text`.
async fn cluster_with_critic(text: &str) -> Cluster {
    let args = ["-c", text].map(str::to_owned).to_vec();
    let critic = CommandConfig { program: Some("/bin/sh".into()), args: Some(args), ..CommandConfig::default() };
    Cluster::start_with(Options {
        models: vec!["command:critic".parse().unwrap()],
        beta: "command:critic".into(),
        commands: BTreeMap::from([("critic".to_owned(), critic)]),
        ..Options::default()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn program_reviews_what_a_model_wrote() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let seen = folder.path().join("seen");
    let report = review(95, &[]);
    let cluster =
        cluster_with_critic(&format!("cat > {}; echo 'Here is my report:'; printf '%s' '{report}'", seen.display()))
            .await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let prompt = std::fs::read_to_string(&seen).unwrap();
    assert!(prompt.contains("return a + b") && prompt.contains("JSON schema"), "{prompt}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_login_asks_a_human_at_once() {
    let cluster = cluster_with_critic("echo 'Not logged in. Please run /login' >&2; exit 1").await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("Please run /login -> log in to the coding agent"), "{}", detail.reason);
    cluster.finish().await;
}
