//! Events in virtual time. Events of the same time are returned in the order in which they were added, so a run does
//! not depend on the heap's layout.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Virtual time since the start of the run, in microseconds.
pub type Micros = u64;

/// Microseconds per millisecond.
pub const MS: Micros = 1_000;

/// Queue of future events, and the current time.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    now: Micros,
    added: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Micros,
    number: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // BinaryHeap returns its greatest entry first.
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), now: 0, added: 0 }
    }
}

impl<E> EventQueue<E> {
    /// The time of the event returned last.
    pub fn now(&self) -> Micros {
        self.now
    }

    /// The current time, in milliseconds.
    pub fn now_ms(&self) -> i64 {
        (self.now / MS) as i64
    }

    /// Number of events returned so far, and still queued.
    pub fn counts(&self) -> (u64, usize) {
        (self.added - self.heap.len() as u64, self.heap.len())
    }

    /// Adds an event that happens `delay` from now.
    pub fn after(&mut self, delay: Micros, event: E) {
        self.at(self.now.saturating_add(delay), event);
    }

    /// Adds an event at a time; a time in the past counts as now.
    pub fn at(&mut self, at: Micros, event: E) {
        self.heap.push(Entry { at: at.max(self.now), number: self.added, event });
        self.added += 1;
    }

    /// Advances the time to the next event and returns the event.
    pub fn pop(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_returned_by_time_and_then_in_the_order_of_their_addition() {
        let mut queue = EventQueue::default();
        for (at, event) in [(5, "c"), (1, "a"), (5, "d"), (2, "b")] {
            queue.at(at, event);
        }
        assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<String>(), "abcd");
        queue.at(1, "past");
        assert_eq!((queue.pop(), queue.now()), (Some("past"), 5));
    }
}
