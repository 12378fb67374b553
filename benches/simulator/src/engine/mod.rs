//! Simulated engine of one node: admission, prefix cache, one prefill at a time beside decoding, and model loads.
//!
//! The rates are constant. A prefill waits for those that were admitted before it, so the cached part of a prompt is
//! determined at admission. The time of a decode depends on the number of sequences at its start. Replies are not
//! reused: the traces do not say which later prompts contain them.

mod prefix_cache;

use std::collections::BTreeMap;

use prefix_cache::PrefixCache;
pub use prefix_cache::{CachedBlocks, Lru};

use crate::event_queue::{MS, Micros};
use crate::trace::{BLOCK_TOKENS, Call};

/// Properties of a simulated node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineConfig {
    /// KV pool of each loaded model, in tokens.
    pub kv_tokens: u64,
    /// Host tier, for the blocks of all models, in tokens.
    pub host_tokens: u64,
    /// Maximum number of running sequences per model.
    pub max_sequences: u32,
    /// Number of models that fit into memory.
    pub models_in_memory: usize,
    /// Prefill rate, in tokens per second.
    pub prefill_rate: f64,
    /// Decode rate of one sequence, in tokens per second.
    pub decode_rate: f64,
    /// Relative slowdown of a sequence per sequence that runs beside it.
    pub batch_slowdown: f64,
    /// Rate of copies from the host tier, in tokens per second.
    pub host_copy_rate: f64,
    /// Time of a model load, including the eviction of another model.
    pub load_ms: u64,
}

impl Default for EngineConfig {
    /// A consumer GPU with a model of about 8 billion parameters.
    fn default() -> Self {
        Self {
            kv_tokens: 262_144,
            host_tokens: 0,
            max_sequences: 16,
            models_in_memory: 1,
            prefill_rate: 8_000.0,
            decode_rate: 60.0,
            batch_slowdown: 0.1,
            host_copy_rate: 200_000.0,
            load_ms: 10_000,
        }
    }
}

/// Whether a model can serve calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelStatus {
    /// On disk.
    Available,
    /// Being loaded.
    Loading,
    /// Loaded.
    Resident,
    /// Takes no new sequences; evicted once its last one has ended.
    Unloading,
}

/// When an admitted sequence reaches its first token and its end, and what was cached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Admitted {
    /// Time of the first token.
    pub first_token: Micros,
    /// Time of the last token.
    pub end: Micros,
    /// Tokens of the prompt that were not computed.
    pub cached_tokens: u64,
}

#[derive(Debug, Clone)]
struct Sequence {
    model: usize,
    tokens: u64,
    chain: Vec<u64>,
    reply_blocks: u64,
}

/// Simulated engine. Sequences are identified by the caller's number.
#[derive(Debug, Clone)]
pub struct Engine {
    config: EngineConfig,
    status: Vec<ModelStatus>,
    last_use: Vec<Micros>,
    pending_load: Option<usize>,
    cache: PrefixCache,
    sequences: BTreeMap<u64, Sequence>,
    running: Vec<u32>,
    used_tokens: Vec<u64>,
    prefill_free: Micros,
    loads: u64,
}

impl Engine {
    /// An engine with all models on disk.
    pub fn new(config: EngineConfig, models: usize) -> Self {
        Self {
            config,
            status: vec![ModelStatus::Available; models],
            last_use: vec![0; models],
            pending_load: None,
            cache: PrefixCache::new(models, config.kv_tokens / BLOCK_TOKENS, config.host_tokens / BLOCK_TOKENS),
            sequences: BTreeMap::new(),
            running: vec![0; models],
            used_tokens: vec![0; models],
            prefill_free: 0,
            loads: 0,
        }
    }

    /// Makes a model resident without a load, as a node that was configured to keep it loaded has done before the run.
    pub fn preload(&mut self, model: usize) {
        self.status[model] = ModelStatus::Resident;
    }

    /// Status of a model.
    pub fn status(&self, model: usize) -> ModelStatus {
        self.status[model]
    }

    /// Number of models in memory, including those being loaded.
    pub fn models_in_memory(&self) -> usize {
        self.status.iter().filter(|status| **status != ModelStatus::Available).count()
    }

    /// Number of running sequences of a model.
    pub fn running(&self, model: usize) -> u32 {
        self.running[model]
    }

    /// Number of running sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// KV cache tokens of a model that are not reserved.
    pub fn free_tokens(&self, model: usize) -> u64 {
        self.config.kv_tokens.saturating_sub(self.used_tokens[model])
    }

    /// Number of model loads so far.
    pub fn loads(&self) -> u64 {
        self.loads
    }

    /// Cached blocks of a model.
    pub fn cached(&self, model: usize) -> CachedBlocks {
        self.cache.tiers(model)
    }

    /// Time until the prefills that were admitted have ended.
    pub fn prefill_backlog(&self, now: Micros) -> Micros {
        self.prefill_free.saturating_sub(now)
    }

    /// Tokens that a call reserves.
    pub fn reservation(call: &Call) -> u64 {
        call.prompt_tokens + u64::from(call.output_tokens)
    }

    /// Whether the call can start now.
    pub fn admits(&self, call: &Call) -> bool {
        self.status[call.model] == ModelStatus::Resident
            && self.running[call.model] < self.config.max_sequences
            && Self::reservation(call) <= self.free_tokens(call.model)
    }

