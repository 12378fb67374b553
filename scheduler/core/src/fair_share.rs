//! Which ready task a free runner slot gets, if tasks were submitted with several API tokens.
//!
//! The ready tasks of each token are a queue in the order of their keys, which come from priority and age. The slot goes to
//! the token with the fewest running tasks; among several, to the one whose last grant is the longest ago. So the tokens take
//! turns, and before a token's first task at most one task of each other token gets a slot. Priorities count among the tasks
//! of a token. With a single token, the order is that of the keys.

use std::cmp::Ordering;
use std::collections::VecDeque;

use cfq_proto::ids::ApiTokenId;

use crate::slot_task::{ReadyTask, RunningTask, TaskOrder};

/// Running tasks, limit and last grant of a token, by which tokens are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiTokenShare {
    /// Number of the token's tasks that run.
    pub running: u32,
    /// Maximum of `running`; `None`: no maximum.
    pub limit: Option<u32>,
    /// When a task of the token got a slot last, in µs since 1970; `None`: never.
    pub last_granted_us: Option<i64>,
}

impl ApiTokenShare {
    /// Whether one more task of the token may run.
    pub fn has_room(self) -> bool {
        self.limit.is_none_or(|limit| self.running < limit)
    }
}

/// A token's first ready task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiTokenHead {
    /// Share of the token.
    pub share: ApiTokenShare,
    /// Position of its first ready task.
    pub order: TaskOrder,
}

impl ApiTokenHead {
    /// Sort key of the tokens; the smallest is next.
    fn turn(self) -> (u32, Option<i64>, TaskOrder) {
        (self.share.running, self.share.last_granted_us, self.order)
    }
}

/// Index of the token that gets the next free slot; `None` if no ready task may run.
pub fn next_api_token(heads: impl IntoIterator<Item = ApiTokenHead>) -> Option<usize> {
    let may_run = heads.into_iter().enumerate().filter(|(_, head)| head.share.has_room());
    may_run.min_by_key(|(_, head)| head.turn()).map(|(n, _)| n)
}

/// The ready tasks of a token, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiTokenQueue {
    /// The token.
    pub token: ApiTokenId,
    /// Share of the token.
    pub share: ApiTokenShare,
    /// Its first ready tasks.
    pub ready: VecDeque<ReadyTask>,
}

/// Queues of several tokens, from which grants are made one after the other.
#[derive(Debug, Clone)]
pub(crate) struct ApiTokenQueues {
    pub queues: Vec<ApiTokenQueue>,
    /// Time of the next grant, later than all before.
    next_us: i64,
}

impl ApiTokenQueues {
    /// The given queues, and an empty one for each token that has running tasks but no ready ones.
    pub fn new(queues: &[ApiTokenQueue], running: &[RunningTask]) -> Self {
        let mut queues = queues.to_vec();
        for task in running {
            if !queues.iter().any(|queue| queue.token == task.token) {
                let of_token = running.iter().filter(|other| other.token == task.token).count();
                let running = u32::try_from(of_token).unwrap_or(u32::MAX);
                let share = ApiTokenShare { running, limit: None, last_granted_us: task.token_granted_us };
                queues.push(ApiTokenQueue { token: task.token, share, ready: VecDeque::new() });
            }
        }
        let last = queues.iter().filter_map(|queue| queue.share.last_granted_us).max();
        Self { queues, next_us: last.unwrap_or(0).saturating_add(1) }
    }

    /// Index of the queue whose first task gets the next free slot.
    pub fn next(&self) -> Option<usize> {
        self.next_of(self.queues.iter().map(|queue| Some((queue.share, queue.ready.front()?.order))))
    }

    /// The ready task that would get the slot of `released` if that task became ready again; `None` if `released` itself would
    /// get it.
    pub fn next_after(&self, released: &RunningTask) -> Option<&ReadyTask> {
        let heads = self.queues.iter().map(|queue| {
            let first = queue.ready.front().map(|first| first.order);
            if queue.token != released.token {
                return Some((queue.share, first?));
            }
            let order = first.map_or(released.order, |first| first.min(released.order));
            Some((ApiTokenShare { running: queue.share.running.saturating_sub(1), ..queue.share }, order))
        });
        let queue = &self.queues[self.next_of(heads)?];
        queue.ready.front().filter(|first| queue.token != released.token || first.order < released.order)
    }

