//! The loader's planner: decides which models are loaded, evicted, kept and retried. The planner is a pure function
//! over plain data: the time is a parameter, and [`super::Loader`] executes its commands.
//!
//! [`apply`] takes one event and returns the next commands. The executor executes them, observes the machine again, and
//! calls [`apply`] with the outcome or with [`Event::Continue`], until no command is returned. At most one of the
//! returned commands has an outcome, and it is the last one.
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
//!   that grows with every attempt; after it, the next request is tried again.
//! - A model that waits for memory delays only models that would use that memory. Others are loaded before it
//!   (backfill), except on a machine with GPUs.
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

use self::event::{Command, Event, Status};
use self::outcome::WAITING_INTERVAL;
use self::state::{LoaderState, ModelPhase, StartModel};

/// Applies `event` to the state and returns the next commands; no command if nothing has to be done now.
pub fn apply(state: &mut LoaderState, event: Event, now: Instant) -> Vec<Command> {
    let mut commands = Vec::new();
    state.on_event(event, now, &mut commands);
    state.plan(now, &mut commands);
    commands
}

impl LoaderState {
    fn on_event(&mut self, event: Event, now: Instant, commands: &mut Vec<Command>) {
        match event {
            Event::LoadRequested(model) => {
                self.begin_round();
                if matches!(self.phase(&model), ModelPhase::Unknown | ModelPhase::OnDisk | ModelPhase::Unusable) {
                    // No status is sent: the registry published the model as loading when it accepted the request.
                    self.unloaded.insert(model.clone(), ModelPhase::Loading);
                }
                if !self.waiting.contains(&model) {
                    self.waiting.push_back(model);
                }
            }
            Event::UnloadRequested(model) => {
                self.begin_round();
                self.begin_unload(&model, None, commands);
            }
            Event::LoadTogether(models) => {
                self.begin_round();
                // A model that already waits keeps its place in the queue.
                let models = models.into_iter().filter(|start| !self.waiting.contains(&start.model));
                let models: Vec<StartModel> = models.collect();
                self.unloaded.extend(models.iter().map(|start| (start.model.clone(), ModelPhase::Loading)));
                self.starting.extend(models);
            }
            Event::Tick => self.begin_round(),
            Event::EnginesChanged => {
                // Engines change often, but only a model that became idle or busy, a yield, or the time can change a
                // decision. Frequent changes must not postpone the round that time alone makes due.
                if self.busy_models() != self.planned_busy
                    || self.observed.yielding != self.planned_yielding
                    || self.next_round_at.is_some_and(|at| now >= at)
                {
                    self.begin_round();
                }
            }
            Event::Continue => {}
            Event::Estimated { model, estimate } => self.on_estimated(model, estimate, now, commands),
            Event::LoadFinished { model, result } => self.on_load_finished(&model, result, now, commands),
            Event::Unloaded { model, state, cached } => self.on_unloaded(&model, *state, cached, commands),
            Event::StillShared { model } => self.on_still_shared(&model, now),
        }
    }

    /// Appends the next command with an outcome and all commands before it.
    fn plan(&mut self, now: Instant, commands: &mut Vec<Command>) {
        // After a command that changes what the machine reports, the next decision needs a new observation.
        let needs_observation =
            |command: &Command| command.has_outcome() || matches!(command, Command::DropCachedWeights { .. });
        if self.loading.is_some() || commands.iter().any(needs_observation) {
            return;
        }
        self.offer_retries(now, commands);
        if let Some(model) = self.next_to_unload(now) {
            commands.push(Command::Unload { model });
            return;
        }
        if self.observed.yielding {
            self.starting_models_wait();
        } else if self.plan_start(now, commands) || (self.replan && self.plan_waiting(now, commands)) {
            return;
        }
        if std::mem::take(&mut self.replan) {
            self.planned_busy = self.busy_models();
            self.planned_yielding = self.observed.yielding;
            self.next_round_at = Some(now + WAITING_INTERVAL);
        }
        self.report_free_bytes(commands);
    }

    /// Starts a new planning round and discards cached estimates that may be out of date.
    pub(super) fn begin_round(&mut self) {
        self.replan = true;
        for known in self.estimates.values_mut() {
            known.not_installed = false;
            known.gpus.clear();
        }
    }

    /// Publishes models whose backoff time is over as available again.
    fn offer_retries(&mut self, now: Instant, commands: &mut Vec<Command>) {
        for (model, state) in self.backoff.take_due(now) {
            if self.phase(&model) == ModelPhase::Unusable {
                self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
                commands.push(Command::SetStatus { model, status: Status::RetryAllowed(state) });
            }
        }
    }

    fn report_free_bytes(&mut self, commands: &mut Vec<Command>) {
        let free = self.reported_free();
        if self.reported_free_bytes != Some(free) {
            self.reported_free_bytes = Some(free);
            commands.push(Command::SetFreeBytes(free));
        }
    }
}
