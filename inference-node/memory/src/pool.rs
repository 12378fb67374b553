//! Admission into a KV pool, by tokens.
//!
//! A sequence is admitted with prompt + expected output and returns the room when its reservation is released. The sum
//! of all reservations never exceeds the capacity; asking for more than is free is answered with both numbers.

use std::collections::BTreeMap;

/// Names one admitted sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reservation(u64);

/// Not enough room now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("needs {need} tokens of KV, {have} of {capacity} are free")]
pub struct NoRoom {
    pub need: u64,
    pub have: u64,
    pub capacity: u64,
}

/// The tokens of one model's KV pool.
#[derive(Debug, Clone)]
pub struct KvPool {
    capacity: u64,
    reserved: u64,
    held: BTreeMap<Reservation, u64>,
    next: u64,
}

impl KvPool {
    pub fn new(capacity: u64) -> Self {
        Self { capacity, reserved: 0, held: BTreeMap::new(), next: 0 }
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    pub fn free(&self) -> u64 {
        self.capacity - self.reserved
    }

    /// Sequences admitted now.
    pub fn sequences(&self) -> usize {
        self.held.len()
    }

    pub fn reserve(&mut self, tokens: u64) -> Result<Reservation, NoRoom> {
        if tokens > self.free() {
            return Err(NoRoom { need: tokens, have: self.free(), capacity: self.capacity });
        }
        let id = Reservation(self.next);
        self.next += 1;
        self.reserved += tokens;
        self.held.insert(id, tokens);
        Ok(id)
    }

    /// Returns the room; releasing twice changes nothing.
    pub fn release(&mut self, id: Reservation) {
        if let Some(tokens) = self.held.remove(&id) {
            self.reserved -= tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Reserve(u64),
        Release(usize),
        ReleaseAgain(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            prop_oneof![0u64..2000, Just(u64::MAX)].prop_map(Op::Reserve),
            any::<usize>().prop_map(Op::Release),
            any::<usize>().prop_map(Op::ReleaseAgain),
        ]
    }

    proptest! {
        #[test]
        fn capacity_is_never_exceeded(capacity in 0u64..10_000, ops in proptest::collection::vec(op(), 0..200)) {
            let mut pool = KvPool::new(capacity);
            let mut live: Vec<(Reservation, u64)> = Vec::new();
            let mut gone: Vec<Reservation> = Vec::new();
            for op in ops {
                match op {
                    Op::Reserve(tokens) => {
                        let sum: u64 = live.iter().map(|(_, t)| t).sum();
                        match pool.reserve(tokens) {
                            Ok(id) => live.push((id, tokens)),
                            Err(full) => prop_assert!(tokens > capacity - sum && full.have == capacity - sum),
                        }
                    }
                    Op::Release(at) if !live.is_empty() => {
                        let (id, _) = live.swap_remove(at % live.len());
                        pool.release(id);
                        gone.push(id);
                    }
                    Op::ReleaseAgain(at) if !gone.is_empty() => pool.release(gone[at % gone.len()]),
                    Op::Release(_) | Op::ReleaseAgain(_) => {}
                }
                let sum: u64 = live.iter().map(|(_, t)| t).sum();
                prop_assert!(sum <= capacity);
                prop_assert_eq!(pool.free(), capacity - sum);
                prop_assert_eq!(pool.sequences(), live.len());
            }
        }
    }
}
