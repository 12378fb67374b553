//! Loads of several models that share the memory: at start, and after a yield.
//!
//! Each model gets an equal share of the memory that is left, so that the next models have memory too. If the share is
//! too small for a model, the model may take all memory that is left. A model that does not fit beside the others stays
//! on disk until it is requested.

use std::time::Instant;

use super::event::{LoadTarget, LoaderAction};
use super::state::{LoadOrigin, LoaderState, ModelPhase, StartModel};
use super::waiting::LoadRefusal;
use crate::node::unusable::UnusableReason;

/// Limit of interrupted loads: a model is not loaded at start if the node process ended during this many of its loads
/// in a row. A single interrupted load may be a coincidence, for example if the user stopped the node.
const MAX_INTERRUPTED_LOADS: usize = 2;

impl LoaderState {
    /// Appends the action for the next model that is loaded at start. Returns whether there was one.
    pub(super) fn plan_start(&mut self, now: Instant, actions: &mut Vec<LoaderAction>) -> bool {
        while let Some(StartModel { model, interrupted_loads }) = self.starting.pop_front() {
            if self.phase(&model) != ModelPhase::Loading {
                continue;
            }
            if interrupted_loads >= MAX_INTERRUPTED_LOADS {
                let reason = UnusableReason::LoadsInterrupted { model: model.clone(), loads: interrupted_loads };
                self.refuse(&model, LoadRefusal::Permanent(reason), now, actions);
                continue;
            }
            if let Some(refusal) = self.unusable_device() {
                self.refuse(&model, refusal, now, actions);
                continue;
            }
            let (have, sharers) = (self.free_bytes_now(), self.starting.len() as u64 + 1);
            let share = have / sharers;
            let target = self.start_target(sharers);
            self.begin_load(model, share, target, LoadOrigin::Start { may_retry: share < have }, actions);
            return true;
        }
        false
    }

    /// Where a model is loaded at start: on the GPUs if there are any, as one of `sharers` models.
    pub(super) fn start_target(&self, sharers: u64) -> LoadTarget {
        match self.gpus().is_empty() {
            true => LoadTarget::Host,
            false => LoadTarget::Gpus { free: self.gpu_free_now(), sharers },
        }
    }

    /// Moves the models to be loaded at start to the queue of waiting models; called while the machine yields.
    pub(super) fn queue_starting_models(&mut self) {
        for StartModel { model, .. } in std::mem::take(&mut self.starting) {
            if !self.waiting.contains(&model) {
                self.waiting.push_back(model);
            }
        }
    }
}
