//! Limits of a load, and the errors of a load.

use std::path::PathBuf;

use cfq_memory::{DoesNotFit, MemoryEstimate};

use crate::backend::cuda::DoesNotFitGpus;
use crate::model::gguf::HeaderError;

/// Limits of the memory and the batch size of one model.
#[derive(Debug, Clone, Copy)]
pub struct EngineLimits {
    /// Maximum host memory, in bytes. Ignored for a model on GPUs.
    pub memory_bytes: u64,
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
        /// Path of the model's file or folder.
        path: PathBuf,
        /// The estimate, term by term, and the available memory.
        source: DoesNotFit,
    },
    /// Reading or converting the weights failed.
    #[error("cannot load {path}")]
    Weights {
        /// Path of the model's file or folder.
        path: PathBuf,
        /// candle's error.
        #[source]
        source: candle_core::Error,
    },
    /// The engine has only a CPU forward pass for this architecture.
    #[error("{path} cannot run on a GPU: its architecture runs on the CPU only, one sequence at a time")]
    CpuOnly {
        /// Path of the model's file or folder.
        path: PathBuf,
    },
    /// No assignment of layers to GPUs fits.
    #[error("{path} does not fit on {gpus}: it {source}")]
    DoesNotFitGpus {
        /// Path of the model's file or folder.
        path: PathBuf,
        /// The GPUs, for example `cuda:0,cuda:1`.
        gpus: String,
        /// The estimate, term by term, and the available memory.
        source: Box<DoesNotFitGpus>,
    },
    /// The estimate fitted, but the GPU's memory ran out during the load.
    #[error("out of GPU memory while loading {path} on {gpus}, although the estimate fitted ({estimate})")]
    GpuMemoryExhausted {
        /// Path of the model's file or folder.
        path: PathBuf,
        /// The GPUs, for example `cuda:0,cuda:1`.
        gpus: String,
        /// The memory estimate of the load.
        estimate: Box<MemoryEstimate>,
        /// The driver's error.
        source: Box<candle_core::Error>,
    },
    /// The batcher thread did not start.
    #[error("cannot start the batcher thread")]
    Thread(#[source] std::io::Error),
}
