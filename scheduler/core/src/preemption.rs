//! Preemption of tasks: a ready task of P0 gets the runner slot of a running task of a lower class, after the next step
//! of that task.
//!
//! A task may preempt another only if it would get the slot that the other leaves (`fair_share`): otherwise a third task
//! would get it, or the victim would get it back. The decision names one victim for each waiting task. It is repeated at
//! intervals, and withdraws a name that is no longer needed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::{ApiTokenId, TaskId};
use cfq_proto::loop_step::LoopState;
use cfq_proto::task::Priority;

use crate::fair_share::{ApiTokenQueue, ApiTokenQueues};
use crate::slot_task::{ReadyTask, RunningTask};

/// A change of the task that preempts a running one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preemption {
    /// The running task.
    pub victim: TaskId,
    /// The waiting task that preempts it so far.
    pub before: Option<TaskId>,
    /// The waiting task that preempts it now; `None`: none.
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

/// Returns which victims to name, and which names to withdraw. `queues` are the queues of all tokens that have ready tasks;
/// each has at least as many tasks as there are free slots, and one more, if there are as many. Of the possible victims,
/// one of the token with the most running tasks is named, and of these the last in the order.
pub fn preemptions(free_slots: usize, queues: &[ApiTokenQueue], running: &[RunningTask]) -> Vec<Preemption> {
    let mut queues = ApiTokenQueues::new(queues, running);
    for _ in 0..free_slots {
        if !queues.grant_next() {
            break;
        }
    }
    let mut named: Vec<(TaskId, &RunningTask)> = Vec::new();
    while let Some((task, victim)) = next_preemption(&queues, running, &named) {
        named.push((task, victim));
        queues.release(victim);
        if !queues.grant_next() {
            break;
        }
    }
    let change = |victim: &RunningTask, by| Preemption { victim: victim.id, before: victim.preempted_by, by };
    // Names are withdrawn first: a waiting task has at most one victim.
    let is_named = |victim: &RunningTask| named.iter().any(|(_, other)| other.id == victim.id);
    let withdrawn = running.iter().filter(|victim| victim.preempted_by.is_some() && !is_named(victim));
    let withdrawn = withdrawn.map(|victim| change(victim, None));
    let new = named.iter().filter(|(task, victim)| victim.preempted_by != Some(*task));
    withdrawn.chain(new.map(|(task, victim)| change(victim, Some(*task)))).collect()
}

