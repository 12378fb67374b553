//! Admission of sequences to one model, and the model's measured rates. Both are updated by the batcher thread and by
//! the threads that admit sequences.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_memory::{KvAdmission, KvPoolFull, Reservation};
use tokio::sync::watch;

use crate::batch::latency_model::{BatchWork, LatencyModel};
use crate::batch::prompt_lookup::PassCost;
use crate::engine_failure::EngineFailure;

/// Notifier that fires whenever the result of [`crate::Engine::state`] changes.
pub type StateChanged = watch::Sender<()>;

/// Number of most recent outputs from which the expected output length is estimated.
const MAX_OUTPUT_LENGTHS: usize = 64;
/// Minimum number of recorded outputs for an estimate; with fewer, the maximum output is assumed.
const MIN_OUTPUT_LENGTHS: usize = 16;

/// Admission control of one model: KV tokens and sequence slots.
pub struct Admission {
    kv: Mutex<KvAdmission>,
    /// Lengths of the last finished outputs, in tokens.
    output_lengths: Mutex<VecDeque<u64>>,
    max_sequences: usize,
    changes: Arc<StateChanged>,
}

impl Admission {
    /// Creates the admission control of a pool of `tokens` KV tokens, with at least one sequence slot.
    pub fn new(tokens: u64, max_sequences: usize, changes: Arc<StateChanged>) -> Arc<Self> {
        Arc::new(Self {
            kv: Mutex::new(KvAdmission::new(tokens)),
            output_lengths: Mutex::new(VecDeque::with_capacity(MAX_OUTPUT_LENGTHS)),
            max_sequences: max_sequences.max(1),
            changes,
        })
    }

    fn output_lengths(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.output_lengths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the output length, in tokens, of a sequence that finished normally (neither cancelled nor failed).
    pub fn record_output(&self, tokens: usize) {
        let mut lengths = self.output_lengths();
        if lengths.len() == MAX_OUTPUT_LENGTHS {
            lengths.pop_front();
        }
        lengths.push_back(tokens as u64);
    }

    /// Expected output length of a sequence with a limit of `max_tokens`, in tokens: the 90th percentile of the
    /// recorded outputs, at most `max_tokens`.
    pub fn expected_output(&self, max_tokens: u64) -> u64 {
        let mut lengths: Vec<u64> = self.output_lengths().iter().copied().collect();
        if lengths.len() < MIN_OUTPUT_LENGTHS {
            return max_tokens;
        }
        lengths.sort_unstable();
        lengths.get(lengths.len() * 9 / 10).map_or(max_tokens, |length| max_tokens.min(*length))
    }

    fn kv(&self) -> MutexGuard<'_, KvAdmission> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of sequence slots.
    pub fn max_sequences(&self) -> usize {
        self.max_sequences
    }

    /// Size of the KV pool, in tokens.
    pub fn capacity(&self) -> u64 {
        self.kv().capacity()
    }

    /// KV tokens that are not reserved.
    pub fn free(&self) -> u64 {
        self.kv().free()
    }

    /// Number of admitted sequences.
    pub fn running(&self) -> usize {
        self.kv().sequences()
    }

    /// Reserves `tokens` KV tokens and a slot until the permit is dropped.
    ///
    /// # Errors
    /// [`KvPoolFull`]; with `free` = 0 if all slots are taken.
    pub fn reserve(self: &Arc<Self>, tokens: u64) -> Result<Permit, KvPoolFull> {
        let mut kv = self.kv();
        if kv.sequences() >= self.max_sequences {
            return Err(KvPoolFull { requested: tokens, free: 0, capacity: kv.capacity() });
        }
        let id = kv.reserve(tokens)?;
        drop(kv);
        self.changes.send_replace(());
        Ok(Permit { admission: self.clone(), id })
    }

    /// Fires the notifier of state changes.
    pub fn notify(&self) {
        self.changes.send_replace(());
    }
}

/// Reservation of one sequence. Dropping it releases its KV tokens and its slot.
pub struct Permit {
    admission: Arc<Admission>,
    id: Reservation,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.kv().release(self.id);
        self.admission.changes.send_replace(());
    }
}

/// Measured rates of one engine, and its failure if it cannot continue.
pub struct EngineStats {
    stats: Mutex<StatsSnapshot>,
    changes: Arc<StateChanged>,
}

/// The values of [`EngineStats`] at one moment. A rate is zero until it is measured.
#[derive(Debug, Clone, Default)]
pub struct StatsSnapshot {
    /// Moving average of the prefilled tokens per second, whatever the lengths of the prompts were.
    pub prefill_rate: f64,
    /// Model of the duration of a pass as a function of its work.
    pub latency: LatencyModel,
    /// Decode rate of one sequence, in tokens per second.
    pub decode_rate: f64,
    /// Load rate, in bytes of the model file per second.
    pub load_rate: f64,
    /// Prompt tokens per byte of prompt text.
    pub tokens_per_byte: f64,
    /// Number of preemptions since the load.
    pub preemptions: u64,
    /// Number of tokens whose keys and values are in the pool.
    pub kv_tokens: u64,
    /// Number of units of work that the batcher thread has begun, see [`EngineStats::begin_work`].
    works: u64,
    /// Whether the last of these units has not ended.
    is_working: bool,
    /// Why the engine cannot continue; `None` while it works.
    pub failure: Option<EngineFailure>,
}

