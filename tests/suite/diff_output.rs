//! Test of `cfq diff`: into a pipe it prints the exact bytes, so that `git apply` recreates the task's files.

use std::process::Command;

use cfq_proto::task::TaskState;
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use git2::{ApplyOptions, Diff};

/// Text with characters that terminals interpret or that look like line ends.
const ODD_TEXT: &str = "one\r\ntwo \u{c}\u{85}\ttab  \nthree\n\n\n";

#[tokio::test(flavor = "multi_thread")]
async fn diff_in_a_pipe_can_be_applied() {
    let cluster = Cluster::start().await;
    let (new, changed) = (file("odd.txt", ODD_TEXT), file("math.py", "def sub(a, b):\n    return b - a\n\n\n"));
    cluster.models.script("alpha", vec![Reply::Text(format!("{new}\n{changed}"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{detail:?}");

    let mut command = Command::new(binary::cfq());
    command.args(["diff", "t1"]).env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
    let output = tokio::task::block_in_place(|| command.output().unwrap());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains('\u{c}') && text.contains('\u{85}'), "{text:?}");

    let opened = repo.open();
    let tree = |name: &str| opened.revparse_single(&format!("{name}^{{tree}}")).unwrap().peel_to_tree().unwrap();
    let mut options = ApplyOptions::new();
    let patch = Diff::from_buffer(text.as_bytes()).unwrap();
    let mut index = opened.apply_to_tree(&tree("HEAD"), &patch, Some(&mut options)).unwrap();
    let branch = detail.delivered_branch.unwrap();
    assert_eq!(index.write_tree_to(&opened).unwrap(), tree(&branch).id(), "{text:?}");
    cluster.finish().await;
}
