//! Planning of the models that wait for memory, in the order of their requests.

use std::time::Instant;

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadAction, LoadTarget, LoaderAction, PublishedStatus};
use super::state::{LoadInProgress, LoadOrigin, LoaderState, ModelPhase};
use crate::node::unusable::{MemoryShortage, UnusableReason};

/// The next step for a waiting model.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum PlacementStep {
    /// Request a memory estimate of this model, without which no decision is possible.
    Estimate(EstimateRequest),
    /// Request a memory estimate of another model, which is before this one in the queue.
    EstimateOther(ModelId, EstimateRequest),
    /// Load the model.
    Load {
        host_bytes: u64,
        target: LoadTarget,
    },
    /// Drop the cached weights of another model.
    DropCachedWeights(ModelId),
    /// Evict another model, immediately or after its last sequence.
    Evict(ModelId),
    /// Wait: memory will become free without a further decision.
    Wait,
    Refuse(LoadRefusal),
}

/// Why the planner does not load a waiting model.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum LoadRefusal {
    /// Temporary: the model would fit if other models or programs freed memory.
    NotNow { device: String, estimate: Box<MemoryEstimate>, shortage: MemoryShortage },
    /// Permanent: a retry would be refused as well.
    Permanent(UnusableReason),
}

impl LoaderState {
    /// Appends the actions of the next decision about a waiting model. Returns whether there was one.
    pub(super) fn plan_waiting(&mut self, now: Instant, actions: &mut Vec<LoaderAction>) -> bool {
        let mut index = 0;
        while let Some(model) = self.waiting.get(index).cloned() {
            match self.phase(&model) {
                // The model is still being unloaded; it is loaded again afterwards.
                ModelPhase::Unloading => {
                    index += 1;
                    continue;
                }
                ModelPhase::Resident | ModelPhase::Unusable | ModelPhase::Unknown => {
                    self.waiting.remove(index);
                    continue;
                }
                ModelPhase::OnDisk => {
                    self.unloaded.insert(model.clone(), ModelPhase::Loading);
                    actions.push(LoaderAction::SetStatus { model: model.clone(), status: PublishedStatus::Loading });
                }
                ModelPhase::Loading => {}
            }
            let step = if index == 0 { self.place(&model, now) } else { self.backfill(index, &model, now) };
            match step {
                PlacementStep::Wait => {
                    index += 1;
                    continue;
                }
                PlacementStep::Estimate(request) => actions.push(LoaderAction::Estimate { model, request }),
                PlacementStep::EstimateOther(model, request) => actions.push(LoaderAction::Estimate { model, request }),
                PlacementStep::DropCachedWeights(cached) => self.drop_cached_weights(&cached, actions),
                PlacementStep::Evict(victim) => self.begin_unload(&victim, Some(model), actions),
                PlacementStep::Load { host_bytes, target } => {
                    self.waiting.remove(index);
                    self.begin_load(model, host_bytes, target, LoadOrigin::Requested, actions);
                }
                PlacementStep::Refuse(refusal) => {
                    self.waiting.remove(index);
                    self.refuse(&model, refusal, now, actions);
                }
            }
            return true;
        }
        let Self { estimates, waiting, .. } = self;
        estimates.retain(|model, _| waiting.contains(model));
        false
    }

    /// The next step for a model: on the GPUs if it fits them, else on the host.
    fn place(&self, model: &ModelId, now: Instant) -> PlacementStep {
        self.place_on_gpus(model, now).unwrap_or_else(|| self.place_on_host(model, now))
    }

    /// Begins the unload of a model: its engine takes no more sequences from now on. Does nothing if the model is not
    /// loaded.
    pub(super) fn begin_unload(
        &mut self,
        model: &ModelId,
        evicted_for: Option<ModelId>,
        actions: &mut Vec<LoaderAction>,
    ) {
        let Some(loaded) = self.loaded.remove(model) else { return };
        self.unloading.push((model.clone(), loaded));
        actions.push(LoaderAction::BeginUnload { model: model.clone(), evicted_for });
    }

    pub(super) fn drop_cached_weights(&mut self, model: &ModelId, actions: &mut Vec<LoaderAction>) {
        self.cached.retain(|cached| cached.model != *model);
        actions.push(LoaderAction::DropCachedWeights { model: model.clone() });
    }

    pub(super) fn begin_load(
        &mut self,
        model: ModelId,
        host_bytes: u64,
        target: LoadTarget,
        origin: LoadOrigin,
        actions: &mut Vec<LoaderAction>,
    ) {
        // The cached weights of the model are removed from the list: the executor uses or drops them in the load.
        self.cached.retain(|cached| cached.model != model);
        let used_before = self.last_use(&model);
        self.loading = Some(LoadInProgress { model: model.clone(), host_bytes, used_before, origin });
        actions.push(LoaderAction::Load(LoadAction { model, host_bytes, target }));
    }

    /// The next engine to unload: one that is being unloaded and has no running sequences.
    pub(super) fn next_to_unload(&self, now: Instant) -> Option<ModelId> {
        let may = |(model, loaded): &&(ModelId, super::state::ResidentModel)| {
            self.is_idle(model) && loaded.unload_retry_at.is_none_or(|at| at <= now)
        };
        self.unloading.iter().find(may).map(|(model, _)| model.clone())
    }
}
