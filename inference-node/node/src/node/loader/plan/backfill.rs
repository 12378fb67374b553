//! Backfill: loads of later models in the queue, in memory that the models waiting before them do not need.

use std::time::Instant;

use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::state::{LoaderState, ResidentModel};
use super::waiting::PlacementStep;

/// Why no estimate of a model is available.
enum Missing {
    NotRequested,
    /// The model would have to be fetched first, which would delay installed models.
    NotInstalled,
}

impl LoaderState {
    /// The next step for a model with `before` other models before it in the queue. Nothing is evicted for the model,
    /// and it does not use memory that the models before it need. On a machine with GPUs it always waits, since it is
    /// not known yet on which device the others will be placed.
    pub(super) fn backfill(&self, before: usize, model: &ModelId, now: Instant) -> PlacementStep {
        if let Some(refusal) = self.unusable_device() {
            return PlacementStep::Refuse(refusal);
        }
        if !self.gpus().is_empty() {
            return PlacementStep::Wait;
        }
        let mut reserved = 0u64;
        for first in self.waiting.iter().take(before) {
            let smallest = match self.smallest_host_bytes(first) {
                Ok(smallest) => smallest,
                Err(Missing::NotRequested) => {
                    return PlacementStep::EstimateOther(first.clone(), EstimateRequest::Host { may_fetch: false });
                }
                Err(Missing::NotInstalled) => return PlacementStep::Wait,
            };
            let last = self.last_bytes.get(first).copied().unwrap_or(0);
            reserved = reserved.saturating_add(last.max(smallest));
        }
        let smallest = match self.smallest_host_bytes(model) {
            Ok(smallest) => smallest,
            Err(Missing::NotRequested) => return PlacementStep::Estimate(EstimateRequest::Host { may_fetch: false }),
            Err(Missing::NotInstalled) => return PlacementStep::Wait,
        };
        let evictable = |model: &ModelId, loaded: &ResidentModel| {
            self.is_idle(model) && self.is_in_grace_period(model, loaded, now) && !self.is_pinned(model)
        };
        let in_grace = self.loaded.iter().filter(|(model, loaded)| evictable(model, loaded)).map(|(_, loaded)| loaded);
        let leaving = self.unloading.iter().map(|(_, loaded)| loaded);
        let soon_free: u64 = leaving.chain(in_grace).map(|loaded| loaded.host_bytes).sum();
        let spare = self.unreserved_bytes().saturating_add(soon_free).saturating_sub(reserved);
        let spare = spare.min(self.free_bytes_now());
        match smallest <= spare {
            true => PlacementStep::Load { host_bytes: spare, target: LoadTarget::Host },
            false => PlacementStep::Wait,
        }
    }

    /// Minimum bytes of host memory that a waiting model needs, if known without fetching it.
    fn smallest_host_bytes(&self, model: &ModelId) -> Result<u64, Missing> {
        let Some(known) = self.estimates.get(model) else { return Err(Missing::NotRequested) };
        match &known.host {
            Some(Ok(estimate)) => Ok(estimate.smallest_bytes()),
            // A model whose file cannot be read needs no memory; its load reports the reason.
            Some(Err(_)) => Ok(0),
            None if known.not_installed => Err(Missing::NotInstalled),
            None => Err(Missing::NotRequested),
        }
    }
}