    /// Index of the queue that is next. `heads` has one entry for each queue, in their order; `None` if it has no ready task.
    fn next_of(&self, heads: impl Iterator<Item = Option<(ApiTokenShare, TaskOrder)>>) -> Option<usize> {
        let (indexes, heads): (Vec<usize>, Vec<ApiTokenHead>) = heads
            .enumerate()
            .filter_map(|(n, head)| head.map(|(share, order)| (n, ApiTokenHead { share, order })))
            .unzip();
        Some(indexes[next_api_token(heads)?])
    }

    /// Grants the next free slot. Returns false if no ready task may run.
    pub fn grant_next(&mut self) -> bool {
        let Some(next) = self.next() else { return false };
        let queue = &mut self.queues[next];
        queue.share.running += 1;
        queue.share.last_granted_us = Some(self.next_us);
        self.next_us += 1;
        queue.ready.pop_front().is_some()
    }

    /// Makes a running task ready again.
    pub fn release(&mut self, task: &RunningTask) {
        let Some(queue) = self.queues.iter_mut().find(|queue| queue.token == task.token) else { return };
        queue.share.running = queue.share.running.saturating_sub(1);
        let at = queue.ready.partition_point(|other| other.order < task.order);
        queue.ready.insert(at, task.as_ready());
    }
}

/// Another token than that of a waiting task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherApiToken {
    /// Its share and first ready task.
    pub head: ApiTokenHead,
    /// Number of its ready tasks.
    pub ready: u64,
}

