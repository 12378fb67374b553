//! Backfill: loads of later models in the queue, in memory that the models waiting before them do not need.

use std::time::Instant;

use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::state::{LoadedModel, LoaderState};
use super::waiting::Step;

/// Why the estimate of a model is missing.
enum Missing {
    NotAsked,
    /// The model would have to be fetched first, which would delay installed models.
    NotInstalled,
}

impl LoaderState {
    /// Next step for a model with `before` other models waiting before it. Nothing is evicted for it, and it does not
    /// use memory that those need. On a machine with GPUs it always waits, since it is not known yet on which device
    /// the others will be placed.
    pub(super) fn place_beside(&self, before: usize, model: &ModelId, now: Instant) -> Step {
        if let Some(refusal) = self.unusable_device() {
            return Step::Refuse(refusal);
        }
        if !self.gpus().is_empty() {
            return Step::Wait;
        }
        let mut reserved = 0u64;
        for first in self.waiting.iter().take(before) {
            let smallest = match self.smallest_host_bytes(first) {
                Ok(smallest) => smallest,
                Err(Missing::NotAsked) => {
                    return Step::AskOf(first.clone(), EstimateRequest::Host { may_fetch: false });
                }
                Err(Missing::NotInstalled) => return Step::Wait,
            };
            let last = self.last_bytes.get(first).copied().unwrap_or(0);
            reserved = reserved.saturating_add(last.max(smallest));
        }
        let smallest = match self.smallest_host_bytes(model) {
            Ok(smallest) => smallest,
            Err(Missing::NotAsked) => return Step::Ask(EstimateRequest::Host { may_fetch: false }),
            Err(Missing::NotInstalled) => return Step::Wait,
        };
        let evictable = |model: &ModelId, loaded: &LoadedModel| {
            self.is_idle(model) && self.is_fresh(model, loaded, now) && !self.is_pinned(model)
        };
        let fresh = self.loaded.iter().filter(|(model, loaded)| evictable(model, loaded)).map(|(_, loaded)| loaded);
        let leaving = self.draining.iter().map(|(_, loaded)| loaded);
        let coming: u64 = leaving.chain(fresh).map(|loaded| loaded.host_bytes).sum();
        let spare = self.unpromised().saturating_add(coming).saturating_sub(reserved).min(self.have());
        if smallest <= spare { Step::Load { host_bytes: spare, target: LoadTarget::Host } } else { Step::Wait }
    }

    /// Minimum bytes of host memory that a waiting model needs, if known without fetching it.
    fn smallest_host_bytes(&self, model: &ModelId) -> Result<u64, Missing> {
        let Some(known) = self.estimates.get(model) else { return Err(Missing::NotAsked) };
        match &known.host {
            Some(Ok(estimate)) => Ok(estimate.smallest_bytes()),
            // A model whose file cannot be read needs no memory; its load reports the reason.
            Some(Err(_)) => Ok(0),
            None if known.not_installed => Err(Missing::NotInstalled),
            None => Err(Missing::NotAsked),
        }
    }
}
