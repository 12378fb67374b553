//! The weight cache: weights of unloaded models that stay in host memory, so that the next load does not read the disk.
//!
//! Most of the load time is spent reading the file, checking it and packing its matrices into tiles. The cache keeps
//! the packed matrices and the measured rates, so starting an engine from it only creates an empty KV pool and a
//! thread.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;

use crate::backend::cpu::model::CpuModel;
use crate::batch::admission::StateChanged;
use crate::kv::{KV_BLOCK_TOKENS, KvPool};
use crate::load_error::{EngineLimits, LoadError};
use crate::local_engine::{EngineParts, LocalEngine};
use crate::memory_estimate::MemoryPlan;

/// Cached weights of one unloaded model.
pub struct CachedWeights {
    parts: EngineParts,
    plan: MemoryPlan,
    weights: CpuModel,
}

impl std::fmt::Debug for CachedWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedWeights").field("model", &self.parts.model).finish_non_exhaustive()
    }
}

impl CachedWeights {
    /// The model's name.
    pub fn model(&self) -> &ModelId {
        &self.parts.model
    }

    /// Size in memory, in bytes: weights, tokenizer tables and grammar tables.
    pub fn bytes(&self) -> u64 {
        let tables = self.plan.tables().saturating_add(self.parts.grammars.bytes());
        (self.weights.stored_bytes() as u64).saturating_add(tables)
    }

    /// Memory estimate of an engine that is started from these weights.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] only.
    pub fn estimate(&self, limits: EngineLimits) -> Result<MemoryEstimate, LoadError> {
        self.plan.fit(limits)
    }

    /// Starts an engine from the cached weights. The weights are dropped if the engine does not fit.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] or [`LoadError::Thread`].
    pub fn start(self, limits: EngineLimits, changes: Arc<StateChanged>) -> Result<LocalEngine, LoadError> {
        let estimate = self.estimate(limits)?;
        let weight_bytes = self.weights.stored_bytes() as u64;
        let pool = KvPool::new(self.weights.kv_shape(), estimate.kv_tokens as usize / KV_BLOCK_TOKENS);
        let pool = pool.with_offload(self.parts.kv_offload.clone());
        self.parts.start(self.weights, pool, estimate, weight_bytes, limits, changes)
    }
}

impl LocalEngine {
    /// Stops the engine after its last sequence and returns its weights; `None` if the engine failed, or if its weights
    /// cannot be cached (on a GPU, or run by candle-transformers).
    pub fn into_cached_weights(self) -> Option<CachedWeights> {
        let (parts, weights) = self.shut_down();
        let (weights, plan) = (weights?, parts.plan.clone()?);
        parts.prompts.release();
        Some(CachedWeights { parts, plan, weights })
    }
}

/// Sizes and modification times of a model's files, to detect that they were replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStamp(Vec<(u64, Option<SystemTime>)>);

impl FileStamp {
    /// Reads the sizes and modification times; `None` if a file does not exist.
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