impl StatsSnapshot {
    /// See [`crate::Engine::unfinished_work`].
    pub fn unfinished_work(&self) -> Option<u64> {
        self.is_working.then_some(self.works)
    }
}

impl EngineStats {
    /// Creates the stats of an engine before its first pass; `load_rate` is in bytes of the model file per second.
    pub fn new(load_rate: f64, changes: Arc<StateChanged>) -> Arc<Self> {
        // 0.3 tokens per byte until the first prompt is tokenized: typical for English and code.
        let stats = StatsSnapshot { load_rate, tokens_per_byte: 0.3, ..StatsSnapshot::default() };
        Arc::new(Self { stats: Mutex::new(stats), changes })
    }

    fn lock(&self) -> MutexGuard<'_, StatsSnapshot> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the current values.
    pub fn snapshot(&self) -> StatsSnapshot {
        self.lock().clone()
    }

    /// Number of prompt rows that a pass computes in `time` if `past` tokens before them are cached; `None` until
    /// prefill has been measured.
    pub fn rows_in(&self, time: Duration, past: usize) -> Option<f64> {
        self.lock().latency.rows_in(time, past)
    }

    /// Cost of a pass over `rows` decoding sequences. Before the rates are measured, a fixed cost of zero is assumed,
    /// so that drafting does not pay off.
    pub fn pass_cost(&self, rows: usize) -> PassCost {
        let stats = self.lock();
        if stats.prefill_rate <= 0.0 || stats.decode_rate <= 0.0 {
            return PassCost { fixed: 0.0, per_row: 1.0 };
        }
        let per_row = 1.0 / stats.prefill_rate;
        // The decode rate is assumed to have been measured on passes of about `rows` rows.
        PassCost { fixed: (1.0 / stats.decode_rate - per_row * rows.max(1) as f64).max(0.0), per_row }
    }

    /// Records the duration of a pass that contained prefill.
    pub fn record_prefill(&self, work: BatchWork, took: Duration) {
        let rate = work.rows / took.as_secs_f64().max(1e-6);
        let mut stats = self.lock();
        stats.prefill_rate = smooth(stats.prefill_rate, rate, 0.3);
        stats.latency.record(work, took);
    }

    /// Records the duration of a pass in which every sequence computed exactly one token.
    pub fn record_decode(&self, took: Duration) {
        let rate = 1.0 / took.as_secs_f64().max(1e-6);
        let mut stats = self.lock();
        stats.decode_rate = smooth(stats.decode_rate, rate, 0.05);
    }

    /// Records the number of tokens and bytes of a prompt, for [`StatsSnapshot::tokens_per_byte`].
    pub fn record_tokenized(&self, tokens: usize, bytes: usize) {
        if bytes > 0 {
            let mut stats = self.lock();
            stats.tokens_per_byte = smooth(stats.tokens_per_byte, tokens as f64 / bytes as f64, 0.1);
        }
    }

    /// Counts a preempted sequence.
    pub fn record_preemption(&self) {
        self.lock().preemptions += 1;
    }

    /// Sets the number of tokens whose keys and values are in the pool.
    pub fn set_kv_tokens(&self, kv_tokens: u64) {
        self.lock().kv_tokens = kv_tokens;
    }

    /// Records that the batcher thread begins a unit of work: one forward pass, or the work for one command. The
    /// previous unit, if any, has ended.
    pub fn begin_work(&self) {
        let mut stats = self.lock();
        stats.works += 1;
        stats.is_working = true;
    }

    /// Records that the batcher thread has ended its work and waits for a command.
    pub fn end_work(&self) {
        self.lock().is_working = false;
    }

    /// Records that the engine cannot continue, and fires the notifier of state changes.
    pub fn set_failure(&self, failure: EngineFailure) {
        self.lock().failure = Some(failure);
        self.changes.send_replace(());
    }
}

/// Exponential moving average; the first value replaces zero.
fn smooth(old: f64, new: f64, weight: f64) -> f64 {
    if old <= 0.0 { new } else { old + weight * (new - old) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_output_is_the_90th_percentile_of_recent_outputs() {
        let admission = Admission::new(100, 2, Arc::default());
        assert_eq!(admission.expected_output(500), 500);
        for length in 1..=100 {
            admission.record_output(length);
        }
        assert_eq!((admission.expected_output(500), admission.expected_output(10)), (94, 10), "of the last 64");
    }

    #[test]
    fn dropped_permit_releases_tokens_and_slot() {
        let (changes, watcher) = watch::channel(());
        let admission = Admission::new(100, 2, Arc::new(changes));
        let first = admission.reserve(60).ok().unwrap();
        assert!(matches!(admission.reserve(50), Err(KvPoolFull { requested: 50, free: 40, .. })));
        let second = admission.reserve(10).ok().unwrap();
        assert!(matches!(admission.reserve(1), Err(KvPoolFull { free: 0, .. })), "both slots are taken");
        assert!(watcher.has_changed().unwrap());
        drop((first, second));
        assert_eq!((admission.free(), admission.running()), (100, 0));
    }
}
