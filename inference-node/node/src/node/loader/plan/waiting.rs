//! Planning of the models that wait for memory, in the order of their requests.

use std::time::Instant;

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;

use super::event::{Command, EstimateRequest, LoadCommand, LoadTarget, Status};
use super::state::{LoadInProgress, LoadOrigin, LoaderState, ModelPhase};

/// The next step for a waiting model.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Request an estimate of this model, without which no decision is possible.
    Ask(EstimateRequest),
    /// Request an estimate of another model, which waits before this one.
    AskOf(ModelId, EstimateRequest),
    /// Load the model.
    Load {
        host_bytes: u64,
        target: LoadTarget,
    },
    /// Drop the cached weights of this other model.
    DropCachedWeights(ModelId),
    /// Evict this other model, immediately or after its last sequence.
    Evict(ModelId),
    /// Wait: memory will become free without a further decision.
    Wait,
    Refuse(Refusal),
}

/// The reason why a model is not loaded.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Refusal {
    /// Temporary: the model would fit if other models or programs freed memory.
    NotNow { device: String, estimate: MemoryEstimate, reason: String },
    /// Permanent: a retry would be refused as well.
    Permanent { reason: String },
}

impl LoaderState {
    /// Appends the next commands for the waiting models. Returns whether there were any; then planning continues after
    /// them.
    pub(super) fn plan_waiting(&mut self, now: Instant, commands: &mut Vec<Command>) -> bool {
        let mut index = 0;
        while let Some(model) = self.waiting.get(index).cloned() {
            match self.phase(&model) {
                // The model is still being unloaded; it is loaded again afterwards.
                ModelPhase::Draining => {
                    index += 1;
                    continue;
                }
                ModelPhase::Ready | ModelPhase::Unusable | ModelPhase::Unknown => {
                    self.waiting.remove(index);
                    continue;
                }
                ModelPhase::OnDisk => {
                    self.unloaded.insert(model.clone(), ModelPhase::Loading);
                    commands.push(Command::SetStatus { model: model.clone(), status: Status::Loading });
                }
                ModelPhase::Loading => {}
            }
            let step = if index == 0 { self.place(&model, now) } else { self.place_beside(index, &model, now) };
            match step {
                Step::Wait => {
                    index += 1;
                    continue;
                }
                Step::Ask(request) => commands.push(Command::Estimate { model, request }),
                Step::AskOf(model, request) => commands.push(Command::Estimate { model, request }),
                Step::DropCachedWeights(cached) => self.drop_cached_weights(&cached, commands),
                Step::Evict(victim) => self.begin_unload(&victim, Some(model), commands),
                Step::Load { host_bytes, target } => {
                    self.waiting.remove(index);
                    self.begin_load(model, host_bytes, target, LoadOrigin::Requested, commands);
                }
                Step::Refuse(refusal) => {
                    self.waiting.remove(index);
                    self.refuse(&model, refusal, now, commands);
                }
            }
            return true;
        }
        let Self { estimates, waiting, .. } = self;
        estimates.retain(|model, _| waiting.contains(model));
        false
    }

    /// The next step for a model: on the GPUs if it fits them, else on the host.
    fn place(&self, model: &ModelId, now: Instant) -> Step {
        self.place_on_gpus(model, now).unwrap_or_else(|| self.place_on_host(model, now))
    }

    /// Begins the unload of a loaded model, which takes no more sequences from now on. Does nothing if it is not
    /// loaded.
    pub(super) fn begin_unload(&mut self, model: &ModelId, evicted_for: Option<ModelId>, commands: &mut Vec<Command>) {
        let Some(loaded) = self.loaded.remove(model) else { return };
        self.draining.push((model.clone(), loaded));
        commands.push(Command::BeginUnload { model: model.clone(), evicted_for });
    }

    pub(super) fn drop_cached_weights(&mut self, model: &ModelId, commands: &mut Vec<Command>) {
        self.cached.retain(|cached| cached.model != *model);
        commands.push(Command::DropCachedWeights { model: model.clone() });
    }

    pub(super) fn begin_load(
        &mut self,
        model: ModelId,
        host_bytes: u64,
        target: LoadTarget,
        origin: LoadOrigin,
        commands: &mut Vec<Command>,
    ) {
        // The cached weights of the model are removed from the list: the executor uses or drops them in the load.
        self.cached.retain(|cached| cached.model != model);
        let used_before = self.last_use(&model);
        self.loading = Some(LoadInProgress { model: model.clone(), host_bytes, used_before, origin });
        commands.push(Command::Load(LoadCommand { model, host_bytes, target }));
    }

    /// The next engine to unload: a draining one without running sequences.
    pub(super) fn next_to_unload(&self, now: Instant) -> Option<ModelId> {
        let may = |(model, loaded): &&(ModelId, super::state::LoadedModel)| {
            self.is_idle(model) && loaded.unload_retry_at.is_none_or(|at| at <= now)
        };
        self.draining.iter().find(may).map(|(model, _)| model.clone())
    }
}
