//! A simulated node process: its engine, the attempts it holds, and its leases.
//!
//! The node acts on an attempt only until the deadline of its lease, which it measures with its own clock from the time
//! at which it sent the last confirmed heartbeat. A node that passes the deadline drops the attempt; the real one
//! suspends it first, and continues if the lease is renewed after all.

use std::collections::BTreeMap;

use cfq_proto::ids::BootId;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};

use super::config::Timing;
use super::messages::{AttemptResult, Fence};
use super::tables::boot_id;
use crate::engine::{Engine, EngineConfig, ModelStatus};
use crate::event_queue::{MS, Micros};
use crate::trace::{BLOCK_TOKENS, Call};

/// Memory of a simulated model, in bytes.
const MODEL_BYTES: u64 = 1 << 33;
/// Length of a sequence that a simulated model supports, in tokens.
const CONTEXT_TOKENS: u32 = 1 << 20;

/// Phase of an attempt on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The acceptance is reported, but not confirmed.
    Offered,
    /// Runs in the engine.
    Running,
    /// Has ended in the engine; the result is reported, but not confirmed.
    Ended(AttemptResult),
}

/// An attempt that the node holds.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// Fence of the attempt.
    pub fence: Fence,
    /// Phase of the attempt.
    pub phase: Phase,
    /// The node stops acting on the attempt at this time.
    pub deadline: Micros,
    /// Number of the timer that belongs to the current phase; older timers are ignored.
    pub timer: u64,
    /// Whether the attempt will fail at its end.
    pub will_fail: bool,
}

/// A node.
#[derive(Debug)]
pub struct SimNode {
    /// Index of the node.
    pub index: usize,
    /// Whether the process runs.
    pub is_up: bool,
    /// Number of the process start.
    pub boot: u32,
    /// Whether the scheduler confirmed the registration of this boot.
    pub is_registered: bool,
    /// The node receives and sends nothing before this time.
    pub disconnected_until: Micros,
    /// Rate of the node's clock relative to true time.
    pub clock_rate: f64,
    /// The engine.
    pub engine: Engine,
    /// The attempts it holds, by lease.
    pub held: BTreeMap<u64, Held>,
    /// Heartbeats sent, with the time of each one that was not answered yet.
    pub unanswered: BTreeMap<u64, Micros>,
    /// Number of the last heartbeat.
    pub heartbeats: u64,
    /// Whether a heartbeat that reports a change is due before the next interval.
    pub heartbeat_is_due: bool,
    last_ledger: Ledger,
    config: EngineConfig,
}

impl SimNode {
    /// A node that was just started.
    pub fn new(index: usize, config: EngineConfig, models: usize, clock_rate: f64) -> Self {
        Self {
            index,
            is_up: true,
            boot: 1,
            is_registered: false,
            disconnected_until: 0,
            clock_rate,
            engine: Engine::new(config, models),
            held: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            heartbeats: 0,
            heartbeat_is_due: false,
            last_ledger: Ledger::default(),
            config,
        }
    }

    /// Starts a new process, without anything of the old one.
    pub fn restart(&mut self, models: usize) {
        let fresh = Self::new(self.index, self.config, models, self.clock_rate);
        *self = Self { boot: self.boot + 1, disconnected_until: self.disconnected_until, ..fresh };
    }

    /// Id of the current boot.
    pub fn boot_id(&self) -> BootId {
        boot_id(self.index, self.boot)
    }

    /// The time until which a lease may be used that was confirmed by a message sent at `sent`.
    pub fn deadline(&self, sent: Micros, timing: &Timing) -> Micros {
        let own_ms = timing.lease_ttl_ms - timing.lease_margin_ms;
        sent + ((own_ms * MS) as f64 / self.clock_rate) as Micros
    }

    /// Whether the call can be accepted beside the attempts that are running or offered.
    pub fn admits(&self, call: &Call, calls: &[Call]) -> bool {
        let (offered, reserved) = self.offered(call.model, calls);
        self.engine.admits(call)
            && self.engine.running(call.model) + offered < self.config.max_sequences
            && Engine::reservation(call) + reserved <= self.engine.free_tokens(call.model)
    }

    /// Number of offered attempts of a model and the tokens reserved for them.
    fn offered(&self, model: usize, calls: &[Call]) -> (u32, u64) {
        let is_offered = |held: &&Held| held.phase == Phase::Offered && calls[held.fence.job].model == model;
        let offered = self.held.values().filter(is_offered).map(|held| Engine::reservation(&calls[held.fence.job]));
        offered.fold((0, 0), |(count, tokens), reservation| (count + 1, tokens + reservation))
    }

    /// The current ledger. Its version increases when its contents differ from those of the last ledger returned.
    pub fn ledger(&mut self, models: &[ModelId], calls: &[Call]) -> Ledger {
        let mut ledger = self.state_of(models, calls);
        ledger.version = self.last_ledger.version;
        if self.last_ledger != ledger {
            ledger.version += 1;
            self.last_ledger = ledger.clone();
        }
        ledger
    }

    fn state_of(&self, models: &[ModelId], calls: &[Call]) -> Ledger {
        let models_free = self.config.models_in_memory.saturating_sub(self.engine.models_in_memory());
        Ledger {
            version: 0,
            models: models.iter().enumerate().map(|(index, id)| self.model_state(index, id, calls)).collect(),
            free_bytes: models_free as u64 * MODEL_BYTES,
            ..Ledger::default()
        }
    }

    fn model_state(&self, index: usize, id: &ModelId, calls: &[Call]) -> ModelState {
        let engine = &self.engine;
        let status = engine.status(index);
        let cached = engine.cached(index);
        let (offered, reserved) = self.offered(index, calls);
        let is_resident = status == ModelStatus::Resident;
        ModelState {
            model: id.clone(),
            residency: match status {
                ModelStatus::Resident => Residency::Resident,
                ModelStatus::Loading => Residency::Loading,
                ModelStatus::Available | ModelStatus::Unloading => Residency::Available,
            },
            device: "cuda:0".into(),
            need_bytes: MODEL_BYTES,
            context_tokens: CONTEXT_TOKENS,
            kv_tokens_free: if is_resident { engine.free_tokens(index).saturating_sub(reserved) } else { 0 },
            kv_tiers: KvTiers { device: cached.device * BLOCK_TOKENS, offloaded: cached.host * BLOCK_TOKENS },
            running: engine.running(index) + offered,
            max_sequences: if is_resident { self.config.max_sequences } else { 0 },
            prefill_rate: self.config.prefill_rate,
            decode_rate: self.config.decode_rate,
            load_rate: 1_000.0 * MODEL_BYTES as f64 / self.config.load_ms.max(1) as f64,
            tokens_per_byte: 1.0,
        }
    }
}
