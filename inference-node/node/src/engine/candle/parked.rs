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

use crate::engine::candle::batcher::Batcher;
use crate::engine::candle::kv::{BLOCK, KvPool};
use crate::engine::candle::ledger::Sum;
use crate::engine::candle::model::Model;
use crate::engine::candle::room::{Changes, Figures, Room};
use crate::engine::candle::{CandleEngine, Limits, LoadError};
use crate::engine::grammar::Grammars;
use crate::models::template::ChatTemplate;
use crate::models::tokenizer::Vocabulary;

pub struct Parked {
    pub(super) model: ModelId,
    pub(super) sum: Sum,
    pub(super) network: Model,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) template: Arc<ChatTemplate>,
    pub(super) grammars: Arc<Grammars>,
    pub(super) figures: Arc<Figures>,
}

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parked").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Parked {
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> u64 {
        self.network.stored_bytes() as u64
    }

    /// What it would take to start it again.
    pub fn need(&self, limits: Limits) -> Result<Need, LoadError> {
        self.sum.fit(limits)
    }

    /// An engine of it again. It is gone if it does not fit.
    pub fn load(self, limits: Limits, changes: Arc<Changes>) -> Result<CandleEngine, LoadError> {
        let need = self.need(limits)?;
        let pool = KvPool::new(self.network.kv_shape(), need.kv_tokens as usize / BLOCK);
        self.start(need, pool, limits, changes)
    }

    pub(super) fn start(
        self,
        need: Need,
        pool: KvPool,
        limits: Limits,
        changes: Arc<Changes>,
    ) -> Result<CandleEngine, LoadError> {
        let Self { model, sum, network, vocabulary, template, grammars, figures } = self;
        let weights = network.stored_bytes() as u64;
        let tokens = need.kv_tokens / BLOCK as u64 * BLOCK as u64;
        let room = Room::new(tokens, limits.max_sequences as usize, changes);
        // Admission holds a slot for each job in the channel, so it never fills.
        let (jobs, receiver) = sync_channel(room.max_sequences());
        let (words, cost) = (vocabulary.clone(), Figures::cost);
        let batcher = Batcher::new(network, pool, words, receiver, room.clone(), figures.clone(), cost);
        let thread = std::thread::Builder::new()
            .name("batcher".to_owned())
            .spawn(move || batcher.run())
            .map_err(LoadError::Thread)?;
        let (context, original) = (sum.context, sum.original);
        Ok(CandleEngine {
            model,
            need,
            weights,
            context,
            original,
            vocabulary,
            template,
            grammars,
            room,
            figures,
            jobs,
            sum,
            thread,
        })
    }
}

impl CandleEngine {
    /// Ends the engine when its last sequence has ended, and keeps its weights. `None` if it broke.
    pub fn park(self) -> Option<Parked> {
        let Self { model, sum, vocabulary, template, grammars, figures, jobs, thread, .. } = self;
        drop(jobs);
        let network = thread.join().ok().flatten()?;
        Some(Parked { model, sum, network, vocabulary, template, grammars, figures })
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