    /// Starts a call that [`admits`](Self::admits) accepts.
    pub fn start(&mut self, sequence: u64, call: &Call, now: Micros) -> Admitted {
        let reply_blocks = (call.prompt_tokens % BLOCK_TOKENS + u64::from(call.output_tokens)).div_ceil(BLOCK_TOKENS);
        let found = self.cache.start(call.model, &call.chain, reply_blocks);
        // The last prompt token is always computed: the first output token is sampled from its logits.
        let reused = |blocks: u64| (blocks * BLOCK_TOKENS).min(call.prompt_tokens.saturating_sub(1));
        let cached_tokens = reused(found.device + found.host);
        let prefill = (call.prompt_tokens - cached_tokens) as f64 / self.config.prefill_rate
            + (found.host * BLOCK_TOKENS) as f64 / self.config.host_copy_rate;
        let first_token = self.prefill_free.max(now) + seconds(prefill);
        self.prefill_free = first_token;
        let slowdown = 1.0 + self.config.batch_slowdown * f64::from(self.running[call.model]);
        let end = first_token + seconds(slowdown * f64::from(call.output_tokens) / self.config.decode_rate);
        let tokens = Self::reservation(call);
        self.running[call.model] += 1;
        self.used_tokens[call.model] += tokens;
        self.last_use[call.model] = now;
        let running = Sequence { model: call.model, tokens, chain: call.chain.clone(), reply_blocks };
        self.sequences.insert(sequence, running);
        Admitted { first_token, end, cached_tokens }
    }

    /// Ends a sequence, whether or not it is complete. Returns whether it was running.
    pub fn end(&mut self, sequence: u64) -> bool {
        let Some(ended) = self.sequences.remove(&sequence) else { return false };
        self.cache.end(ended.model, &ended.chain, ended.reply_blocks);
        self.running[ended.model] -= 1;
        self.used_tokens[ended.model] -= ended.tokens;
        if self.running[ended.model] == 0 && self.status[ended.model] == ModelStatus::Unloading {
            self.evict(ended.model);
        }
        true
    }

    /// Asks for a load; ignored while another load is wanted, or if the model is not on disk.
    pub fn request_load(&mut self, model: usize) {
        if self.status[model] == ModelStatus::Available && self.pending_load.is_none() {
            self.pending_load = Some(model);
        }
    }

    /// Starts the requested load if there is memory for it, and evicts idle models for it. If all models are busy, one
    /// takes no more sequences. Returns the model and the time of the end of its load, which the caller has to report
    /// with [`loaded`](Self::loaded).
    pub fn start_load(&mut self, now: Micros) -> Option<(usize, Micros)> {
        let model = self.pending_load?;
        if self.models_in_memory() >= self.config.models_in_memory {
            let resident = (0..self.status.len()).filter(|other| self.status[*other] == ModelStatus::Resident);
            let victim = resident.min_by_key(|other| (self.running[*other] > 0, self.last_use[*other]))?;
            match self.running[victim] {
                0 => self.evict(victim),
                _ => {
                    self.status[victim] = ModelStatus::Unloading;
                    return None;
                }
            }
        }
        self.pending_load = None;
        self.status[model] = ModelStatus::Loading;
        Some((model, now + self.config.load_ms * MS))
    }

    /// Ends a load.
    pub fn loaded(&mut self, model: usize, now: Micros) {
        if self.status[model] == ModelStatus::Loading {
            self.status[model] = ModelStatus::Resident;
            self.last_use[model] = now;
            self.loads += 1;
        }
    }

    fn evict(&mut self, model: usize) {
        self.status[model] = ModelStatus::Available;
        self.cache.unload(model);
    }
}

fn seconds(seconds: f64) -> Micros {
    (seconds * 1e6).round() as Micros
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Arrival, chain};

    fn call(model: usize, blocks: std::ops::Range<u64>) -> Call {
        let ids: Vec<u64> = blocks.collect();
        let prompt_tokens = ids.len() as u64 * BLOCK_TOKENS;
        Call { model, prompt_tokens, output_tokens: 60, chain: chain(model, &ids), arrival: Arrival::At(0.0) }
    }

    fn engine() -> Engine {
        let config = EngineConfig {
            kv_tokens: 8 * BLOCK_TOKENS,
            prefill_rate: 512.0,
            batch_slowdown: 0.0,
            ..Default::default()
        };
        let mut engine = Engine::new(config, 2);
        engine.request_load(0);
        let (model, until) = engine.start_load(0).unwrap();
        engine.loaded(model, until);
        engine
    }

    #[test]
    fn prefills_run_one_after_the_other_and_reuse_blocks() {
        let mut engine = engine();
        let first = engine.start(1, &call(0, 0..3), 0);
        assert_eq!((first.first_token, first.end, first.cached_tokens), (3_000_000, 4_000_000, 0));
        let second = engine.start(2, &call(0, 0..4), 0);
        assert_eq!((second.first_token, second.cached_tokens), (4_000_000, 3 * BLOCK_TOKENS));
        assert!(!engine.admits(&call(0, 0..1)), "the pool is reserved");
        assert!(engine.end(1) && !engine.end(1));
        assert!(engine.admits(&call(0, 0..1)));
    }

    #[test]
    fn busy_model_is_unloaded_once_its_last_sequence_has_ended() {
        let mut engine = engine();
        engine.start(1, &call(0, 0..3), 0);
        engine.request_load(1);
        assert_eq!(engine.start_load(0), None);
        assert_eq!(engine.status(0), ModelStatus::Unloading);
        assert!(!engine.admits(&call(0, 0..1)));
        engine.end(1);
        let (model, until) = engine.start_load(5).unwrap();
        assert_eq!((model, until, engine.status(0)), (1, 10_000_005, ModelStatus::Available));
        engine.loaded(1, until);
        assert_eq!((engine.status(1), engine.loads()), (ModelStatus::Resident, 2));
    }
}
