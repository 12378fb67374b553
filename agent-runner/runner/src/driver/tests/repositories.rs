//! Tests of the wait for another task that copies from the same repository.

use std::fs::File;
use std::time::Duration;

use cfq_convergence::History;
use cfq_proto::loop_step::{EscalationReason, LoopState};
use cfq_proto::timing::Timing;

use super::fixture::{Fixture, add, escalation, fixture, score};
use crate::workstream::Mirror;

/// Maximum wait for a driver that would wait for ever.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Takes the lock of the mirror, as a task does that copies from the repository.
fn hold_fetch_lock(fixture: &Fixture) -> File {
    Mirror::open(fixture.data.path(), &fixture.user.path()).unwrap();
    let mirror = std::fs::read_dir(fixture.data.path().join("mirrors")).unwrap().next().unwrap().unwrap().path();
    let lock = File::options().create(true).truncate(false).write(true).open(mirror.join("cfq-fetch.lock")).unwrap();
    lock.lock().unwrap();
    lock
}

async fn drive(fixture: &Fixture, task_step_timeout_ms: u64) -> History {
    let timing =
        Timing { backoff_base_ms: 1, backoff_cap_ms: 2, task_step_timeout_ms, ..Timing::default().faster(100) };
    tokio::time::timeout(MAX_WAIT, fixture.drive_with(timing)).await.expect("the driver is blocked").unwrap()
}

#[tokio::test]
async fn wait_for_another_copy_is_not_part_of_the_time_limit() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    let lock = hold_fetch_lock(&fixture);
    // The limit of the copy is four fifths of the step timeout.
    let held = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        drop(lock);
    });
    let history = drive(&fixture, 5000).await;
    assert_eq!(history.state, LoopState::Idle, "{:?}", fixture.kinds());
    held.join().unwrap();
}

#[tokio::test]
async fn lock_that_is_never_released_is_named_in_the_reason() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    let lock = hold_fetch_lock(&fixture);
    let history = drive(&fixture, 500).await;
    let (reason, _, text) = escalation(&history, &fixture.steps());
    assert_eq!(reason, EscalationReason::WorkflowError);
    assert!(text.contains("cfq-fetch.lock") && text.contains("locked for more than"), "{text}");
    drop(lock);
}