/// Number of ready tasks that get a slot before a waiting one, as long as no task ends and none is added. `head` is that of
/// its token, of which `before_own` tasks come before the waiting one.
pub fn grants_before(head: ApiTokenHead, before_own: u64, others: &[OtherApiToken]) -> u64 {
    // The waiting task gets its slot when this number of tasks of its token run.
    let level = u64::from(head.share.running) + before_own;
    let of_other = |other: &OtherApiToken| {
        let running = u64::from(other.head.share.running);
        // At `level`, both tokens have as many running tasks, and the one with the older last grant is first. A token that
        // began with fewer got its last slot later; one that began with more, earlier; with as many, they keep their order.
        let is_first = match running.cmp(&u64::from(head.share.running)) {
            Ordering::Less => false,
            Ordering::Equal => other.head.turn() < head.turn(),
            Ordering::Greater => true,
        };
        let before = if running > level { 0 } else { level - running + u64::from(is_first) };
        let room = other.head.share.limit.map_or(u64::MAX, |limit| u64::from(limit).saturating_sub(running));
        before.min(other.ready).min(room)
    };
    before_own + others.iter().map(of_other).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{TaskId, TaskNumber};
    use cfq_proto::task::Priority;
    use proptest::prelude::*;

    use super::*;

    fn head(running: u32, limit: Option<u32>, key_us: i64) -> ApiTokenHead {
        let order = TaskOrder { key_us, number: TaskNumber(key_us) };
        ApiTokenHead { share: ApiTokenShare { running, limit, last_granted_us: None }, order }
    }

    fn queue(running: u32, limit: Option<u32>, keys: impl IntoIterator<Item = i64>) -> ApiTokenQueue {
        let ready = keys.into_iter().map(|key_us| ReadyTask {
            id: TaskId::fresh(),
            priority: Priority::P2,
            order: TaskOrder { key_us, number: TaskNumber(key_us) },
        });
        let share = ApiTokenShare { running, limit, last_granted_us: None };
        ApiTokenQueue { token: ApiTokenId::fresh(), share, ready: ready.collect() }
    }

    /// Keys of the tasks in the order in which they are granted.
    fn granted(queues: Vec<ApiTokenQueue>) -> Vec<i64> {
        let mut queues = ApiTokenQueues::new(&queues, &[]);
        let mut keys = Vec::new();
        while let Some(next) = queues.next() {
            keys.push(queues.queues[next].ready[0].order.key_us);
            assert!(queues.grant_next());
        }
        keys
    }

    #[test]
    fn token_with_fewest_running_tasks_is_next() {
        assert_eq!(next_api_token([head(2, None, 1), head(1, None, 9), head(1, None, 8)]), Some(2));
        assert_eq!(next_api_token([head(0, Some(0), 1), head(3, Some(3), 2), head(5, Some(6), 3)]), Some(2));
        assert_eq!(next_api_token([head(3, Some(3), 2)]), None);
        assert_eq!(next_api_token([]), None);
    }

    #[test]
    fn many_tasks_of_a_token_delay_a_task_of_another_by_one_slot() {
        assert_eq!(granted(vec![queue(4, None, 1..100), queue(0, None, [200])])[0], 200);
        assert_eq!(granted(vec![queue(0, None, 1..100), queue(0, None, [200])])[..2], [1, 200]);
        assert_eq!(granted(vec![queue(0, None, [1, 2, 3, 4, 5]), queue(0, None, [9, 10])]), [1, 9, 2, 10, 3, 4, 5]);
    }

    /// Two tokens with many tasks and a late one with two. The oldest running task ends whenever all slots are in use.
    #[test]
    fn tokens_take_turns_at_the_slots_that_become_free() {
        for slots in 1..=3 {
            let queues = [queue(0, None, 1..100), queue(0, None, 101..200), queue(0, None, [300, 301])];
            let mut queues = ApiTokenQueues::new(&queues, &[]);
            let mut running: VecDeque<usize> = VecDeque::new();
            let mut before_late = 0;
            while queues.queues[2].ready.len() == 2 {
                if running.len() == slots {
                    let ended = running.pop_front().unwrap();
                    queues.queues[ended].share.running -= 1;
                }
                let next = queues.next().unwrap();
                assert!(queues.grant_next());
                running.push_back(next);
                before_late += usize::from(next != 2);
            }
            assert_eq!(before_late, 2, "{slots} slots");
        }
    }

    #[test]
    fn limit_holds_back_only_its_token() {
        assert_eq!(granted(vec![queue(1, Some(2), [1, 2, 3]), queue(4, None, [8, 9])]), [1, 8, 9]);
    }

    proptest! {
        #[test]
        fn slots_are_shared_equally_while_all_tokens_have_tasks(
            lengths in prop::collection::vec(0i64..12, 1..6), running in prop::collection::vec(0u32..5, 6),
        ) {
            let queues: Vec<ApiTokenQueue> = lengths.iter().zip(&running).enumerate()
                .map(|(n, (length, running))| queue(*running, None, (0..*length).map(|key| key * 7 + n as i64))).collect();
            let mut queues = ApiTokenQueues::new(&queues, &[]);
            while let Some(next) = queues.next() {
                let waiting = queues.queues.iter().filter(|queue| !queue.ready.is_empty());
                let fewest = waiting.map(|queue| queue.share.running).min();
                prop_assert_eq!(Some(queues.queues[next].share.running), fewest);
                queues.grant_next();
            }
            prop_assert!(queues.queues.iter().all(|queue| queue.ready.is_empty()));
        }

        #[test]
        fn number_of_grants_before_a_task_is_that_of_the_order(
            own in (0u32..4, 1usize..6, prop::option::of(4u32..12), prop::option::of(0i64..50)), at in 0usize..6,
            others in prop::collection::vec((0u32..6, 1i64..8, prop::option::of(0u32..9), prop::option::of(0i64..50)), 0..4),
        ) {
            let (running, length, limit, last) = own;
            let mut queues = vec![queue(running, limit, (0..length as i64).map(|key| 1000 + 10 * key))];
            queues[0].share.last_granted_us = last;
            for (n, (running, length, limit, last)) in others.iter().enumerate() {
                let mut other = queue(*running, *limit, (0..*length).map(|key| 990 + 7 * key + n as i64));
                other.share.last_granted_us = *last;
                queues.push(other);
            }
            let at = at.min(length - 1);
            let head = |queue: &ApiTokenQueue| ApiTokenHead { share: queue.share, order: queue.ready[0].order };
            let others: Vec<OtherApiToken> = queues[1..].iter()
                .map(|queue| OtherApiToken { head: head(queue), ready: queue.ready.len() as u64 }).collect();
            let estimate = grants_before(head(&queues[0]), at as u64, &others);
            let wanted = queues[0].ready[at].id;
            let mut order = ApiTokenQueues::new(&queues, &[]);
            let mut before = 0;
            while let Some(next) = order.next() {
                if order.queues[next].ready[0].id == wanted {
                    prop_assert_eq!(estimate, before);
                    break;
                }
                before += 1;
                order.grant_next();
            }
        }
    }
}
