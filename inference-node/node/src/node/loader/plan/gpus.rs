//! Placement of the first waiting model on the GPUs, and evictions there.

use std::time::Instant;

use cfq_engine::MemoryEstimate;
use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::state::{LoadedModel, LoaderState};
use super::waiting::{Refusal, Step};
use crate::gpu::DeviceChoice;

impl LoaderState {
    /// The next step for `model` on the GPUs; `None` if it has to run on the host.
    pub(super) fn place_on_gpus(&self, model: &ModelId, now: Instant) -> Option<Step> {
        match &self.config.gpus {
            Ok(gpus) if gpus.is_empty() => None,
            Ok(_) => self.place_among_gpus(model, now).unwrap_or_else(Some),
            Err(_) => self.unusable_device().map(Step::Refuse),
        }
    }

    /// The reason to refuse all models if the configured GPU cannot be used; else `None`.
    pub(super) fn unusable_device(&self) -> Option<Refusal> {
        let reason = self.config.gpus.as_ref().err()?;
        Some(Refusal::Permanent { reason: format!("device = \"{}\": {reason}", self.config.device) })
    }

    /// Decides the next step on the GPUs: `Ok(None)` if the model has to run on the host; `Err` is a step that provides
    /// an estimate without which no decision is possible.
    fn place_among_gpus(&self, model: &ModelId, now: Instant) -> Result<Option<Step>, Step> {
        let auto = self.config.device == DeviceChoice::Auto;
        // Nothing is evicted for a model that does not fit even if no other model is loaded.
        let alone = match self.gpu_estimate(model, self.gpu_capacities())? {
            Ok(estimate) => estimate,
            Err(_) if auto => return Ok(None),
            Err(reason) => return Ok(Some(Step::Refuse(Refusal::Permanent { reason }))),
        };
        let free = self.gpu_free_now();
        let refused_now = match self.gpu_estimate(model, free.clone())? {
            Ok(_) => {
                let target = LoadTarget::Gpus { free, share_of: 1 };
                return Ok(Some(Step::Load { host_bytes: self.have(), target }));
            }
            Err(reason) => reason,
        };
        let not_now = |reason| Some(Step::Refuse(Refusal::NotNow { device: self.gpu_ids(), estimate: alone, reason }));
        // Nor is anything evicted for a model that would not fit even after all permitted evictions.
        if let Err(reason) = self.gpu_estimate(model, self.gpu_free_at_most())? {
            if auto && self.could_fit_host(model)? {
                return Ok(None);
            }
            return Ok(not_now(reason));
        }
        let draining_here = |idle_only: bool| {
            self.draining.iter().any(|(other, loaded)| loaded.is_on_gpu() && (!idle_only || self.is_idle(other)))
        };
        if draining_here(true) {
            return Ok(Some(Step::Wait));
        }
        let idle = |other: &ModelId, loaded: &LoadedModel| loaded.is_on_gpu() && self.is_idle(other);
        if let Some(victim) =
            self.least_recently_used(|other, loaded| idle(other, loaded) && !self.is_fresh(other, loaded, now))
        {
            return Ok(Some(Step::Evict(victim)));
        }
        // If the model fits the host, it is loaded there and does not wait for GPU memory.
        if auto && self.could_fit_host(model)? {
            return Ok(None);
        }
        let fresh = |other: &ModelId, loaded: &LoadedModel| idle(other, loaded) && self.is_fresh(other, loaded, now);
        if draining_here(false) || self.least_recently_used(fresh).is_some() {
            return Ok(Some(Step::Wait));
        }
        match self.least_recently_used(|_, loaded| loaded.is_on_gpu()) {
            Some(victim) => Ok(Some(Step::Evict(victim))),
            None => Ok(not_now(refused_now)),
        }
    }

    /// Estimate of the model on GPUs with `free` bytes each, or the reason why it does not fit. `Err` is the step that
    /// provides a missing estimate.
    pub(super) fn gpu_estimate(&self, model: &ModelId, free: Vec<u64>) -> Result<Result<MemoryEstimate, String>, Step> {
        match self.estimates.get(model).and_then(|known| known.gpus.get(&free)) {
            Some(fit) => Ok(fit.clone()),
            None => Err(Step::Ask(EstimateRequest::Gpus { free })),
        }
    }
}
