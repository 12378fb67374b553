//! Failures that end an engine.

use std::time::Duration;

/// Why an engine cannot serve any more until the process restarts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineFailure {
    /// The batcher thread panicked; the process's memory may be corrupt.
    #[error("{message}")]
    Panic {
        /// The panic's message.
        message: String,
    },
    /// The smallest possible forward pass ran out of GPU memory, twice in a row.
    #[error("the GPU is out of memory even for the smallest pass, twice in a row: {error}")]
    OutOfMemory {
        /// The driver's error.
        error: String,
    },
    /// The GPU or its driver failed.
    #[error("the GPU cannot be used any more: {error}")]
    DeviceLost {
        /// The driver's error.
        error: String,
    },
    /// The batcher thread does not end its work, for example because the GPU or the thread pool hangs.
    #[error("its work has not ended after {} s", limit.as_secs_f64())]
    Hung {
        /// The time that the work was allowed to take.
        limit: Duration,
    },
}
