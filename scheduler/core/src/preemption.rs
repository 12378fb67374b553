//! Preemption of tasks: a ready task of P0 gets the runner slot of a running task of a lower class, after the next step
//! of that task.
//!
//! Runners take ready tasks in the order of their keys, so only a task that would get the next free slot may preempt
//! another, and only one that comes after it in this order: otherwise the victim, whose key does not change, would get
//! its slot back. The decision names one victim for each waiting task. It is repeated at intervals, and withdraws a
//! name that is no longer needed.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::LoopState;
use cfq_proto::task::Priority;

/// Position of a task in the order in which runners get tasks; the smallest is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskOrder {
    /// The task's order key, in µs since 1970.
    pub key_us: i64,
    /// Number of the task; breaks ties.
    pub number: TaskNumber,
}

/// A task that waits for a runner slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyTask {
    /// Id of the task.
    pub id: TaskId,
    /// Priority class of the task.
    pub priority: Priority,
    /// Position of the task.
    pub order: TaskOrder,
}

/// A task that holds a runner slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningTask {
    /// Id of the task.
    pub id: TaskId,
    /// Priority class of the task.
    pub priority: Priority,
    /// Position that the task has once it is ready again.
    pub order: TaskOrder,
    /// State of the task's loop.
    pub loop_state: LoopState,
    /// The waiting task that named this one as its victim.
    pub preempted_by: Option<TaskId>,
}

/// A change of a victim's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preemption {
    /// The running task.
    pub victim: TaskId,
    /// The waiting task that named it before.
    pub before: Option<TaskId>,
    /// The waiting task that names it now; `None` withdraws the name.
    pub by: Option<TaskId>,
}

/// Whether a task may be released after a step that leads to this state of its loop. A task in its hand-off keeps its
/// slot: it holds the turn to merge into its repository, or is about to end.
pub fn may_be_preempted(loop_state: LoopState) -> bool {
    match loop_state {
        LoopState::Converged => false,
        LoopState::Idle
        | LoopState::Generating
        | LoopState::Reviewing
        | LoopState::Revising
        | LoopState::Escalated
        | LoopState::Failed => true,
    }
}

/// Returns which victims to name, and which names to withdraw. `ready` are the first ready tasks, in their order; at
/// least one more than there are free slots, if there are as many. Of the possible victims, the last in the order is
/// named.
pub fn preemptions(free_slots: usize, ready: &[ReadyTask], running: &[RunningTask]) -> Vec<Preemption> {
    let waiting: Vec<&ReadyTask> =
        ready.iter().skip(free_slots).take_while(|task| task.priority == Priority::P0).collect();
    let mut changes = Vec::new();
    let (mut served, mut kept) = (BTreeSet::new(), BTreeSet::new());
    for victim in running {
        let Some(by) = victim.preempted_by else { continue };
        let is_needed = waiting.iter().any(|task| task.id == by && may_preempt(task, victim));
        if is_needed && served.insert(by) {
            kept.insert(victim.id);
        } else {
            changes.push(Preemption { victim: victim.id, before: Some(by), by: None });
        }
    }
    let mut victims: Vec<&RunningTask> = running.iter().filter(|task| !kept.contains(&task.id)).collect();
    victims.sort_by_key(|task| Reverse(task.order));
    for task in waiting.into_iter().filter(|task| !served.contains(&task.id)) {
        let Some(at) = victims.iter().position(|victim| may_preempt(task, victim)) else { continue };
        let victim = victims.remove(at);
        changes.retain(|change| change.victim != victim.id);
        changes.push(Preemption { victim: victim.id, before: victim.preempted_by, by: Some(task.id) });
    }
    changes
}

