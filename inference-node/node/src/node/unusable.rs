//! Why a model of this node cannot be used. The variant determines whether the load is retried; its text goes to the
//! ledger, the log and the user.

use std::fmt;
use std::time::Duration;

use cfq_proto::model::ModelId;

use crate::gpu::DeviceChoice;

/// Why a model cannot be used. `detail` is the text of the error that was found, with its causes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableReason {
    /// `ollama:` models are not supported.
    #[error("ollama: models are not supported in this version; Ollama also serves an openai: endpoint under /v1")]
    OllamaUnsupported,
    /// The configuration does not contain the endpoint of the model.
    #[error("endpoint {endpoint} is not configured: add [endpoints.{endpoint}] with its url")]
    EndpointNotConfigured { endpoint: String },
    /// The configuration of the model's endpoint is invalid.
    #[error("{detail}")]
    EndpointInvalid { detail: String },
    /// The id of a model behind an endpoint does not contain the model's name on the server.
    #[error("{model} names no model")]
    NameMissing { model: ModelId },
    /// The model is not on this machine and may not be fetched.
    #[error("{model} is not on this node's machine; to fetch it, run `cfq models pull {model}` there")]
    NotInstalled { model: ModelId },
    /// The fetch of the model failed.
    #[error("{detail}; for details run `cfq models pull {model}`, then retry with `cfq models load {model}`")]
    FetchFailed { model: ModelId, detail: String },
    /// The model's file is missing, corrupt or not supported.
    #[error("{detail}")]
    Unreadable { detail: String },
    /// The model supports only the CPU, and the configured device is a GPU.
    #[error("{detail}")]
    CpuOnly { detail: String },
    /// The configured GPU cannot be used, so no model can be loaded.
    #[error("device = \"{device}\": {detail}")]
    DeviceUnusable { device: DeviceChoice, detail: String },
    /// The engine could not be started.
    #[error("{detail}")]
    EngineNotStarted { detail: String },
    /// The load panicked.
    #[error("loading {model} failed inside the engine; see the node's log")]
    LoadPanicked { model: ModelId },
    /// The process ended during each of the last `loads` loads of the model.
    #[error(
        "loading {model} ended the node the last {loads} times, most likely because memory ran out: free some, set \
         memory_limit, or use a smaller model; to retry, run `cfq models load {model}`"
    )]
    LoadsEndedNode { model: ModelId, loads: usize },
    /// The model needs more memory than it could get even if no other model was loaded.
    #[error("{0}")]
    TooLarge(MemoryShortage),
    /// The model would fit if other models or programs freed memory.
    #[error("{shortage}. The load is retried at the first request after {} s", retry_after.as_secs().max(1))]
    OutOfMemory { shortage: MemoryShortage, retry_after: Duration },
}

impl UnusableReason {
    /// True if the load is retried only at a request by a user, and not for jobs.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => false,
            Self::OllamaUnsupported
            | Self::EndpointNotConfigured { .. }
            | Self::EndpointInvalid { .. }
            | Self::NameMissing { .. }
            | Self::NotInstalled { .. }
            | Self::FetchFailed { .. }
            | Self::Unreadable { .. }
            | Self::CpuOnly { .. }
            | Self::DeviceUnusable { .. }
            | Self::EngineNotStarted { .. }
            | Self::LoadPanicked { .. }
            | Self::LoadsEndedNode { .. }
            | Self::TooLarge(_) => true,
        }
    }
}

/// Memory that a model lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryShortage {
    /// The memory that the model needs, term by term, and the available memory, as text.
    pub detail: String,
    /// Pinned models because of which nothing more can be evicted.
    pub pinned: Vec<ModelId>,
}

impl MemoryShortage {
    /// A shortage that does not depend on pinned models.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), pinned: Vec::new() }
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)?;
        if self.pinned.is_empty() {
            return Ok(());
        }
        let pinned: Vec<&str> = self.pinned.iter().map(ModelId::as_str).collect();
        write!(f, "; nothing more can be evicted, since these are pinned: {}", pinned.join(", "))
    }
}
