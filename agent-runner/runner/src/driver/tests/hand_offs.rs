//! Tests of results that cannot be merged or delivered, and of repositories that cannot be used.

use std::path::PathBuf;

use cfq_convergence::{History, LoopLimits};
use cfq_proto::ids::TaskNumber;
use cfq_proto::loop_step::{ActionKind, EscalationAction, LoopState, Step};
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;

use super::fixture::{Fixture, STEPS_OF_FIRST_TRY, add, fixture, score};
use super::port::Interrupt;
use crate::driver::Stopped;

#[tokio::test]
async fn conflicting_result_is_delivered_and_waits_for_a_human() {
    let mut fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    fixture.drive().await.unwrap();
    // A second task with the same base commit creates a different add.py.
    fixture.number = TaskNumber(43);
    fixture.port.0.lock().unwrap().steps.clear();
    fixture.port.0.lock().unwrap().jobs.clear();
    fixture.script(vec![add(2)], vec![score(93)]);
    let history = fixture.drive().await.unwrap();
    assert_eq!((history.state, history.hand_off.pr_state), (LoopState::Converged, Some(PrState::Closed)));
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(fixture.show(&branch, "add.py").contains("# try 2"));
    assert_eq!(fixture.delivered().len(), 2);
    let (reason, actions) = fixture.held();
    assert!(reason.contains("add.py") && reason.contains(&branch), "{reason}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    // The decision can be replayed from the records alone.
    let steps = fixture.steps();
    let at = steps.iter().position(|record| matches!(record.step, Step::Decided { .. })).unwrap();
    let Step::Decided { decided, .. } = &steps[at].step else { panic!("a decision") };
    let before = History::of(&steps[..at]).unwrap();
    assert_eq!(&cfq_convergence::decide(&LoopLimits::default(), &before).unwrap(), decided);
    // A runner does nothing while the task waits for a human; the human's action ends the task.
    assert_eq!(fixture.drive().await.unwrap().next_seq, steps.len() as i32);
    fixture.resolve(EscalationAction::AcceptBestEffort);
    let history = fixture.drive().await.unwrap();
    assert_eq!((history.state, fixture.task_state()), (LoopState::Idle, TaskState::Accepted));
    assert_eq!(fixture.delivered().len(), 2);
}

#[tokio::test]
async fn unusable_repository_fails_the_task_with_the_reason() {
    let mut fixture1 = fixture();
    fixture1.spec.repo = "/nonexistent/repository".into();
    fixture1.script(vec![add(1)], vec![score(93)]);
    let history = fixture1.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed, "no answer to an escalation could fix a missing repository");
    let steps = fixture1.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.explanation.contains("/nonexistent/repository"), "{}", decided.explanation);
    let mut fixture2 = fixture();
    let empty = fixture2.user.folder.path().join("empty");
    git2::Repository::init(&empty).unwrap();
    fixture2.spec.repo = empty.to_str().unwrap().to_owned();
    fixture2.spec.base = None;
    let history = fixture2.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed);
    let steps = fixture2.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.explanation.contains("no commits yet"), "{}", decided.explanation);
}

/// Returns the fixture of a task whose result is merged, but not yet delivered.
async fn before_delivery() -> Fixture {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    let delivering = STEPS_OF_FIRST_TRY.iter().position(|k| *k == "delivered").unwrap();
    fixture.port.0.lock().unwrap().interrupt = Some(Interrupt::After(delivering - 1));
    assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
    fixture.port.0.lock().unwrap().interrupt = None;
    fixture
}

