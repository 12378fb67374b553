//! A model without an engine: its weights as the kernels want them, kept so that the next start needs no disk.
//!
//! Reading a file, checking it and laying its matrices into tiles is nearly all of a load. What is kept is what that made,
//! with the measured rates, so a start from here makes an empty KV pool and a thread.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::SystemTime;

use cfq_memory::Need;
use cfq_proto::model::ModelId;

use crate::engine::candle::ahead::Turn;
use crate::engine::candle::batcher::Batcher;
use crate::engine::candle::kv::{BLOCK, KvPool, Parking};
use crate::engine::candle::ledger::Sum;
use crate::engine::candle::model::{Model, Network};
use crate::engine::candle::room::{Changes, Figures, Room};
use crate::engine::candle::{CandleEngine, Limits, LoadError, On};
use crate::engine::grammar::Grammars;
use crate::models::template::ChatTemplate;
use crate::models::tokenizer::Vocabulary;

/// What an engine has beside its network and its pool.
pub(super) struct Parts {
    pub model: ModelId,
    pub on: On,
    /// What it is counted by; `None` where it cannot be started again without its file.
    pub sum: Option<Sum>,
    pub context: u64,
    /// Longest sequence that is not rotated as a long one, where the model tells them apart.
    pub original: Option<u64>,
    /// See [`Network::REWINDS`].
    pub rewinds: bool,
    pub vocabulary: Arc<Vocabulary>,
    pub template: Arc<ChatTemplate>,
    pub grammars: Arc<Grammars>,
    pub figures: Arc<Figures>,
    pub parking: Option<Parking>,
}

impl Parts {
    /// An engine with its thread; `held` bytes of weights are there.
    pub fn start<N>(
        self,
        network: N,
        pool: KvPool<N::Memory>,
        need: Need,
        held: u64,
        limits: Limits,
        changes: Arc<Changes>,
    ) -> Result<CandleEngine, LoadError>
    where
        N: Network<Memory: Send> + Send + 'static,
    {
        let tokens = need.kv_tokens / BLOCK as u64 * BLOCK as u64;
        let room = Room::new(tokens, limits.max_sequences as usize, changes);
        // Admission holds a slot for each job in the channel, and a warm-up has one piece in it at most, so it never fills.
        let (jobs, receiver) = sync_channel(room.max_sequences() + 1);
        let (words, figures) = (self.vocabulary.clone(), self.figures.clone());
        let batcher = Batcher::new(network, pool, words, receiver, room.clone(), figures, Figures::cost);
        let thread = std::thread::Builder::new()
            .name("batcher".to_owned())
            .spawn(move || batcher.run().and_then(N::into_kept))
            .map_err(LoadError::Thread)?;
        Ok(CandleEngine { parts: self, need, weights: held, room, jobs, turn: Turn::default(), thread })
    }
}

pub struct Parked {
    parts: Parts,
    sum: Sum,
    network: Model,
}

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parked").field("model", &self.parts.model).finish_non_exhaustive()
    }
}

impl Parked {
    pub fn model(&self) -> &ModelId {
        &self.parts.model
    }

    /// Bytes of all that is kept: the weights and, as counted, the tables beside them.
    pub fn bytes(&self) -> u64 {
        let tables = self.sum.tables().saturating_add(self.parts.grammars.bytes());
        (self.network.stored_bytes() as u64).saturating_add(tables)
    }

    /// What it would take to start it again.
    pub fn need(&self, limits: Limits) -> Result<Need, LoadError> {
        self.sum.fit(limits)
    }

    /// An engine of it again. It is gone if it does not fit.
    pub fn load(self, limits: Limits, changes: Arc<Changes>) -> Result<CandleEngine, LoadError> {
        let need = self.need(limits)?;
        let held = self.network.stored_bytes() as u64;
        let pool = KvPool::new(self.network.kv_shape(), need.kv_tokens as usize / BLOCK);
        let pool = pool.parked_in(self.parts.parking.clone());
        self.parts.start(self.network, pool, need, held, limits, changes)
    }
}

impl CandleEngine {
    /// Ends the engine when its last sequence has ended, and keeps its weights. `None` if it broke, or is on a card.
    pub fn park(self) -> Option<Parked> {
        let Self { parts, jobs, thread, .. } = self;
        drop(jobs);
        let network = thread.join().ok().flatten()?;
        let sum = parts.sum.clone()?;
        Some(Parked { parts, sum, network })
    }
}

/// What tells a model's files from others that stand in their place later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp(Vec<(u64, Option<SystemTime>)>);

impl Stamp {
    /// `None` if they are gone.
    pub fn of(path: &Path) -> Option<Self> {
        let of_file = |path: &Path| {
            let meta = fs::metadata(path).ok()?;
            Some((meta.len(), meta.modified().ok()))
        };
        if !path.is_dir() {
            return Some(Self(vec![of_file(path)?]));
        }
        let mut files: Vec<_> = fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        Some(Self(files.iter().filter_map(|path| of_file(path)).collect()))
    }
}
