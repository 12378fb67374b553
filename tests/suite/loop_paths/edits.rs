//! Edits in other syntaxes than whole files.

use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::Cluster;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::Reply;

use super::score;

const CALC: &str = "def first():\n    return 0\n\n\ndef second():\n    return 0\n";

fn second_place(marker: &str) -> String {
    format!("calc.py\n```python\n<<<<<<< {marker}\n    return 0\n=======\n    return 2\n>>>>>>> REPLACE\n```\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn place_is_chosen_from_a_list_and_bytes_outside_the_edits_are_kept() {
    let cluster = Cluster::start().await;
    let others = "```diff\n--- a/latin.py\n+++ b/latin.py\n@@ -1,2 +1,2 @@\n # Caf\u{e9}\n-x = 1\n+x = 2\n```\n\
                  ```\n*** Begin Patch\n*** Update File: run.sh\n*** Move to: bin/run.sh\n@@\n-echo 1\n+echo 2\n*** Delete \
                  File: old.txt\n*** End Patch\n```\n";
    let chosen = second_place("SEARCH line 6") + others;
    cluster.models.script("alpha", vec![Reply::Text(second_place("SEARCH") + others), Reply::Text(chosen)]);
    cluster.models.script("beta", vec![score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    repo.commit_bytes(&[
        ("calc.py", CALC.as_bytes(), false),
        ("latin.py", b"# Caf\xe9\r\nx = 1\r\ny = 1", false),
        ("run.sh", b"#!/bin/sh\necho 1\n", true),
        ("old.txt", b"old\n", false),
    ]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [refused, applied] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!((refused.quarantine, &refused.commit), (Some(Quarantine::Unparsable), &None), "all or nothing");
    let message = &refused.findings[0].message;
    assert!(message.contains("1. line 2 below `def first():`, 2. line 6 below `def second():`"), "{message}");
    assert!(cluster.models.prompts("alpha")[1].contains("2. line 6 below"), "the creator gets the list");
    assert_eq!(applied.quarantine, None);
    let branch = detail.delivered_branch.clone().unwrap();
    assert_eq!(repo.show(&branch, "calc.py").unwrap(), "def first():\n    return 0\n\n\ndef second():\n    return 2\n");
    assert_eq!(repo.file(&branch, "latin.py").unwrap(), (b"# Caf\xe9\r\nx = 2\r\ny = 1".to_vec(), false));
    assert_eq!(repo.file(&branch, "bin/run.sh").unwrap(), (b"#!/bin/sh\necho 2\n".to_vec(), true));
    assert_eq!((repo.file(&branch, "run.sh"), repo.file(&branch, "old.txt")), (None, None));
    // The oracle compares whole files with what the models sent, so it is not used here.
    cluster.finish().await;
}
