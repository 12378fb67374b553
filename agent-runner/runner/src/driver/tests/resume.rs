//! Test that an interrupted run resumes from its committed steps.

use cfq_convergence::History;

use super::fixture::{Fixture, add, fixture, score};
use super::port::Interrupt;
use crate::driver::Stopped;

#[tokio::test]
async fn run_interrupted_at_any_step_ends_the_same() {
    let uninterrupted = fixture();
    let (alpha, beta) = (vec![add(1), add(2)], vec![score(50), score(95)]);
    uninterrupted.script(alpha.clone(), beta.clone());
    uninterrupted.drive().await.unwrap();
    let expected = uninterrupted.kinds();
    let commits = |fixture: &Fixture| -> Vec<String> {
        let history = History::of(&fixture.steps()).unwrap();
        history.iterations.iter().map(|i| i.artifact.commit.clone().unwrap()).collect()
    };
    for index in 0..expected.len() {
        for interrupt in [Interrupt::Before(index), Interrupt::After(index)] {
            let fixture = fixture();
            fixture.script(alpha.clone(), beta.clone());
            fixture.port.0.lock().unwrap().interrupt = Some(interrupt);
            assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
            fixture.port.0.lock().unwrap().interrupt = None;
            // The next attempt may run on another machine, where the mirror is empty.
            std::fs::remove_dir_all(fixture.data.path().join("mirrors")).ok();
            fixture.drive().await.unwrap();
            assert_eq!(fixture.kinds(), expected, "interrupted at {index}");
            assert_eq!(commits(&fixture).len(), 2);
            assert_eq!(fixture.delivered().len(), 1, "interrupted at {index}");
            assert_eq!(fixture.port.0.lock().unwrap().jobs.len(), 4, "every job was submitted once");
        }
    }
}

#[tokio::test]
async fn repeated_step_gives_the_same_commit() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    fixture.port.0.lock().unwrap().interrupt = Some(Interrupt::Before(2));
    assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
    let commit = |fixture: &Fixture| History::of(&fixture.steps()).unwrap().iterations[0].artifact.commit.clone();
    let first = commit(&fixture);
    fixture.port.0.lock().unwrap().steps.truncate(1);
    assert_eq!(fixture.drive().await, Err(Stopped::LeaseLost));
    assert_eq!(commit(&fixture), first);
}