fn may_preempt(task: &ReadyTask, victim: &RunningTask) -> bool {
    victim.priority > task.priority && victim.order > task.order && may_be_preempted(victim.loop_state)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ready(priority: Priority, key_us: i64) -> ReadyTask {
        ReadyTask { id: TaskId::fresh(), priority, order: TaskOrder { key_us, number: TaskNumber(key_us) } }
    }

    fn running(priority: Priority, key_us: i64) -> RunningTask {
        let ReadyTask { id, priority, order } = ready(priority, key_us);
        RunningTask { id, priority, order, loop_state: LoopState::Generating, preempted_by: None }
    }

    fn named(changes: &[Preemption]) -> Vec<(TaskId, Option<TaskId>)> {
        changes.iter().map(|change| (change.victim, change.by)).collect()
    }

    #[test]
    fn last_task_of_a_lower_class_is_the_victim() {
        let (urgent, second) = (ready(Priority::P0, 10), ready(Priority::P0, 11));
        let tasks = [running(Priority::P2, 20), running(Priority::P3, 30), running(Priority::P0, 40)];
        assert_eq!(named(&preemptions(0, &[urgent], &tasks)), [(tasks[1].id, Some(urgent.id))]);
        let both = preemptions(0, &[urgent, second], &tasks);
        assert_eq!(named(&both), [(tasks[1].id, Some(urgent.id)), (tasks[0].id, Some(second.id))]);
        assert_eq!(preemptions(1, &[urgent], &tasks), [], "a slot is free");
    }

    #[test]
    fn victim_comes_later_and_is_not_in_its_hand_off() {
        let urgent = ready(Priority::P0, 10);
        let older = running(Priority::P3, 9);
        let merging = RunningTask { loop_state: LoopState::Converged, ..running(Priority::P2, 20) };
        assert_eq!(preemptions(0, &[urgent], &[older, merging]), []);
    }

    #[test]
    fn older_task_of_a_lower_class_gets_the_next_slot_first() {
        let (aged, urgent) = (ready(Priority::P2, 5), ready(Priority::P0, 10));
        assert_eq!(preemptions(0, &[aged, urgent], &[running(Priority::P2, 20)]), []);
        assert_eq!(preemptions(1, &[aged, urgent], &[running(Priority::P2, 20)]).len(), 1);
        assert_eq!(preemptions(0, &[ready(Priority::P1, 10)], &[running(Priority::P2, 20)]), [], "only P0 preempts");
    }

    #[test]
    fn name_is_withdrawn_when_it_is_not_needed() {
        let urgent = ready(Priority::P0, 10);
        let victim = RunningTask { preempted_by: Some(urgent.id), ..running(Priority::P2, 20) };
        assert_eq!(preemptions(0, &[urgent], &[victim]), [], "named already");
        let withdrawn = [Preemption { victim: victim.id, before: Some(urgent.id), by: None }];
        assert_eq!(preemptions(1, &[urgent], &[victim]), withdrawn, "a slot is free");
        assert_eq!(preemptions(0, &[], &[victim]), withdrawn, "the task waits no longer");
        let merging = RunningTask { loop_state: LoopState::Converged, ..victim };
        let other = running(Priority::P2, 15);
        let changes = preemptions(0, &[urgent], &[merging, other]);
        assert_eq!(named(&changes), [(merging.id, None), (other.id, Some(urgent.id))]);
    }

    proptest! {
        #[test]
        fn each_waiting_task_has_one_victim_and_deciding_twice_changes_nothing(
            classes in prop::collection::vec(0i16..4, 0..6), free in 0usize..3,
            held in prop::collection::vec((0i16..4, 0i64..40, any::<bool>(), prop::option::of(0usize..6)), 0..6),
        ) {
            let tasks: Vec<ReadyTask> = classes.iter().enumerate()
                .map(|(n, class)| ready(Priority::try_from(*class).unwrap(), 5 * n as i64)).collect();
            let mut held: Vec<RunningTask> = held.iter().map(|(class, key_us, merges, by)| RunningTask {
                loop_state: if *merges { LoopState::Converged } else { LoopState::Reviewing },
                preempted_by: by.and_then(|n| tasks.get(n)).map(|task| task.id),
                ..running(Priority::try_from(*class).unwrap(), *key_us)
            }).collect();
            for change in preemptions(free, &tasks, &held) {
                let victim = held.iter_mut().find(|task| task.id == change.victim).unwrap();
                prop_assert_eq!(victim.preempted_by, change.before);
                victim.preempted_by = change.by;
            }
            prop_assert_eq!(preemptions(free, &tasks, &held), []);
            let mut names = BTreeSet::new();
            for victim in held.iter().filter(|task| task.preempted_by.is_some()) {
                let by = tasks.iter().find(|task| Some(task.id) == victim.preempted_by).unwrap();
                prop_assert!(names.insert(by.id));
                prop_assert!(by.priority == Priority::P0 && victim.priority > Priority::P0 && victim.order > by.order);
                prop_assert!(victim.loop_state != LoopState::Converged);
            }
        }
    }
}
