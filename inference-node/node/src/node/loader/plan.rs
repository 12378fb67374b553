//! The loader's planner: decides which models are loaded, evicted, kept and retried. The planner is a pure function
//! over plain data: the time is a parameter, and [`super::Loader`] executes its actions.
//!
//! [`apply`] takes one event and returns the next actions. The executor executes them, observes the machine again, and
//! calls [`apply`] with the outcome or with [`LoaderEvent::Continue`], until no action is returned. At most one of the
//! returned actions has an outcome, and it is the last one.
//!
//! The policy:
//!
//! - All models together may use the host memory that was free when the node started, or `memory_limit`. Of a GPU, they
//!   may use the memory that was free when it was opened.
//! - For a model that does not fit beside the others, memory is freed in this order: cached weights; the least recently
//!   used idle model; the least recently used busy model, which takes no more sequences and is unloaded after its last
//!   one.
//! - Pinned models (`cfq models pin`) are never evicted. A model that has not been used since its load is not evicted
//!   for a grace period, because the job for which it was loaded has not arrived yet.
//! - No model is evicted for one that would not fit even after all permitted evictions.
//! - A model that can never fit is refused permanently. A model that does not fit now is refused for a backoff time
//!   that grows with every attempt; after that time, the next request loads the model if possible.
//! - A model that waits for memory delays only the loads of models that would use that memory. Others are loaded before
//!   it (backfill), except on a machine with GPUs.
//! - GPUs are preferred to the CPU. Models on GPUs are evicted in the same order, but never for a model that will run
//!   on the CPU.
//! - While the machine yields to another program nothing is loaded, but models are unloaded.
//!
//! Tested properties (`properties.rs`): the capacity of the host and of each GPU is never exceeded; a pinned model is
//! never evicted; nothing is evicted for a model that cannot fit; backfill never takes what the models before it need;
//! every waiting model is loaded or refused once the running sequences end; planning twice changes nothing.

mod backfill;
pub mod backoff;
pub mod event;
mod gpus;
mod host;
pub mod host_estimate;
mod memory;
mod outcome;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod sim;
mod start;
pub mod state;
mod waiting;

use std::time::Instant;

use self::event::{LoaderAction, LoaderEvent, PublishedStatus};
use self::outcome::WAITING_REPLAN_INTERVAL;
use self::state::{LoaderState, ModelPhase, StartModel};

/// Applies `event` to the state and returns the next actions; no action if nothing has to be done now.
pub fn apply(state: &mut LoaderState, event: LoaderEvent, now: Instant) -> Vec<LoaderAction> {
    let mut actions = Vec::new();
    state.on_event(event, now, &mut actions);
    state.plan(now, &mut actions);
    actions
}

impl LoaderState {
    fn on_event(&mut self, event: LoaderEvent, now: Instant, actions: &mut Vec<LoaderAction>) {
        match event {
            LoaderEvent::LoadRequested(model) => {
                self.request_replan();
                if matches!(self.phase(&model), ModelPhase::Unknown | ModelPhase::OnDisk | ModelPhase::Unusable) {
                    // No status is sent: the registry published the model as loading when it accepted the request.
                    self.unloaded.insert(model.clone(), ModelPhase::Loading);
                }
                if !self.waiting.contains(&model) {
                    self.waiting.push_back(model);
                }
            }
            LoaderEvent::UnloadRequested(model) => {
                self.request_replan();
                self.begin_unload(&model, None, actions);
            }
            LoaderEvent::LoadTogether(models) => {
                self.request_replan();
                // A model that already waits keeps its place in the queue.
                let models = models.into_iter().filter(|start| !self.waiting.contains(&start.model));
                let models: Vec<StartModel> = models.collect();
                self.unloaded.extend(models.iter().map(|start| (start.model.clone(), ModelPhase::Loading)));
                self.starting.extend(models);
            }
            LoaderEvent::Tick => self.request_replan(),
            LoaderEvent::EnginesChanged => {
                // Engines change often, but only a model that became idle or busy, a yield, or the time can change a
                // decision. Frequent changes must not postpone the planning that is due only because time has passed.
                if self.busy_models() != self.planned_busy
                    || self.observed.yielding != self.planned_yielding
                    || self.next_replan_at.is_some_and(|at| now >= at)
                {
                    self.request_replan();
                }
            }
            LoaderEvent::Continue => {}
            LoaderEvent::Estimated { model, estimate } => self.on_estimated(model, estimate, now, actions),
            LoaderEvent::LoadFinished { model, result } => self.on_load_finished(&model, result, now, actions),
            LoaderEvent::Unloaded { model, state, cached } => self.on_unloaded(&model, *state, cached, actions),
            LoaderEvent::StillShared { model } => self.on_still_shared(&model, now),
        }
    }

    /// Appends the actions of the next decision. Appends nothing during a load, or if an action in `actions` has an
    /// outcome or drops cached weights: the decision after it needs a new observation of the machine.
    fn plan(&mut self, now: Instant, actions: &mut Vec<LoaderAction>) {
        // After an action that changes what the machine reports, the next decision needs a new observation.
        let needs_observation =
            |action: &LoaderAction| action.has_outcome() || matches!(action, LoaderAction::DropCachedWeights { .. });
        if self.loading.is_some() || actions.iter().any(needs_observation) {
            return;
        }
        self.offer_retries(now, actions);
        if let Some(model) = self.next_to_unload(now) {
            actions.push(LoaderAction::Unload { model });
            return;
        }
        if self.observed.yielding {
            self.queue_starting_models();
        } else if self.plan_start(now, actions) || (self.replan && self.plan_waiting(now, actions)) {
            return;
        }
        if std::mem::take(&mut self.replan) {
            self.planned_busy = self.busy_models();
            self.planned_yielding = self.observed.yielding;
            self.next_replan_at = Some(now + WAITING_REPLAN_INTERVAL);
        }
        self.report_free_bytes(actions);
    }

    /// Requests that the waiting models are planned again, and discards cached estimates that may be out of date.
    pub(super) fn request_replan(&mut self) {
        self.replan = true;
        for known in self.estimates.values_mut() {
            known.not_installed = false;
            known.gpus.clear();
        }
    }

    /// Publishes that the models whose backoff time is over are available again.
    fn offer_retries(&mut self, now: Instant, actions: &mut Vec<LoaderAction>) {
        for (model, state) in self.backoff.take_due(now) {
            if self.phase(&model) == ModelPhase::Unusable {
                self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
                actions.push(LoaderAction::SetStatus { model, status: PublishedStatus::RetryAllowed(state) });
            }
        }
    }

    fn report_free_bytes(&mut self, actions: &mut Vec<LoaderAction>) {
        let free = self.loadable_bytes();
        if self.reported_free_bytes != Some(free) {
            self.reported_free_bytes = Some(free);
            actions.push(LoaderAction::SetFreeBytes(free));
        }
    }
}
