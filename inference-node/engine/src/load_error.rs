//! How much of the machine a model may take, and why a load failed.

use std::path::PathBuf;

use cfq_memory::{DoesNotFit, MemoryEstimate};

use crate::backend::cuda::NoGpuLayout;
use crate::model::gguf::HeaderError;

/// How much of the machine a model may take.
#[derive(Debug, Clone, Copy)]
pub struct EngineLimits {
    /// Host memory, in bytes. Does not bind a model on GPUs.
    pub memory: u64,
    /// Maximum number of sequences in one batch.
    pub max_sequences: u32,
}

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is unreadable, corrupt or of an unsupported architecture.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The estimate exceeds the host memory limit.
    #[error("{path} does not fit: it {source}. Free memory, raise memory_limit, or use a smaller model")]
    DoesNotFit {
        /// The model's file.
        path: PathBuf,
        /// The arithmetic.
        source: DoesNotFit,
    },
    /// Reading or converting the weights failed.
    #[error("cannot load {path}")]
    Weights {
        /// The model's file.
        path: PathBuf,
        /// candle's error.
        #[source]
        source: candle_core::Error,
    },
    /// The architecture has a CPU forward pass only.
    #[error("{path} cannot run on a GPU: its architecture runs on the CPU only, one sequence at a time")]
    CpuOnly {
        /// The model's file.
        path: PathBuf,
    },
    /// No assignment of layers to GPUs fits.
    #[error("{path} does not fit on {gpus}: it {source}")]
    NoGpuLayout {
        /// The model's file.
        path: PathBuf,
        /// The GPUs, for example `cuda:0,cuda:1`.
        gpus: String,
        /// The arithmetic.
        source: Box<NoGpuLayout>,
    },
    /// The estimate fitted, but the GPU's memory ran out during the load.
    #[error("out of GPU memory while loading {path} on {gpus}, although the estimate fitted ({estimate})")]
    GpuMemoryExhausted {
        /// The model's file.
        path: PathBuf,
        /// The GPUs, for example `cuda:0,cuda:1`.
        gpus: String,
        /// What was predicted.
        estimate: Box<MemoryEstimate>,
        /// The driver's error.
        source: Box<candle_core::Error>,
    },
    /// The batcher thread did not start.
    #[error("cannot start the batcher thread")]
    Thread(#[source] std::io::Error),
}
