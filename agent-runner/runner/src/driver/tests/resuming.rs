//! A drive that was cut off, and the one that goes on from what was committed.

use cfq_convergence::History;

use super::bench::{Bench, add, bench, score};
use super::port::Cut;
use crate::driver::Stopped;

#[tokio::test]
async fn cut_off_at_every_step_it_ends_the_same() {
    let uncut = bench();
    let (alpha, beta) = (vec![add(1), add(2)], vec![score(50), score(95)]);
    uncut.script(alpha.clone(), beta.clone());
    uncut.drive().await.unwrap();
    let expected = uncut.kinds();
    let commits = |bench: &Bench| -> Vec<String> {
        let history = History::of(&bench.steps()).unwrap();
        history.iterations.iter().map(|i| i.artifact.commit.clone().unwrap()).collect()
    };
    for index in 0..expected.len() {
        for cut in [Cut::Before(index), Cut::After(index)] {
            let bench = bench();
            bench.script(alpha.clone(), beta.clone());
            bench.port.0.lock().unwrap().cut = Some(cut);
            assert_eq!(bench.drive().await, Err(Stopped::Lost));
            bench.port.0.lock().unwrap().cut = None;
            // The next attempt may be on another machine: its mirror is empty.
            std::fs::remove_dir_all(bench.data.path().join("mirrors")).ok();
            bench.drive().await.unwrap();
            assert_eq!(bench.kinds(), expected, "cut at {index}");
            assert_eq!(commits(&bench).len(), 2);
            assert_eq!(bench.delivered().len(), 1, "cut at {index}");
            assert_eq!(bench.port.0.lock().unwrap().jobs.len(), 4, "every job was asked for once");
        }
    }
}

#[tokio::test]
async fn a_step_made_again_gives_the_same_commit() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    bench.port.0.lock().unwrap().cut = Some(Cut::Before(2));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    let commit = |bench: &Bench| History::of(&bench.steps()).unwrap().iterations[0].artifact.commit.clone();
    let first = commit(&bench);
    bench.port.0.lock().unwrap().steps.truncate(1);
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    assert_eq!(commit(&bench), first);
}
