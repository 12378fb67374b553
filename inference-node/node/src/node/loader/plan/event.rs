//! Events and commands: the input and the output of the planner.

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use super::host_estimate::HostEstimate;
use super::state::{CachedModel, GpuBytes, StartModel};

/// An event: the input of [`super::apply`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A job or a user requested the model; its published status is `Loading`, or `Unloading` if it is being unloaded.
    LoadRequested(ModelId),
    /// The unload of the model was requested by a user, or because the machine yields.
    UnloadRequested(ModelId),
    /// Load these models together, so that they share the free memory: at start and after a yield.
    LoadTogether(Vec<StartModel>),
    /// Outcome of [`Command::Estimate`].
    Estimated { model: ModelId, estimate: Estimate },
    /// Outcome of [`Command::Load`].
    LoadFinished { model: ModelId, result: Result<LoadedSize, LoadFailure> },
    /// Outcome of [`Command::Unload`]. `cached` describes the weights that the executor has kept; `None` if they cannot
    /// be cached.
    Unloaded { model: ModelId, state: Box<ModelState>, cached: Option<CachedModel> },
    /// Outcome of [`Command::Unload`] if the engine was not unloaded because another thread still holds it, for example
    /// to admit a sequence.
    StillShared { model: ModelId },
    /// An engine reported a change, for example the end of a sequence.
    EnginesChanged,
    /// The time requested by [`super::state::LoaderState::next_wakeup`] has come.
    Tick,
    /// The last commands were executed, and none of them had an outcome.
    Continue,
}

/// Which memory estimate is requested: for the host or for GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EstimateRequest {
    /// Estimate for the host. If `may_fetch` is set, a model that is not installed is fetched first.
    Host { may_fetch: bool },
    /// Estimate for GPUs with `free` bytes each, in the order of [`super::state::PlannerConfig::gpus`]. A model that is
    /// not installed is fetched first.
    Gpus { free: Vec<u64> },
}

/// Result of an [`EstimateRequest`].
#[derive(Debug, Clone, PartialEq)]
pub enum Estimate {
    Host(HostEstimate),
    /// The model's file cannot be read or is not supported.
    HostUnreadable {
        reason: String,
    },
    /// The model is not installed, and the request did not permit a fetch.
    NotInstalled,
    FetchFailed {
        reason: String,
    },
    /// Result for GPUs with `free` bytes each; `fit` is the estimate, or the reason why the model does not fit.
    Gpus {
        free: Vec<u64>,
        fit: Result<MemoryEstimate, String>,
    },
}

/// Estimated memory of a model that was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedSize {
    /// Bytes of host memory; 0 on GPUs.
    pub host_bytes: u64,
    pub gpus: Vec<GpuBytes>,
}

/// Why a load failed.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadFailure {
    /// There was not enough memory.
    OutOfMemory {
        reason: String,
        /// Estimate on the host with the smallest KV pool; `None` if host memory was not short.
        host: Option<Box<MemoryEstimate>>,
        /// Estimate on the GPUs if no other model is loaded there; `None` if the model does not fit.
        gpus: Option<Box<MemoryEstimate>>,
    },
    /// A retry would fail as well.
    Permanent { reason: String },
}

/// A command to the executor: the output of [`super::apply`].
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    Estimate {
        model: ModelId,
        request: EstimateRequest,
    },
    Load(LoadCommand),
    /// Stops the admission of new sequences to the model's engine, before [`Command::Unload`]. `evicted_for` is the
    /// model that needs the memory; `None` if a client requested the unload.
    BeginUnload {
        model: ModelId,
        evicted_for: Option<ModelId>,
    },
    /// Unloads an engine that takes no more sequences and has no running sequence.
    Unload {
        model: ModelId,
    },
    DropCachedWeights {
        model: ModelId,
    },
    SetStatus {
        model: ModelId,
        status: Status,
    },
    /// Publishes the number of bytes that a load may take without an eviction.
    SetFreeBytes(u64),
}

impl Command {
    /// Whether the executor reports the outcome of this command as an event.
    pub fn has_outcome(&self) -> bool {
        match self {
            Self::Estimate { .. } | Self::Load(_) | Self::Unload { .. } => true,
            Self::BeginUnload { .. }
            | Self::DropCachedWeights { .. }
            | Self::SetStatus { .. }
            | Self::SetFreeBytes(_) => false,
        }
    }
}

/// Parameters of one load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadCommand {
    pub model: ModelId,
    /// Maximum host memory of the model, in bytes.
    pub host_bytes: u64,
    pub target: LoadTarget,
}

/// Where a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadTarget {
    /// On the GPUs, as one of `share_of` models that share the `free` bytes of each GPU. If the model does not fit
    /// there, it is loaded on the host if the configuration permits that.
    Gpus { free: Vec<u64>, share_of: u64 },
    /// On the host.
    Host,
}

/// A status to publish.
#[derive(Debug, Clone, PartialEq)]
pub enum Status {
    Loading,
    Ready,
    /// The model is on disk; `reason` says why it was not loaded, if a load was attempted.
    OnDisk {
        state: ModelState,
        reason: Option<String>,
    },
    /// The backoff time of the model is over: it is available again. Published only if it is still unusable.
    RetryAllowed(ModelState),
    /// The model cannot be loaded. If `permanent` is set, only a request by a user retries the load.
    Unusable {
        reason: String,
        permanent: bool,
    },
}
