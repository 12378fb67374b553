//! Events and actions: the input and the output of the planner.

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use super::host_estimate::HostEstimate;
use super::state::{CachedModel, GpuBytes, StartModel};
use crate::node::unusable::{MemoryShortage, UnusableReason};

/// An event: the input of [`super::apply`].
#[derive(Debug, Clone, PartialEq)]
pub enum LoaderEvent {
    /// A job or a user requested the model; its published status is `Loading`, or `Unloading` if it is being unloaded.
    LoadRequested(ModelId),
    /// The unload of the model was requested by a user, or because the machine yields.
    UnloadRequested(ModelId),
    /// Several models have to be loaded together, so that they share the free memory: at start and after a yield.
    LoadTogether(Vec<StartModel>),
    /// Outcome of [`LoaderAction::Estimate`].
    Estimated { model: ModelId, estimate: Estimate },
    /// Outcome of [`LoaderAction::Load`].
    LoadFinished { model: ModelId, result: Result<LoadedSize, LoadFailure> },
    /// Outcome of [`LoaderAction::Unload`]. `cached` describes the weights that the executor has kept; `None` if they
    /// cannot be cached.
    Unloaded { model: ModelId, state: Box<ModelState>, cached: Option<CachedModel> },
    /// Outcome of [`LoaderAction::Unload`] if the engine was not unloaded because another thread still holds it, for
    /// example to admit a sequence.
    StillShared { model: ModelId },
    /// An engine reported a change, for example the end of a sequence.
    EnginesChanged,
    /// The time requested by [`super::state::LoaderState::next_wakeup`] has come.
    Tick,
    /// The last actions were executed, and none of them had an outcome.
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
    /// The model's file cannot be used.
    HostUnusable {
        reason: UnusableReason,
    },
    /// The model is not installed, and the request did not permit a fetch.
    NotInstalled,
    /// The model could not be fetched.
    FetchFailed {
        reason: UnusableReason,
    },
    /// Result for GPUs with `free` bytes each; `fit` is the estimate, or the reason why the model cannot run there.
    Gpus {
        free: Vec<u64>,
        fit: Result<MemoryEstimate, UnusableReason>,
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
        shortage: MemoryShortage,
        /// Estimate on the host with the smallest KV pool; `None` if host memory was not short.
        host: Option<Box<MemoryEstimate>>,
        /// Estimate on the GPUs as if no other model were loaded there; `None` if there is no GPU, or if the model
        /// would not fit even then.
        gpus: Option<Box<MemoryEstimate>>,
    },
    /// A retry would fail as well.
    Permanent(UnusableReason),
}

/// An action for the executor: the output of [`super::apply`].
#[derive(Debug, Clone, PartialEq)]
pub enum LoaderAction {
    Estimate {
        model: ModelId,
        request: EstimateRequest,
    },
    Load(LoadAction),
    /// Stops the admission of new sequences to the model's engine, before [`LoaderAction::Unload`]. `evicted_for` is
    /// the model that needs the memory; `None` if a user requested the unload, or if the machine yields.
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
        status: PublishedStatus,
    },
    /// Publishes the number of bytes that a load may take without an eviction.
    SetFreeBytes(u64),
}

impl LoaderAction {
    /// Whether the executor reports the outcome of this action as an event.
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
pub struct LoadAction {
    pub model: ModelId,
    /// Maximum host memory of the model, in bytes.
    pub host_bytes: u64,
    pub target: LoadTarget,
}

/// Where a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadTarget {
    /// On the GPUs, as one of `sharers` models that share the `free` bytes of each GPU. If the model does not fit
    /// there, it is loaded on the host if the configuration permits that.
    Gpus { free: Vec<u64>, sharers: u64 },
    /// On the host.
    Host,
}

/// A status to publish.
#[derive(Debug, Clone, PartialEq)]
pub enum PublishedStatus {
    Loading,
    Resident,
    /// The model is on disk; `shortage` is the memory that it lacked, if a load was attempted.
    OnDisk {
        state: ModelState,
        shortage: Option<MemoryShortage>,
    },
    /// The backoff time of the model is over: it is available again. Published only if it is still unusable.
    RetryAllowed(ModelState),
    /// The model cannot be loaded.
    Unusable(UnusableReason),
}
