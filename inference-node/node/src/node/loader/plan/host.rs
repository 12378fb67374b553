//! Placement of the first waiting model in host memory, and model eviction there.

use std::time::Instant;

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::host_estimate::{HostEstimate, is_enough};
use super::state::{LoaderState, ResidentModel};
use super::waiting::{LoadRefusal, PlacementStep};
use crate::node::unusable::{MemoryShortage, UnusableReason};

impl LoaderState {
    /// The next step for `model` on the host. If possible, the model gets as much memory as at its last load; otherwise
    /// it gets at least the smallest KV pool.
    pub(super) fn place_on_host(&self, model: &ModelId, now: Instant) -> PlacementStep {
        let (have, last) = (self.free_bytes_now(), self.last_bytes.get(model).copied());
        let cached = self.cached.iter().find(|cached| cached.model == *model);
        // The cached weights of the model itself are reused, so their memory counts as available.
        let own = cached.map_or(0, |cached| cached.bytes);
        let estimate = match cached {
            Some(cached) => cached.estimate.clone(),
            None => match self.host_estimate(model) {
                Ok(estimate) => estimate,
                Err(step) => return step,
            },
        };
        let fitting = match estimate.fit(have + own) {
            Ok(fitting) => Some(fitting),
            // Nothing is evicted for a model that does not fit even if no other model is loaded.
            Err(error) if estimate.smallest_bytes() > self.config.host_bytes => {
                return self.too_large_for_host(model, estimate.shortage(error));
            }
            // Nothing is evicted either if the model would not fit even after all permitted evictions.
            Err(_) if estimate.smallest_bytes() > self.bytes_after_evictions() => {
                return self.refuse_on_host(model, self.bytes_after_evictions());
            }
            Err(_) => None,
        };
        let others = self.cached_bytes().saturating_sub(own);
        if let Some(fitting) = &fitting
            && last.is_none_or(|last| is_enough(fitting, last, others))
        {
            let wanted = last.unwrap_or(u64::MAX).max(fitting.total());
            return PlacementStep::Load { host_bytes: (have + own).min(wanted), target: LoadTarget::Host };
        }
        if let Some(other) = self.cached.iter().find(|cached| cached.model != *model) {
            return PlacementStep::DropCachedWeights(other.model.clone());
        }
        // Unloading a model on GPUs would free no host memory.
        let on_host = |loaded: &ResidentModel| loaded.host_bytes > 0;
        if self.unloading.iter().any(|(unloading, loaded)| on_host(loaded) && self.is_idle(unloading)) {
            return PlacementStep::Wait;
        }
        let idle = |other: &ModelId, loaded: &ResidentModel| on_host(loaded) && self.is_idle(other);
        let in_grace = |other: &ModelId, loaded: &ResidentModel| self.is_in_grace_period(other, loaded, now);
        if let Some(victim) = self.least_recently_used(|other, loaded| idle(other, loaded) && !in_grace(other, loaded))
        {
            return PlacementStep::Evict(victim);
        }
        if fitting.is_some() {
            return PlacementStep::Load { host_bytes: have + own, target: LoadTarget::Host };
        }
        let idle_in_grace = |other: &ModelId, loaded: &ResidentModel| idle(other, loaded) && in_grace(other, loaded);
        if self.unloading.iter().any(|(_, loaded)| on_host(loaded)) || self.least_recently_used(idle_in_grace).is_some()
        {
            return PlacementStep::Wait;
        }
        match self.least_recently_used(|_, loaded| on_host(loaded)) {
            Some(victim) => PlacementStep::Evict(victim),
            None => self.refuse_on_host(model, have + own),
        }
    }

    /// The estimate from the model's file. `Err` is the step that provides a missing estimate, or the refusal if the
    /// file cannot be used.
    pub(super) fn host_estimate(&self, model: &ModelId) -> Result<HostEstimate, PlacementStep> {
        match self.estimates.get(model).and_then(|known| known.host.clone()) {
            Some(Ok(estimate)) => Ok(estimate),
            Some(Err(reason)) => Err(PlacementStep::Refuse(LoadRefusal::Permanent(reason))),
            None => Err(PlacementStep::Estimate(EstimateRequest::Host { may_fetch: true })),
        }
    }

    /// Whether the model fits the host after all permitted evictions. `Err` is the step that provides a missing
    /// estimate.
    pub(super) fn could_fit_host(&self, model: &ModelId) -> Result<bool, PlacementStep> {
        match self.host_estimate(model) {
            Ok(estimate) => Ok(estimate.fit(self.bytes_after_evictions()).is_ok()),
            Err(PlacementStep::Refuse(_)) => Ok(false),
            Err(step) => Err(step),
        }
    }

    /// The step for a model that does not fit the host even if no other model is loaded. The refusal is temporary if
    /// the model fits the GPUs once they are free.
    fn too_large_for_host(&self, model: &ModelId, shortage: MemoryShortage) -> PlacementStep {
        if self.gpus().is_empty() {
            return PlacementStep::Refuse(LoadRefusal::Permanent(UnusableReason::TooLarge(shortage)));
        }
        match self.gpu_estimate(model, self.gpu_capacities()) {
            Ok(Ok(estimate)) => {
                let estimate = Box::new(estimate);
                PlacementStep::Refuse(LoadRefusal::NotNow { device: self.gpu_ids(), estimate, shortage })
            }
            Ok(Err(_)) => PlacementStep::Refuse(LoadRefusal::Permanent(UnusableReason::TooLarge(shortage))),
            Err(step) => step,
        }
    }

    /// The step that refuses a model when no further eviction is permitted and `have` bytes are available.
    fn refuse_on_host(&self, model: &ModelId, have: u64) -> PlacementStep {
        let estimate = match self.host_estimate(model) {
            Ok(estimate) => estimate,
            Err(step) => return step,
        };
        let (estimate, mut shortage) = match estimate.fit(have) {
            Ok(fitting) => (fitting, MemoryShortage::new(format!("{model} needs {}", Bytes(fitting.total())))),
            Err(error) => (estimate.smallest, estimate.shortage(error)),
        };
        let pinned = |(other, loaded): &(&ModelId, &ResidentModel)| loaded.host_bytes > 0 && self.is_pinned(other);
        shortage.pinned = self.loaded.iter().filter(pinned).map(|(other, _)| other.clone()).collect();
        let estimate = Box::new(estimate);
        PlacementStep::Refuse(LoadRefusal::NotNow { device: "cpu".to_owned(), estimate, shortage })
    }
}
