//! What the planner is told and what it asks for.

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use super::host_estimate::HostEstimate;
use super::state::{CachedModel, GpuBytes, StartModel};

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A job or a user requested the model; its published status is `Loading`, or `Unloading` if it is being unloaded.
    LoadRequested(ModelId),
    /// A user or a yield requested that the model is unloaded.
    UnloadRequested(ModelId),
    /// These models share the memory that is there: all that wait for their first load, at start and after a yield.
    LoadTogether(Vec<StartModel>),
    /// Outcome of [`Command::Estimate`].
    Estimated { model: ModelId, estimate: Estimate },
    /// Outcome of [`Command::Load`].
    LoadFinished { model: ModelId, result: Result<LoadedSize, LoadFailure> },
    /// Outcome of [`Command::Unload`]. `cached` describes the weights that the executor keeps.
    Unloaded { model: ModelId, state: Box<ModelState>, cached: Option<CachedModel> },
    /// Outcome of [`Command::Unload`] if another thread still holds the engine, for example to admit a sequence.
    StillShared { model: ModelId },
    /// An engine reported a change, for example the end of a sequence.
    EnginesChanged,
    /// Time has passed.
    Tick,
    /// The commands of the last batch were performed and had no outcome.
    Continue,
}

/// What an estimate is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EstimateRequest {
    /// Host memory. `may_fetch`: a model that is not installed is fetched first.
    Host { may_fetch: bool },
    /// Whether it fits GPUs with these free bytes, in the order of [`super::state::PlannerConfig::gpus`]. It is fetched
    /// first if it is not installed.
    Gpus { free: Vec<u64> },
}

/// Answer to an [`EstimateRequest`].
#[derive(Debug, Clone, PartialEq)]
pub enum Estimate {
    Host(HostEstimate),
    /// The file cannot be read or is not supported.
    HostUnreadable {
        reason: String,
    },
    /// The model is not installed, and was not to be fetched.
    NotInstalled,
    FetchFailed {
        reason: String,
    },
    /// `Err`: the reason why it does not fit.
    Gpus {
        free: Vec<u64>,
        fit: Result<MemoryEstimate, String>,
    },
}

/// Memory of a model that was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedSize {
    /// Bytes of host memory; 0 on GPUs.
    pub host_bytes: u64,
    pub gpus: Vec<GpuBytes>,
}

/// Why a load failed.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadFailure {
    /// Memory was short.
    OutOfMemory {
        reason: String,
        /// Smallest estimate on the host, if the host's memory was short.
        host: Option<Box<MemoryEstimate>>,
        /// Estimate on the GPUs with nothing else on them, if the model fits there.
        gpus: Option<Box<MemoryEstimate>>,
    },
    /// A retry would fail as well.
    Permanent { reason: String },
}

/// Something the executor does.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    Estimate {
        model: ModelId,
        request: EstimateRequest,
    },
    Load(LoadCommand),
    /// Lets the engine take no more sequences. `None`: it was requested; else the model it is evicted for.
    BeginUnload {
        model: ModelId,
        evicted_for: Option<ModelId>,
    },
    /// Unloads an engine that takes no more sequences and runs none.
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
    /// Publishes the bytes that a load may take without an eviction.
    SetFreeBytes(u64),
}

impl Command {
    /// Whether the executor reports an outcome.
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

/// One load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadCommand {
    pub model: ModelId,
    /// Bytes of host memory it may take.
    pub host_bytes: u64,
    pub target: LoadTarget,
}

/// Where a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadTarget {
    /// On the GPUs, as one of `share_of` models that share these free bytes of each; on the host if it does not fit
    /// there and the configuration allows it.
    Gpus { free: Vec<u64>, share_of: u64 },
    /// On the host.
    Host,
}

/// A status to publish.
#[derive(Debug, Clone, PartialEq)]
pub enum Status {
    Loading,
    Ready,
    /// `reason`: why it was not loaded, if that was tried.
    OnDisk {
        state: ModelState,
        reason: Option<String>,
    },
    /// Its wait is over; published only if it is still unusable.
    RetryAllowed(ModelState),
    /// `permanent`: only a request by a user retries it.
    Unusable {
        reason: String,
        permanent: bool,
    },
}