#[tokio::test]
async fn moved_repository_holds_the_task_until_it_is_back() {
    let fixture = before_delivery().await;
    let moved: PathBuf = fixture.user.folder.path().join("moved");
    std::fs::rename(fixture.user.path(), &moved).unwrap();
    let history = fixture.drive().await.unwrap();
    assert!(history.facts.hand_off_held && !history.hand_off.done && history.hand_off.delivered.is_none());
    let (reason, actions) = fixture.held();
    assert!(reason.contains(fixture.user.path().to_str().unwrap()), "{reason}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort], "a result merged in the mirror cannot be aborted");
    std::fs::rename(&moved, fixture.user.path()).unwrap();
    fixture.resolve(EscalationAction::AcceptBestEffort);
    assert!(fixture.drive().await.unwrap().hand_off.delivered.is_some());
    assert_eq!((fixture.task_state(), fixture.delivered().len()), (TaskState::Merged, 1));
}

#[tokio::test]
async fn task_of_a_missing_repository_can_end_as_accepted() {
    let fixture = before_delivery().await;
    std::fs::rename(fixture.user.path(), fixture.user.folder.path().join("moved")).unwrap();
    fixture.drive().await.unwrap();
    fixture.resolve(EscalationAction::AcceptBestEffort);
    let history = fixture.drive().await.unwrap();
    assert!(history.hand_off.done && history.hand_off.delivered.is_none());
    assert_eq!(fixture.task_state(), TaskState::Accepted, "nothing was delivered, so it is not merged");
    let Some(Step::HandedOff { reason }) = fixture.steps().last().map(|r| r.step.clone()) else { panic!("handed off") };
    assert!(reason.contains("cfq pull t42"), "{reason}");
}

#[tokio::test]
async fn merge_that_cannot_be_computed_waits_for_a_human() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    let merging = STEPS_OF_FIRST_TRY.iter().position(|k| *k == "merge_intent").unwrap();
    fixture.port.0.lock().unwrap().interrupt = Some(Interrupt::Before(merging));
    assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
    fixture.port.0.lock().unwrap().interrupt = None;
    // Mirror and repository are both gone, so the result cannot be merged or delivered.
    std::fs::remove_dir_all(fixture.data.path().join("mirrors")).unwrap();
    std::fs::rename(fixture.user.path(), fixture.user.folder.path().join("moved")).unwrap();
    assert!(fixture.drive().await.unwrap().facts.hand_off_held);
    assert_eq!(fixture.held().1, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
}

#[tokio::test]
async fn locked_branch_holds_the_task_until_the_lock_is_gone() {
    let fixture = before_delivery().await;
    let lock = fixture.user.path().join(".git/refs/heads/cfq").join(format!("{}.lock", fixture.branch_file()));
    std::fs::create_dir_all(lock.parent().unwrap()).unwrap();
    std::fs::write(&lock, "").unwrap();
    fixture.drive().await.unwrap();
    let (reason, _) = fixture.held();
    assert!(reason.contains(lock.to_str().unwrap()) && reason.contains("delete"), "{reason}");
    assert!(lock.exists(), "a foreign lock is kept");
    std::fs::remove_file(&lock).unwrap();
    fixture.resolve(EscalationAction::AcceptBestEffort);
    fixture.drive().await.unwrap();
    assert_eq!((fixture.task_state(), fixture.delivered().len()), (TaskState::Merged, 1));
}

#[tokio::test]
async fn branch_that_the_user_moved_before_the_step_is_not_delivered_twice() {
    let change = |fixture: &Fixture, deleted: bool| {
        let repository = fixture.user.repo();
        let name = format!("refs/heads/{}", fixture.delivered()[0]);
        let mut branch = repository.find_reference(&name).unwrap();
        if deleted {
            return branch.delete().unwrap();
        }
        let parent = branch.peel_to_commit().unwrap();
        let author = git2::Signature::now("user", "user@example.org").unwrap();
        let commit = repository.commit(None, &author, &author, "mine", &parent.tree().unwrap(), &[&parent]).unwrap();
        branch.set_target(commit, "commit: mine").unwrap();
    };
    for deleted in [false, true] {
        let fixture = before_delivery().await;
        let delivering = STEPS_OF_FIRST_TRY.iter().position(|k| *k == "delivered").unwrap();
        fixture.port.0.lock().unwrap().interrupt = Some(Interrupt::Before(delivering));
        assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
        fixture.port.0.lock().unwrap().interrupt = None;
        let branch = fixture.delivered();
        change(&fixture, deleted);
        let history = fixture.drive().await.unwrap();
        assert_eq!(fixture.delivered(), branch, "deleted: {deleted}");
        assert_eq!(history.hand_off.delivered.unwrap().0, branch[0]);
        assert_eq!(std::fs::read_dir(fixture.data.path().join("deliveries")).unwrap().count(), 0);
    }
}
