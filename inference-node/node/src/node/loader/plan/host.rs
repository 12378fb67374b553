//! Placement of the first waiting model in host memory, and evictions there.

use std::time::Instant;

use cfq_engine::Bytes;
use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::host_estimate::{HostEstimate, is_enough};
use super::state::{LoadedModel, LoaderState};
use super::waiting::{Refusal, Step};

impl LoaderState {
    /// The next step for `model` on the host. If possible it gets as much memory as at its last load, otherwise at
    /// least the smallest KV pool.
    pub(super) fn place_on_host(&self, model: &ModelId, now: Instant) -> Step {
        let (have, last) = (self.have(), self.last_bytes.get(model).copied());
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
            // Nothing is evicted for a model that does not fit even if no other model is loaded,
            Err(error) if estimate.smallest_bytes() > self.config.host_bytes => {
                return self.too_large_for_host(model, estimate.refusal(error));
            }
            // nor for a model that would not fit even after all permitted evictions.
            Err(_) if estimate.smallest_bytes() > self.at_most() => return self.refuse_on_host(model, self.at_most()),
            Err(_) => None,
        };
        let others = self.cached_bytes().saturating_sub(own);
        if let Some(fitting) = &fitting
            && last.is_none_or(|last| is_enough(fitting, last, others))
        {
            let wanted = last.unwrap_or(u64::MAX).max(fitting.total());
            return Step::Load { host_bytes: (have + own).min(wanted), target: LoadTarget::Host };
        }
        if let Some(other) = self.cached.iter().find(|cached| cached.model != *model) {
            return Step::DropCachedWeights(other.model.clone());
        }
        // Unloading a model on GPUs would free no host memory.
        let on_host = |loaded: &LoadedModel| loaded.host_bytes > 0;
        if self.draining.iter().any(|(draining, loaded)| on_host(loaded) && self.is_idle(draining)) {
            return Step::Wait;
        }
        let idle = |other: &ModelId, loaded: &LoadedModel| on_host(loaded) && self.is_idle(other);
        if let Some(victim) =
            self.least_recently_used(|other, loaded| idle(other, loaded) && !self.is_fresh(other, loaded, now))
        {
            return Step::Evict(victim);
        }
        if fitting.is_some() {
            return Step::Load { host_bytes: have + own, target: LoadTarget::Host };
        }
        let fresh = |other: &ModelId, loaded: &LoadedModel| idle(other, loaded) && self.is_fresh(other, loaded, now);
        if self.draining.iter().any(|(_, loaded)| on_host(loaded)) || self.least_recently_used(fresh).is_some() {
            return Step::Wait;
        }
        match self.least_recently_used(|_, loaded| on_host(loaded)) {
            Some(victim) => Step::Evict(victim),
            None => self.refuse_on_host(model, have + own),
        }
    }

    /// The estimate from the model's file. `Err` is the step that provides a missing estimate, or the refusal if the
    /// file cannot be used.
    pub(super) fn host_estimate(&self, model: &ModelId) -> Result<HostEstimate, Step> {
        match self.estimates.get(model).and_then(|known| known.host.clone()) {
            Some(Ok(estimate)) => Ok(estimate),
            Some(Err(reason)) => Err(Step::Refuse(Refusal::Permanent { reason })),
            None => Err(Step::Ask(EstimateRequest::Host { may_fetch: true })),
        }
    }

    /// Whether the model fits the host after all permitted evictions. `Err` is the step that provides a missing
    /// estimate.
    pub(super) fn could_fit_host(&self, model: &ModelId) -> Result<bool, Step> {
        match self.host_estimate(model) {
            Ok(estimate) => Ok(estimate.fit(self.at_most()).is_ok()),
            Err(Step::Refuse(_)) => Ok(false),
            Err(ask) => Err(ask),
        }
    }

    /// The step for a model that does not fit the host even alone. The refusal is temporary if the model fits the GPUs
    /// once they are free.
    fn too_large_for_host(&self, model: &ModelId, reason: String) -> Step {
        if self.gpus().is_empty() {
            return Step::Refuse(Refusal::Permanent { reason });
        }
        match self.gpu_estimate(model, self.gpu_capacities()) {
            Ok(Ok(estimate)) => Step::Refuse(Refusal::NotNow { device: self.gpu_ids(), estimate, reason }),
            Ok(Err(_)) => Step::Refuse(Refusal::Permanent { reason }),
            Err(ask) => ask,
        }
    }

    /// The step that refuses a model when no further eviction is permitted and `have` bytes are available.
    fn refuse_on_host(&self, model: &ModelId, have: u64) -> Step {
        let estimate = match self.host_estimate(model) {
            Ok(estimate) => estimate,
            Err(step) => return step,
        };
        let (estimate, arithmetic) = match estimate.fit(have) {
            Ok(fitting) => (fitting, format!("{model} needs {}", Bytes(fitting.total()))),
            Err(error) => (estimate.smallest, estimate.refusal(error)),
        };
        let pinned = |(other, loaded): &(&ModelId, &LoadedModel)| loaded.host_bytes > 0 && self.is_pinned(other);
        let pinned: Vec<&str> = self.loaded.iter().filter(pinned).map(|(other, _)| other.as_str()).collect();
        let reason = match pinned.is_empty() {
            true => arithmetic,
            false => {
                let pinned = pinned.join(", ");
                format!("{arithmetic}; nothing more can be evicted, since these are pinned: {pinned}")
            }
        };
        Step::Refuse(Refusal::NotNow { device: "cpu".to_owned(), estimate, reason })
    }
}
