//! Tests of results that cannot be merged or delivered: the task waits for a human.

use cfq_proto::ids::TaskNumber;
use cfq_proto::loop_step::{ActionKind, EscalationAction, LoopState};
use cfq_proto::task::TaskState;
use cfq_tests::cluster::Cluster;
use cfq_tests::repo::UserRepo;

use super::{add, score};

#[tokio::test(flavor = "multi_thread")]
async fn unmergeable_result_is_delivered_and_waits_for_a_human() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1), add(2)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    let first = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.wait_until_settled(first).await.summary.state, TaskState::Merged);
    let mut spec = cluster.spec(&repo);
    spec.description = "Write add(a, b) in add.py once more.".into();
    let before = repo.fingerprint();
    let second = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(second).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.summary.loop_state, LoopState::Converged);
    assert!(detail.runner.is_none(), "a waiting task holds no lease");
    let pr = cluster.client.pr(detail.pr.unwrap()).await.unwrap();
    assert_eq!(pr.state, cfq_proto::pr::PrState::Closed);
    for words in ["add.py", "cfq pull t2", "cfq pr show 2", "cfq resolve t2"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let branch = detail.delivered_branch.clone().unwrap();
    assert!(repo.show(&branch, "add.py").unwrap().contains("# try 2"), "the result is in the branch");
    assert_eq!(repo.fingerprint(), before);
    let actions = detail.escalation.unwrap().available_actions;
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    let again = EscalationAction::RetryWithConstraints { additional_constraints: vec!["x".into()] };
    assert!(cluster.client.resolve(second, again).await.is_err(), "the loop is over");

    cluster.client.resolve(second, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(second, TaskState::Accepted).await;
    assert!(done.reason.contains(&branch) && done.reason.contains("not merged"), "{}", done.reason);
    assert_eq!(done.summary.loop_state, LoopState::Idle);
    let after = cluster.run_oracle(second, &repo).await;
    assert_eq!(after.delivered_branch, Some(branch));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_delivery_waits_for_a_human_and_merges_once_possible() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    repo.branch("cfq");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    assert_eq!(detail.delivered_branch, None);
    for words in ["has a branch cfq", "cfq pull t1", "cfq pr show 1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    let late = cluster.client.cancel(task, "").await.unwrap_err().to_string();
    assert!(late.contains("merge has begun"), "{late}");

    repo.open().find_branch("cfq", git2::BranchType::Local).unwrap().rename("mine", false).unwrap();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(task, TaskState::Merged).await;
    assert!(repo.show(&done.delivered_branch.unwrap(), "add.py").unwrap().contains("def add"));
    assert!(done.escalation.is_none());
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn locked_branch_waits_for_a_human_with_the_lock_in_the_reason() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(1)]);
    cluster.models.script("beta", vec![score(93)]);
    let repo = UserRepo::with_uncommitted_changes();
    let spec = cluster.spec(&repo);
    let branch = cfq_agent_runner::workstream::branch_name(TaskNumber(1), &spec.description);
    let lock = repo.path().join(format!(".git/refs/heads/{branch}.lock"));
    std::fs::create_dir_all(lock.parent().unwrap()).unwrap();
    std::fs::write(&lock, "").unwrap();
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;

    assert_eq!(detail.summary.state, TaskState::WaitingOnHuman, "{}", detail.reason);
    for words in [lock.to_str().unwrap(), "delete this file", "cfq pull t1"] {
        assert!(detail.reason.contains(words), "{words:?} is not in {:?}", detail.reason);
    }
    std::fs::remove_file(&lock).unwrap();
    cluster.client.resolve(task, EscalationAction::AcceptBestEffort).await.unwrap();
    let done = cluster.wait_for_state(task, TaskState::Merged).await;
    assert_eq!(done.delivered_branch, Some(branch));
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