/// The next waiting task that may preempt a running one, with its victim.
fn next_preemption<'a>(
    queues: &ApiTokenQueues,
    running: &'a [RunningTask],
    named: &[(TaskId, &RunningTask)],
) -> Option<(TaskId, &'a RunningTask)> {
    let urgent = |queue: &ApiTokenQueue| queue.ready.front().copied().filter(|task| task.priority == Priority::P0);
    let mut waiting: Vec<(u32, ReadyTask)> =
        queues.queues.iter().filter_map(|queue| Some((queue.share.running, urgent(queue)?))).collect();
    if waiting.is_empty() {
        return None;
    }
    waiting.sort_by_key(|(running, task)| (*running, task.order));
    let running_by_token: BTreeMap<ApiTokenId, u32> =
        queues.queues.iter().map(|queue| (queue.token, queue.share.running)).collect();
    let still_waits: BTreeSet<TaskId> =
        queues.queues.iter().flat_map(|queue| queue.ready.iter()).map(|task| task.id).collect();
    let mut victims: Vec<&RunningTask> = running
        .iter()
        .filter(|victim| victim.priority > Priority::P0 && may_be_preempted(victim.loop_state))
        .filter(|victim| !named.iter().any(|(_, other)| other.id == victim.id))
        .collect();
    victims.sort_by_key(|victim| Reverse((running_by_token.get(&victim.token), victim.order)));
    waiting.into_iter().find_map(|(_, task)| {
        // Prefers the victim that it preempts already, then those that no waiting task preempts, then the others.
        let rank = |victim: &RunningTask| match victim.preempted_by {
            Some(by) if by == task.id => 0,
            Some(by) if still_waits.contains(&by) => 2,
            Some(_) | None => 1,
        };
        for wanted in 0..=2 {
            // If the last task of a token would get its slot back, the earlier ones would, too.
            let mut tried = BTreeSet::new();
            let of_rank = victims.iter().filter(|victim| rank(victim) == wanted && tried.insert(victim.token));
            let mut fitting = of_rank.filter(|victim| queues.next_after(victim).is_some_and(|next| next.id == task.id));
            if let Some(victim) = fitting.next() {
                return Some((task.id, *victim));
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::TaskNumber;
    use proptest::prelude::*;

    use super::*;
    use crate::fair_share::ApiTokenShare;
    use crate::slot_task::TaskOrder;

    fn ready(priority: Priority, key_us: i64) -> ReadyTask {
        ReadyTask { id: TaskId::fresh(), priority, order: TaskOrder { key_us, number: TaskNumber(key_us) } }
    }

    /// The changes if all tasks are of one token.
    fn decide(free_slots: usize, ready: &[ReadyTask], running: &[RunningTask]) -> Vec<Preemption> {
        preemptions(free_slots, &[of_token(ApiTokenId::OWNER, ready, running)], running)
    }

    fn of_token(token: ApiTokenId, ready: &[ReadyTask], running: &[RunningTask]) -> ApiTokenQueue {
        let running = running.iter().filter(|task| task.token == token).count() as u32;
        ApiTokenQueue {
            token,
            share: ApiTokenShare { running, limit: None, last_granted_us: None },
            ready: ready.iter().copied().collect(),
        }
    }

    fn running(priority: Priority, key_us: i64) -> RunningTask {
        let ReadyTask { id, priority, order } = ready(priority, key_us);
        RunningTask {
            id,
            token: ApiTokenId::OWNER,
            token_granted_us: None,
            priority,
            order,
            loop_state: LoopState::Generating,
            preempted_by: None,
        }
    }

    fn named(changes: &[Preemption]) -> Vec<(TaskId, Option<TaskId>)> {
        changes.iter().map(|change| (change.victim, change.by)).collect()
    }

    #[test]
    fn last_task_of_a_lower_class_is_the_victim() {
        let (urgent, second) = (ready(Priority::P0, 10), ready(Priority::P0, 11));
        let tasks = [running(Priority::P2, 20), running(Priority::P3, 30), running(Priority::P0, 40)];
        assert_eq!(named(&decide(0, &[urgent], &tasks)), [(tasks[1].id, Some(urgent.id))]);
        let both = decide(0, &[urgent, second], &tasks);
        assert_eq!(named(&both), [(tasks[1].id, Some(urgent.id)), (tasks[0].id, Some(second.id))]);
        assert_eq!(decide(1, &[urgent], &tasks), [], "a slot is free");
    }

    #[test]
    fn victim_comes_later_and_is_not_in_its_hand_off() {
        let urgent = ready(Priority::P0, 10);
        let older = running(Priority::P3, 9);
        let merging = RunningTask { loop_state: LoopState::Converged, ..running(Priority::P2, 20) };
        assert_eq!(decide(0, &[urgent], &[older, merging]), []);
    }

    #[test]
    fn older_task_of_a_lower_class_gets_the_next_slot_first() {
        let (aged, urgent) = (ready(Priority::P2, 5), ready(Priority::P0, 10));
        assert_eq!(decide(0, &[aged, urgent], &[running(Priority::P2, 20)]), []);
        assert_eq!(decide(1, &[aged, urgent], &[running(Priority::P2, 20)]).len(), 1);
        assert_eq!(decide(0, &[ready(Priority::P1, 10)], &[running(Priority::P2, 20)]), [], "only P0 preempts");
    }

    #[test]
    fn name_is_withdrawn_when_it_is_not_needed() {
        let urgent = ready(Priority::P0, 10);
        let victim = RunningTask { preempted_by: Some(urgent.id), ..running(Priority::P2, 20) };
        assert_eq!(decide(0, &[urgent], &[victim]), [], "named already");
        let withdrawn = [Preemption { victim: victim.id, before: Some(urgent.id), by: None }];
        assert_eq!(decide(1, &[urgent], &[victim]), withdrawn, "a slot is free");
        assert_eq!(decide(0, &[], &[victim]), withdrawn, "the task waits no longer");
        let merging = RunningTask { loop_state: LoopState::Converged, ..victim };
        let other = running(Priority::P2, 15);
        let changes = decide(0, &[urgent], &[merging, other]);
        assert_eq!(named(&changes), [(merging.id, None), (other.id, Some(urgent.id))]);
    }

    #[test]
    fn task_of_a_token_with_a_smaller_share_preempts_one_of_another_token() {
        let other = ApiTokenId::fresh();
        // Older than the urgent task, so the order alone would protect them.
        let held: Vec<RunningTask> =
            [1, 2].map(|key| RunningTask { token: other, ..running(Priority::P2, key) }).to_vec();
        let urgent = ready(Priority::P0, 10);
        let queues = [of_token(ApiTokenId::OWNER, &[urgent], &held), of_token(other, &[ready(Priority::P2, 3)], &held)];
        assert_eq!(named(&preemptions(0, &queues, &held)), [(held[1].id, Some(urgent.id))]);
        // With one running task less, the other token would get the slot back.
        let queues = [of_token(ApiTokenId::OWNER, &[urgent], &held[1..]), of_token(other, &[], &held[1..])];
        assert_eq!(preemptions(0, &queues, &held[1..]), []);
        let younger = [RunningTask { token: other, ..running(Priority::P2, 11) }];
        assert_eq!(preemptions(0, &queues[..1], &younger).len(), 1, "a token without ready tasks counts too");
    }

    #[test]
    fn urgent_tasks_of_a_token_do_not_take_the_slots_of_another() {
        let other = ApiTokenId::fresh();
        let held = [running(Priority::P0, 1), RunningTask { token: other, ..running(Priority::P3, 50) }];
        let urgent = [ready(Priority::P0, 10), ready(Priority::P0, 11)];
        let queues = [of_token(ApiTokenId::OWNER, &urgent, &held)];
        assert_eq!(preemptions(0, &queues, &held), []);
    }

    #[test]
    fn task_of_a_token_at_its_limit_preempts_only_its_own() {
        let other = ApiTokenId::fresh();
        let held = [running(Priority::P2, 20), RunningTask { token: other, ..running(Priority::P3, 50) }];
        let urgent = ready(Priority::P0, 10);
        let mut queue = of_token(ApiTokenId::OWNER, &[urgent], &held);
        queue.share.limit = Some(1);
        assert_eq!(named(&preemptions(0, &[queue], &held)), [(held[0].id, Some(urgent.id))]);
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
            for change in decide(free, &tasks, &held) {
                let victim = held.iter_mut().find(|task| task.id == change.victim).unwrap();
                prop_assert_eq!(victim.preempted_by, change.before);
                victim.preempted_by = change.by;
            }
            prop_assert_eq!(decide(free, &tasks, &held), []);
            let mut names = BTreeSet::new();
            for victim in held.iter().filter(|task| task.preempted_by.is_some()) {
                let by = tasks.iter().find(|task| Some(task.id) == victim.preempted_by).unwrap();
                prop_assert!(names.insert(by.id));
                prop_assert!(by.priority == Priority::P0 && victim.priority > Priority::P0 && victim.order > by.order);
                prop_assert!(victim.loop_state != LoopState::Converged);
            }
        }

        #[test]
        fn decision_about_several_tokens_is_repeatable(
            waiting in prop::collection::vec((0usize..3, 0i16..2, 0i64..60), 0..8), free in 0usize..3,
            held in prop::collection::vec((0usize..3, 0i16..4, 0i64..60, prop::option::of(0usize..8)), 0..8),
            shares in prop::collection::vec((prop::option::of(0u32..4), prop::option::of(0i64..9)), 3),
        ) {
            let tokens = [ApiTokenId::fresh(), ApiTokenId::fresh(), ApiTokenId::fresh()];
            let mut tasks: Vec<(ApiTokenId, ReadyTask)> = waiting.iter()
                .map(|(token, class, key)| (tokens[*token], ready(Priority::try_from(*class).unwrap(), *key))).collect();
            tasks.sort_by_key(|(_, task)| task.order);
            let mut held: Vec<RunningTask> = held.iter().map(|(token, class, key, by)| RunningTask {
                token: tokens[*token],
                preempted_by: by.and_then(|n| tasks.get(n)).map(|(_, task)| task.id),
                ..running(Priority::try_from(*class).unwrap(), *key)
            }).collect();
            let queues: Vec<ApiTokenQueue> = tokens.into_iter().zip(shares).map(|(token, (limit, last_granted_us))| {
                let ready_tasks: Vec<ReadyTask> =
                    tasks.iter().filter(|(other, _)| *other == token).map(|(_, task)| *task).collect();
                let mut queue = of_token(token, &ready_tasks, &held);
                (queue.share.limit, queue.share.last_granted_us) = (limit, last_granted_us);
                queue
            }).filter(|queue| !queue.ready.is_empty()).collect();
            for change in preemptions(free, &queues, &held) {
                let victim = held.iter_mut().find(|task| task.id == change.victim).unwrap();
                prop_assert_eq!(victim.preempted_by, change.before);
                victim.preempted_by = change.by;
            }
            prop_assert_eq!(preemptions(free, &queues, &held), []);
            let mut names = BTreeSet::new();
            for victim in held.iter().filter(|task| task.preempted_by.is_some()) {
                let (_, by) = tasks.iter().find(|(_, task)| Some(task.id) == victim.preempted_by).unwrap();
                prop_assert!(names.insert(by.id));
                prop_assert!(by.priority == Priority::P0 && victim.priority > Priority::P0);
            }
        }
    }
}
