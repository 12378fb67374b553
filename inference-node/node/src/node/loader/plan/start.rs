//! Loads of several models that share the memory: at start, and after a yield.
//!
//! Each model gets an equal share of the memory that is left, so that the next models have memory too. If the share is
//! too small for a model, it may take all memory that is left. A model that does not fit beside the others stays on
//! disk until it is requested.

use std::time::Instant;

use super::event::{Command, LoadTarget};
use super::state::StartModel;
use super::state::{LoadOrigin, LoaderState, ModelPhase};
use super::waiting::Refusal;

/// Number of consecutive loads during which the process ended after which the model is not loaded at start. A single
/// one may be a coincidence, for example a node stopped by its user.
const MAX_KILLED_LOADS: usize = 2;

impl LoaderState {
    /// Appends the command for the next model that is loaded at start. Returns whether there was one.
    pub(super) fn plan_start(&mut self, now: Instant, commands: &mut Vec<Command>) -> bool {
        while let Some(StartModel { model, killed_loads }) = self.starting.pop_front() {
            if self.phase(&model) != ModelPhase::Loading {
                continue;
            }
            if killed_loads >= MAX_KILLED_LOADS {
                let reason = format!(
                    "loading it ended the node the last {killed_loads} times, most likely because memory ran out: free \
                     some, set memory_limit, or use a smaller model; `cfq models load {model}` tries again"
                );
                self.refuse(&model, Refusal::Permanent { reason }, now, commands);
                continue;
            }
            if let Some(refusal) = self.unusable_device() {
                self.refuse(&model, refusal, now, commands);
                continue;
            }
            let (have, share_of) = (self.have(), self.starting.len() as u64 + 1);
            let share = have / share_of;
            let target = self.start_target(share_of);
            self.begin_load(model, share, target, LoadOrigin::Start { may_retry: share < have }, commands);
            return true;
        }
        false
    }

    /// Where a model is loaded at start: on the GPUs if there are any, as one of `share_of` models.
    pub(super) fn start_target(&self, share_of: u64) -> LoadTarget {
        match self.gpus().is_empty() {
            true => LoadTarget::Host,
            false => LoadTarget::Gpus { free: self.gpu_free_now(), share_of },
        }
    }

    /// Moves the models to be loaded at start to the queue of waiting models; called while the machine yields.
    pub(super) fn starting_models_wait(&mut self) {
        for StartModel { model, .. } in std::mem::take(&mut self.starting) {
            if !self.waiting.contains(&model) {
                self.waiting.push_back(model);
            }
        }
    }
}
