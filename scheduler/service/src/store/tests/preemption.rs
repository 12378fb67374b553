use cfq_proto::ids::TaskId;
use cfq_proto::loop_step::{Decided, Decision};
use cfq_proto::review::ReviewFeedback;
use cfq_proto::task::{Priority, TaskState};
use cfq_scheduler_core::{Preemption, preemptions};

use super::rows_read::{add_tasks, rows_read, single_connection};
use super::*;
use crate::testing::new_task;

async fn submit(env: &TestEnv, priority: Priority) -> TaskId {
    let mut task = new_task(None);
    task.spec.priority = priority;
    env.store.submit(&task).await.unwrap();
    task.id
}

/// A running task of P2 in the only slot, and a task of P0 that waits.
struct Full {
    env: TestEnv,
    leadership: Leadership,
    runner: BootId,
    victim: TaskFence,
    urgent: TaskId,
}

async fn full() -> Full {
    let env = TestEnv::new().await;
    let (runner, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    submit(&env, Priority::P2).await;
    let victim = grant(&env, runner).await.fence;
    let urgent = submit(&env, Priority::P0).await;
    Full { env, leadership, runner, victim, urgent }
}

/// Carries out the decision about preemptions. Returns what was written.
async fn decide(env: &TestEnv, leadership: Leadership) -> Vec<Preemption> {
    let tasks = env.store.task_queue().await.unwrap();
    let mut written = Vec::new();
    for change in preemptions(tasks.free_slots, &tasks.queues, &tasks.running) {
        if env.store.set_preemption(leadership, &change).await.unwrap() {
            written.push(change);
        }
    }
    written
}

async fn state(env: &TestEnv, task: TaskId) -> TaskState {
    env.store.task_detail(task).await.unwrap().unwrap().summary.state
}

fn is_released(reply: &StepReply) -> bool {
    match reply {
        StepReply::Committed { release, .. } => *release,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn step_of_a_victim_and_its_repeat_release_the_task() {
    let Full { env, leadership, runner, victim, urgent } = full().await;
    assert!(!is_released(&step(&env, victim, 0, started()).await), "nobody has named it");
    let named = Preemption { victim: victim.task, before: None, by: Some(urgent) };
    assert_eq!(decide(&env, leadership).await, [named]);
    assert_eq!(decide(&env, leadership).await, [], "one waiting task names one victim");
    let request = StepRequest { fence: victim, seq: 1, step: generated(artifact(1)), active_ms: 10 };
    let (reply, hints) = env.store.commit_step(&super::runner(), &request).await.unwrap();
    assert!(is_released(&reply) && hints.contains(&crate::store::Hint::TaskReady), "{reply:?} {hints:?}");
    assert_eq!(env.store.commit_step(&super::runner(), &request).await.unwrap().0, reply, "the repeat");
    assert!(!is_released(&step(&env, victim, 0, started()).await), "an earlier step");
    assert_eq!(state(&env, victim.task).await, TaskState::Ready);
    assert_eq!(env.store.count("select losses::bigint + unreceived from tasks where number = 1").await, 0);
    assert_eq!(grant(&env, runner).await.fence.task, urgent);
    let resumed = grant(&env, runner).await;
    assert_eq!((resumed.fence.task, resumed.steps.len()), (victim.task, 2));
    let checked = Step::Checked { iteration: 1, findings: vec![], quarantine: None, ran: vec![] };
    assert!(!is_released(&step(&env, resumed.fence, 2, checked).await), "the name ended with the lease");
}

#[tokio::test]
async fn victim_is_kept_if_the_waiting_task_needs_no_slot_any_more() {
    let Full { env, leadership, victim, urgent, .. } = full().await;
    assert_eq!(decide(&env, leadership).await.len(), 1);
    env.store.cancel(urgent, "me", Run::Commit).await.unwrap();
    assert!(!is_released(&step(&env, victim, 0, started()).await));
    assert_eq!(decide(&env, leadership).await, [Preemption { victim: victim.task, before: Some(urgent), by: None }]);
    // Neither a task that has ended, nor one that waits no longer, is part of a preemption.
    let late = Preemption { victim: victim.task, before: None, by: Some(urgent) };
    assert!(!env.store.set_preemption(leadership, &late).await.unwrap());
    let waiting = submit(&env, Priority::P0).await;
    env.store.cancel(victim.task, "me", Run::Commit).await.unwrap();
    let late = Preemption { by: Some(waiting), ..late };
    assert!(!env.store.set_preemption(leadership, &late).await.unwrap());
}

#[tokio::test]
async fn free_slot_makes_preemption_unnecessary() {
    let Full { env, leadership, .. } = full().await;
    env.store.raw("update runners set slots = 2").await;
    assert_eq!(decide(&env, leadership).await, []);
    env.store.raw("update runners set slots = null").await;
    assert_eq!(decide(&env, leadership).await.len(), 1, "the slots of an earlier version are unknown");
}

#[tokio::test]
async fn decision_reads_few_rows_beside_many_ready_tasks() {
    let Full { env, .. } = full().await;
    add_tasks(&env, 20_000, "(array['ready', 'merged'])[1 + n % 2]").await;
    env.store.raw("analyze").await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let (read, tasks) = rows_read(&store, store.task_queue()).await;
    assert_eq!(tasks.unwrap().running.len(), 1);
    assert!(read <= 1_000, "{read} rows read");
}

/// The task is named while it is reviewed; the decision that ends its loop begins the hand-off, which is not interrupted.
#[tokio::test]
async fn victim_in_its_hand_off_keeps_its_slot() {
    let Full { env, leadership, victim, .. } = full().await;
    committed(&env, victim, 0, started()).await;
    committed(&env, victim, 1, generated(artifact(1))).await;
    committed(&env, victim, 2, Step::Checked { iteration: 1, findings: vec![], quarantine: None, ran: vec![] }).await;
    let review = ReviewFeedback { quality_score: 95.0, defects: vec![], suggestions: vec![], required_changes: vec![] };
    let reviewed = Step::Reviewed { iteration: 1, review, job: JobId::fresh(), model: MODEL.into() };
    committed(&env, victim, 3, reviewed).await;
    assert_eq!(decide(&env, leadership).await.len(), 1);
    let decided = Decided {
        decision: Decision::Converged,
        explanation: "good".into(),
        best_iteration: Some(1),
        best_score: Some(95.0),
    };
    assert!(!is_released(&step(&env, victim, 4, Step::Decided { iteration: 1, decided }).await));
    assert_eq!(decide(&env, leadership).await[0].by, None, "the name is withdrawn");
    assert_eq!(state(&env, victim.task).await, TaskState::Running);
}
