//! Results that cannot be merged or delivered, and repositories that cannot be used.

use std::path::PathBuf;

use cfq_convergence::{History, Limits};
use cfq_proto::ids::TaskNumber;
use cfq_proto::looping::{ActionKind, EscalationAction, LoopState, Step};
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;

use super::bench::{AT_ONCE, Bench, add, bench, score};
use super::port::Cut;
use crate::driver::Stopped;

#[tokio::test]
async fn a_result_that_conflicts_with_earlier_cfq_work_is_delivered_and_waits_for_a_human() {
    let mut bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    bench.drive().await.unwrap();
    // Another task from the same base makes another add.py.
    bench.number = TaskNumber(43);
    bench.port.0.lock().unwrap().steps.clear();
    bench.port.0.lock().unwrap().jobs.clear();
    bench.script(vec![add(2)], vec![score(93)]);
    let history = bench.drive().await.unwrap();
    assert_eq!((history.state, history.hand_off.pr_state), (LoopState::Converged, Some(PrState::Closed)));
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(bench.show(&branch, "add.py").contains("# try 2"));
    assert_eq!(bench.delivered().len(), 2);
    let (why, actions) = bench.held();
    assert!(why.contains("add.py") && why.contains(&branch), "{why}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    // The decision is the one the records alone lead to.
    let steps = bench.steps();
    let at = steps.iter().position(|record| matches!(record.step, Step::Decided { .. })).unwrap();
    let Step::Decided { decided, .. } = &steps[at].step else { panic!("a decision") };
    let before = History::of(&steps[..at]).unwrap();
    assert_eq!(&cfq_convergence::decide(&Limits::default(), &before).unwrap(), decided);
    // A runner that finds it waiting leaves it alone; an answer ends it.
    assert_eq!(bench.drive().await.unwrap().next_seq, steps.len() as i32);
    bench.resolve(EscalationAction::AcceptBestEffort);
    let history = bench.drive().await.unwrap();
    assert_eq!((history.state, bench.ends_as()), (LoopState::Idle, TaskState::Accepted));
    assert_eq!(bench.delivered().len(), 2);
}

#[tokio::test]
async fn a_repository_that_cannot_be_used_is_said() {
    let mut bench1 = bench();
    bench1.spec.repo = "/nonexistent/repository".into();
    bench1.script(vec![add(1)], vec![score(93)]);
    let history = bench1.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed, "no answer to an escalation could mend it");
    let steps = bench1.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.why.contains("/nonexistent/repository"), "{}", decided.why);
    let mut bench2 = bench();
    let empty = bench2.user.folder.path().join("empty");
    git2::Repository::init(&empty).unwrap();
    bench2.spec.repo = empty.to_str().unwrap().to_owned();
    bench2.spec.base = None;
    let history = bench2.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed);
    let steps = bench2.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.why.contains("no commits yet"), "{}", decided.why);
}

/// Converged and merged, and the branch is still to be made.
async fn before_delivery() -> Bench {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    let delivering = AT_ONCE.iter().position(|k| *k == "delivered").unwrap();
    bench.port.0.lock().unwrap().cut = Some(Cut::After(delivering - 1));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    bench.port.0.lock().unwrap().cut = None;
    bench
}

#[tokio::test]
async fn a_repository_that_went_away_is_told_and_its_return_ends_the_task_as_merged() {
    let bench = before_delivery().await;
    let moved: PathBuf = bench.user.folder.path().join("moved");
    std::fs::rename(bench.user.path(), &moved).unwrap();
    let history = bench.drive().await.unwrap();
    assert!(history.facts.held && !history.hand_off.done && history.hand_off.delivered.is_none());
    let (why, actions) = bench.held();
    assert!(why.contains(bench.user.path().to_str().unwrap()), "{why}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort], "merged in the mirror, it cannot be aborted");
    std::fs::rename(&moved, bench.user.path()).unwrap();
    bench.resolve(EscalationAction::AcceptBestEffort);
    assert!(bench.drive().await.unwrap().hand_off.delivered.is_some());
    assert_eq!((bench.ends_as(), bench.delivered().len()), (TaskState::Merged, 1));
}

#[tokio::test]
async fn a_repository_that_stays_away_does_not_keep_the_task_from_ending_as_accepted() {
    let bench = before_delivery().await;
    std::fs::rename(bench.user.path(), bench.user.folder.path().join("moved")).unwrap();
    bench.drive().await.unwrap();
    bench.resolve(EscalationAction::AcceptBestEffort);
    let history = bench.drive().await.unwrap();
    assert!(history.hand_off.done && history.hand_off.delivered.is_none());
    assert_eq!(bench.ends_as(), TaskState::Accepted, "nothing was delivered, so it is not merged");
    let Some(Step::HandedOff { why }) = bench.steps().last().map(|r| r.step.clone()) else { panic!("handed off") };
    assert!(why.contains("cfq pull t42"), "{why}");
}

#[tokio::test]
async fn a_merge_that_cannot_be_looked_at_asks_a_human_instead_of_trying_for_ever() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    let merging = AT_ONCE.iter().position(|k| *k == "merge_intent").unwrap();
    bench.port.0.lock().unwrap().cut = Some(Cut::Before(merging));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    bench.port.0.lock().unwrap().cut = None;
    // Mirror and repository are both gone: nothing is left to merge.
    std::fs::remove_dir_all(bench.data.path().join("mirrors")).unwrap();
    std::fs::rename(bench.user.path(), bench.user.folder.path().join("moved")).unwrap();
    assert!(bench.drive().await.unwrap().facts.held);
    assert_eq!(bench.held().1, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
}
