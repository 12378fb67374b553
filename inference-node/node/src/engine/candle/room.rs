//! The room of one model and its measured figures: written by its batcher, read by whoever admits and by the ledger.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_memory::{KvPool, NoRoom, Reservation};
use tokio::sync::watch;

use crate::engine::candle::lookup::Cost;
use crate::engine::candle::rate::{Load, Rate};

/// Told whenever a ledger would read differently.
pub type Changes = watch::Sender<()>;

/// Finished outputs the expectation is taken from, and how few are too few to expect anything from.
const LENGTHS: usize = 64;
const LENGTHS_LEAST: usize = 16;

/// KV tokens and sequence slots.
pub struct Room {
    pool: Mutex<KvPool>,
    /// Of the last finished outputs, in tokens.
    lengths: Mutex<VecDeque<u64>>,
    max_sequences: usize,
    changes: Arc<Changes>,
}

impl Room {
    pub fn new(tokens: u64, max_sequences: usize, changes: Arc<Changes>) -> Arc<Self> {
        let lengths = Mutex::new(VecDeque::with_capacity(LENGTHS));
        Arc::new(Self { pool: Mutex::new(KvPool::new(tokens)), lengths, max_sequences: max_sequences.max(1), changes })
    }

    fn lengths(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.lengths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sequence ended by itself after so many tokens of output.
    pub fn wrote(&self, tokens: usize) {
        let mut lengths = self.lengths();
        if lengths.len() == LENGTHS {
            lengths.pop_front();
        }
        lengths.push_back(tokens as u64);
    }

    /// What a sequence that may write `most` tokens is expected to write: nine of ten wrote no more.
    pub fn expected(&self, most: u64) -> u64 {
        let mut lengths: Vec<u64> = self.lengths().iter().copied().collect();
        if lengths.len() < LENGTHS_LEAST {
            return most;
        }
        lengths.sort_unstable();
        lengths.get(lengths.len() * 9 / 10).map_or(most, |length| most.min(*length))
    }

    fn pool(&self) -> MutexGuard<'_, KvPool> {
        // Each change is one assignment of counted numbers: whole even if a holder panicked.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn max_sequences(&self) -> usize {
        self.max_sequences
    }

    pub fn capacity(&self) -> u64 {
        self.pool().capacity()
    }

    pub fn free(&self) -> u64 {
        self.pool().free()
    }

    pub fn running(&self) -> usize {
        self.pool().sequences()
    }

    pub fn hold(self: &Arc<Self>, tokens: u64) -> Result<Held, NoRoom> {
        let mut pool = self.pool();
        if pool.sequences() >= self.max_sequences {
            return Err(NoRoom { need: tokens, have: 0, capacity: pool.capacity() });
        }
        let id = pool.reserve(tokens)?;
        drop(pool);
        self.changes.send_replace(());
        Ok(Held { room: self.clone(), id })
    }
}

/// Room of one sequence, given back when dropped.
pub struct Held {
    room: Arc<Room>,
    id: Reservation,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.room.pool().release(self.id);
        self.room.changes.send_replace(());
    }
}

/// Measured rates, and whether the engine still runs.
pub struct Figures {
    numbers: Mutex<Numbers>,
    changes: Arc<Changes>,
}

#[derive(Debug, Clone, Default)]
pub struct Numbers {
    /// Tokens per second.
    pub prefill_rate: f64,
    pub rate: Rate,
    /// Tokens per second of one sequence.
    pub decode_rate: f64,
    /// Bytes per second.
    pub load_rate: f64,
    pub tokens_per_byte: f64,
    /// Sequences put aside for want of room since the load.
    pub preemptions: u64,
    /// Tokens whose keys and values are in the pool.
    pub kv_tokens: u64,
    pub broken: Option<String>,
}

impl Figures {
    pub fn new(load_rate: f64, changes: Arc<Changes>) -> Arc<Self> {
        // Until the first prompt is counted: what English and code come to with a vocabulary of this kind.
        let numbers = Numbers { load_rate, tokens_per_byte: 0.3, ..Numbers::default() };
        Arc::new(Self { numbers: Mutex::new(numbers), changes })
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn read(&self) -> Numbers {
        self.lock().clone()
    }

    /// Rows of prompts that take `time` after `before` tokens; `None` while none were measured.
    pub fn rows_in(&self, time: Duration, before: usize) -> Option<f64> {
        self.lock().rate.rows_in(time, before)
    }

    /// What a pass over `rows` decoding sequences costs, as far as it was measured. Unmeasured, rows are worth what a pass is.
    pub fn cost(&self, rows: usize) -> Cost {
        let numbers = self.lock();
        if numbers.prefill_rate <= 0.0 || numbers.decode_rate <= 0.0 {
            return Cost { pass: 0.0, row: 1.0 };
        }
        let row = 1.0 / numbers.prefill_rate;
        // The measured step had about as many rows as this one has.
        Cost { pass: (1.0 / numbers.decode_rate - row * rows.max(1) as f64).max(0.0), row }
    }

    pub fn prefilled(&self, load: Load, took: Duration) {
        let rate = load.rows / took.as_secs_f64().max(1e-6);
        let mut numbers = self.lock();
        numbers.prefill_rate = smooth(numbers.prefill_rate, rate, 0.3);
        numbers.rate.measured(load, took);
    }

    /// One step, in which every running sequence got a token.
    pub fn decoded(&self, took: Duration) {
        let rate = 1.0 / took.as_secs_f64().max(1e-6);
        let mut numbers = self.lock();
        numbers.decode_rate = smooth(numbers.decode_rate, rate, 0.05);
    }

    pub fn counted(&self, tokens: usize, bytes: usize) {
        if bytes > 0 {
            let mut numbers = self.lock();
            numbers.tokens_per_byte = smooth(numbers.tokens_per_byte, tokens as f64 / bytes as f64, 0.1);
        }
    }

    pub fn preempted(&self) {
        self.lock().preemptions += 1;
    }

    pub fn holds(&self, kv_tokens: u64) {
        self.lock().kv_tokens = kv_tokens;
    }

    pub fn broken(&self, reason: String) {
        self.lock().broken = Some(reason);
        self.changes.send_replace(());
    }
}

fn smooth(old: f64, new: f64, weight: f64) -> f64 {
    if old <= 0.0 { new } else { old + weight * (new - old) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_is_what_nine_of_ten_wrote() {
        let room = Room::new(100, 2, Arc::default());
        assert_eq!(room.expected(500), 500);
        for length in 1..=100 {
            room.wrote(length);
        }
        assert_eq!((room.expected(500), room.expected(10)), (94, 10), "of the last 64");
    }

    #[test]
    fn room_comes_back_and_slots_count() {
        let (changes, watcher) = watch::channel(());
        let room = Room::new(100, 2, Arc::new(changes));
        let first = room.hold(60).ok().unwrap();
        assert!(matches!(room.hold(50), Err(NoRoom { need: 50, have: 40, .. })));
        let second = room.hold(10).ok().unwrap();
        assert!(matches!(room.hold(1), Err(NoRoom { have: 0, .. })), "both slots are taken");
        assert!(watcher.has_changed().unwrap());
        drop((first, second));
        assert_eq!((room.free(), room.running()), (100, 0));
    }
}
