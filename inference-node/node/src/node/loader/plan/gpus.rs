//! Placement of the first waiting model on the GPUs, and evictions there.

use std::time::Instant;

use cfq_memory::MemoryEstimate;
use cfq_proto::model::ModelId;

use super::event::{EstimateRequest, LoadTarget};
use super::state::{LoaderState, ResidentModel};
use super::waiting::{LoadRefusal, PlacementStep};
use crate::gpu::DeviceChoice;
use crate::node::unusable::UnusableReason;

impl LoaderState {
    /// The next step for `model` on the GPUs; `None` if the model has to run on the host.
    pub(super) fn place_on_gpus(&self, model: &ModelId, now: Instant) -> Option<PlacementStep> {
        match &self.config.gpus {
            Ok(gpus) if gpus.is_empty() => None,
            Ok(_) => self.place_among_gpus(model, now).unwrap_or_else(Some),
            Err(reason) => Some(PlacementStep::Refuse(LoadRefusal::Permanent(reason.clone()))),
        }
    }

    /// The reason to refuse all models if the configured GPU cannot be used; else `None`.
    pub(super) fn unusable_device(&self) -> Option<LoadRefusal> {
        self.config.gpus.as_ref().err().cloned().map(LoadRefusal::Permanent)
    }

    /// Decides the next step on the GPUs: `Ok(None)` if the model has to run on the host; `Err` is a step that provides
    /// an estimate without which no decision is possible.
    fn place_among_gpus(&self, model: &ModelId, now: Instant) -> Result<Option<PlacementStep>, PlacementStep> {
        let auto = self.config.device == DeviceChoice::Auto;
        // Nothing is evicted for a model that does not fit even if no other model is loaded.
        let alone = match self.gpu_estimate(model, self.gpu_capacities())? {
            Ok(estimate) => estimate,
            Err(_) if auto => return Ok(None),
            Err(reason) => return Ok(Some(PlacementStep::Refuse(LoadRefusal::Permanent(reason)))),
        };
        let free = self.gpu_free_now();
        let reason_now = match self.gpu_estimate(model, free.clone())? {
            Ok(_) => {
                let target = LoadTarget::Gpus { free, sharers: 1 };
                return Ok(Some(PlacementStep::Load { host_bytes: self.free_bytes_now(), target }));
            }
            Err(reason) => reason,
        };
        let refuse_now = |reason| {
            let refusal = match reason {
                UnusableReason::TooLarge(shortage) => {
                    LoadRefusal::NotNow { device: self.gpu_ids(), estimate: Box::new(alone), shortage }
                }
                other => LoadRefusal::Permanent(other),
            };
            Some(PlacementStep::Refuse(refusal))
        };
        // Nothing is evicted either if the model would not fit even after all permitted evictions.
        if let Err(reason) = self.gpu_estimate(model, self.gpu_free_after_evictions())? {
            if auto && self.could_fit_host(model)? {
                return Ok(None);
            }
            return Ok(refuse_now(reason));
        }
        let unloading_here = |idle_only: bool| {
            self.unloading.iter().any(|(other, loaded)| loaded.is_on_gpu() && (!idle_only || self.is_idle(other)))
        };
        if unloading_here(true) {
            return Ok(Some(PlacementStep::Wait));
        }
        let idle = |other: &ModelId, loaded: &ResidentModel| loaded.is_on_gpu() && self.is_idle(other);
        let in_grace = |other: &ModelId, loaded: &ResidentModel| self.is_in_grace_period(other, loaded, now);
        if let Some(victim) = self.least_recently_used(|other, loaded| idle(other, loaded) && !in_grace(other, loaded))
        {
            return Ok(Some(PlacementStep::Evict(victim)));
        }
        // If the model fits the host, it is loaded there and does not wait for GPU memory.
        if auto && self.could_fit_host(model)? {
            return Ok(None);
        }
        let idle_in_grace = |other: &ModelId, loaded: &ResidentModel| idle(other, loaded) && in_grace(other, loaded);
        if unloading_here(false) || self.least_recently_used(idle_in_grace).is_some() {
            return Ok(Some(PlacementStep::Wait));
        }
        match self.least_recently_used(|_, loaded| loaded.is_on_gpu()) {
            Some(victim) => Ok(Some(PlacementStep::Evict(victim))),
            None => Ok(refuse_now(reason_now)),
        }
    }

    /// Estimate of the model on GPUs with `free` bytes each, or the reason why it cannot run there. `Err` is the step
    /// that provides a missing estimate.
    pub(super) fn gpu_estimate(
        &self,
        model: &ModelId,
        free: Vec<u64>,
    ) -> Result<Result<MemoryEstimate, UnusableReason>, PlacementStep> {
        match self.estimates.get(model).and_then(|known| known.gpus.get(&free)) {
            Some(fit) => Ok(fit.clone()),
            None => Err(PlacementStep::Estimate(EstimateRequest::Gpus { free })),
        }
    }
}
