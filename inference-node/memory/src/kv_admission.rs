//! Admission of sequences into a KV pool, counted in tokens.
//!
//! The reservation of a sequence covers its prompt and its expected output; releasing it frees the tokens. The sum of
//! all reservations never exceeds the capacity: a request for more tokens than are free is refused, and the error
//! states both numbers.

use std::collections::BTreeMap;

/// Identifies one admitted sequence. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reservation(u64);

/// The pool has too few free tokens now; a later request may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sequence needs {requested} KV tokens, but only {free} of {capacity} are free")]
pub struct KvPoolFull {
    /// Number of KV tokens that the sequence needs.
    pub requested: u64,
    /// Number of KV tokens that are free.
    pub free: u64,
    /// Size of the whole pool, in tokens.
    pub capacity: u64,
}

/// Reservations of one model's KV pool.
#[derive(Debug, Clone)]
pub struct KvAdmission {
    capacity: u64,
    reserved: u64,
    reservations: BTreeMap<Reservation, u64>,
    next_id: u64,
}

impl KvAdmission {
    /// Creates the admission control of a pool of `capacity` tokens, without reservations.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, reserved: 0, reservations: BTreeMap::new(), next_id: 0 }
    }

    /// Size of the whole pool, in tokens.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Tokens that are not reserved.
    pub fn free(&self) -> u64 {
        self.capacity - self.reserved
    }

    /// Number of admitted sequences.
    pub fn sequences(&self) -> usize {
        self.reservations.len()
    }

    /// Reserves `tokens` for one sequence.
    ///
    /// # Errors
    /// [`KvPoolFull`] if fewer tokens are free.
    pub fn reserve(&mut self, tokens: u64) -> Result<Reservation, KvPoolFull> {
        if tokens > self.free() {
            return Err(KvPoolFull { requested: tokens, free: self.free(), capacity: self.capacity });
        }
        let id = Reservation(self.next_id);
        self.next_id += 1;
        self.reserved += tokens;
        self.reservations.insert(id, tokens);
        Ok(id)
    }

    /// Frees the tokens of a reservation. Releasing twice changes nothing.
    pub fn release(&mut self, id: Reservation) {
        if let Some(tokens) = self.reservations.remove(&id) {
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
            let mut pool = KvAdmission::new(capacity);
            let mut live: Vec<(Reservation, u64)> = Vec::new();
            let mut released: Vec<Reservation> = Vec::new();
            for op in ops {
                match op {
                    Op::Reserve(tokens) => {
                        let sum: u64 = live.iter().map(|(_, t)| t).sum();
                        match pool.reserve(tokens) {
                            Ok(id) => live.push((id, tokens)),
                            Err(full) => prop_assert!(tokens > capacity - sum && full.free == capacity - sum),
                        }
                    }
                    Op::Release(at) if !live.is_empty() => {
                        let (id, _) = live.swap_remove(at % live.len());
                        pool.release(id);
                        released.push(id);
                    }
                    Op::ReleaseAgain(at) if !released.is_empty() => pool.release(released[at % released.len()]),
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
