//! Handling of the outcomes of actions: loads, unloads and estimates.

use std::time::{Duration, Instant};

use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use super::event::{Estimate, LoadFailure, LoadedSize, LoaderAction, PublishedStatus};
use super::state::{CachedModel, LoadOrigin, LoaderState, ModelPhase, ResidentModel, StartModel};
use super::waiting::LoadRefusal;
use crate::node::unusable::UnusableReason;

/// Wait before an unload is retried if another thread holds the engine. Threads hold the engine while they admit a
/// sequence, run a chunk of speculative prefill, or read the engine's state for the ledger. They do not notify the
/// loader when they release the engine: a notification also sends a heartbeat, and the ledger is read often, but a read
/// rarely coincides with an unload.
const UNLOAD_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Interval of checks while models wait for memory. The checks are needed because no event reports that another program
/// has freed memory or that a grace period has ended.
pub(super) const WAITING_REPLAN_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum age of the value of free memory in the ledger.
const MAX_FREE_BYTES_AGE: Duration = Duration::from_secs(10);

impl LoaderState {
    pub(super) fn on_estimated(
        &mut self,
        model: ModelId,
        estimate: Estimate,
        now: Instant,
        actions: &mut Vec<LoaderAction>,
    ) {
        let known = self.estimates.entry(model.clone()).or_default();
        match estimate {
            Estimate::Host(estimate) => known.host = Some(Ok(estimate)),
            Estimate::HostUnusable { reason } => known.host = Some(Err(reason)),
            Estimate::NotInstalled => known.not_installed = true,
            Estimate::Gpus { free, fit } => {
                known.gpus.insert(free, fit);
            }
            Estimate::FetchFailed { reason } => {
                self.waiting.retain(|waiting| *waiting != model);
                self.refuse(&model, LoadRefusal::Permanent(reason), now, actions);
            }
        }
    }

    pub(super) fn on_load_finished(
        &mut self,
        model: &ModelId,
        result: Result<LoadedSize, LoadFailure>,
        now: Instant,
        actions: &mut Vec<LoaderAction>,
    ) {
        let Some(load) = self.loading.take_if(|load| load.model == *model) else { return };
        let failure = match result {
            Ok(LoadedSize { host_bytes, gpus }) => {
                // While cached weights occupy memory, the model may have got less than it will get at another load, so
                // a larger earlier value is kept.
                let last = self.last_bytes.get(model).copied().filter(|_| !self.cached.is_empty()).unwrap_or(0);
                self.last_bytes.insert(model.clone(), host_bytes.max(last));
                self.backoff.reset(model);
                self.unloaded.remove(model);
                let used_before = load.used_before;
                let loaded = ResidentModel { host_bytes, gpus, loaded_at: now, used_before, unload_retry_at: None };
                self.loaded.insert(model.clone(), loaded);
                actions.push(LoaderAction::SetStatus { model: model.clone(), status: PublishedStatus::Resident });
                return;
            }
            Err(failure) => failure,
        };
        let (device, estimate, shortage) = match self.refusal_of(failure) {
            LoadRefusal::NotNow { device, estimate, shortage } => (device, estimate, shortage),
            permanent @ LoadRefusal::Permanent(_) => return self.refuse(model, permanent, now, actions),
        };
        match load.origin {
            LoadOrigin::Start { may_retry: true } if self.observed.yielding => {
                // The yield began during the load. Nothing is loaded until it ends, so the model is put back and waits
                // like the other models that were still to be loaded.
                self.starting.push_front(StartModel { model: model.clone(), interrupted_loads: 0 });
                self.request_replan();
            }
            LoadOrigin::Start { may_retry: true } => {
                let target = self.start_target(1);
                let origin = LoadOrigin::Start { may_retry: false };
                self.begin_load(model.clone(), self.free_bytes_now(), target, origin, actions);
            }
            LoadOrigin::Start { may_retry: false } => {
                self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
                let state = self.state_on_disk(model, &device, &estimate);
                let status = PublishedStatus::OnDisk { state, shortage: Some(shortage) };
                actions.push(LoaderAction::SetStatus { model: model.clone(), status });
            }
            LoadOrigin::Requested => {
                self.refuse(model, LoadRefusal::NotNow { device, estimate, shortage }, now, actions);
            }
        }
    }

    /// Converts the failure of a load into a refusal: temporary if the model would fit once other models or programs
    /// free memory, else permanent.
    fn refusal_of(&self, failure: LoadFailure) -> LoadRefusal {
        match failure {
            LoadFailure::Permanent(reason) => LoadRefusal::Permanent(reason),
            LoadFailure::OutOfMemory { shortage, host: Some(estimate), .. }
                if estimate.total() <= self.config.host_bytes =>
            {
                LoadRefusal::NotNow { device: "cpu".to_owned(), estimate, shortage }
            }
            LoadFailure::OutOfMemory { shortage, gpus: Some(estimate), .. } => {
                LoadRefusal::NotNow { device: self.gpu_ids(), estimate, shortage }
            }
            LoadFailure::OutOfMemory { shortage, gpus: None, .. } => {
                LoadRefusal::Permanent(UnusableReason::TooLarge(shortage))
            }
        }
    }

    /// Publishes that the model is unusable, and starts its backoff if the load may be retried.
    pub(super) fn refuse(
        &mut self,
        model: &ModelId,
        refusal: LoadRefusal,
        now: Instant,
        actions: &mut Vec<LoaderAction>,
    ) {
        let reason = match refusal {
            LoadRefusal::NotNow { device, estimate, shortage } => {
                let state = self.state_on_disk(model, &device, &estimate);
                let retry_after = self.backoff.start(model, state, now);
                UnusableReason::OutOfMemory { shortage, retry_after }
            }
            LoadRefusal::Permanent(reason) => {
                self.backoff.reset(model);
                reason
            }
        };
        self.unloaded.insert(model.clone(), ModelPhase::Unusable);
        let status = PublishedStatus::Unusable(reason);
        actions.push(LoaderAction::SetStatus { model: model.clone(), status });
    }

    pub(super) fn on_unloaded(
        &mut self,
        model: &ModelId,
        state: ModelState,
        cached: Option<CachedModel>,
        actions: &mut Vec<LoaderAction>,
    ) {
        self.unloading.retain(|(unloading, _)| unloading != model);
        self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
        self.cached.extend(cached);
        while self.cached_bytes() > self.config.weight_cache_bytes
            && let Some(oldest) = self.cached.front().map(|cached| cached.model.clone())
        {
            self.drop_cached_weights(&oldest, actions);
        }
        // Last, so that the memory is free when the model is reported as unloaded.
        let status = PublishedStatus::OnDisk { state, shortage: None };
        actions.push(LoaderAction::SetStatus { model: model.clone(), status });
        self.request_replan();
    }

    pub(super) fn on_still_shared(&mut self, model: &ModelId, now: Instant) {
        for (_, loaded) in self.unloading.iter_mut().filter(|(unloading, _)| unloading == model) {
            loaded.unload_retry_at = Some(now + UNLOAD_RETRY_INTERVAL);
        }
    }

    /// Time at which the planner has to be called with [`super::LoaderEvent::Tick`] if no other event occurs before.
    pub fn next_wakeup(&self, now: Instant) -> Instant {
        let shared = self.unloading.iter().filter(|(model, _)| self.is_idle(model));
        let shared = shared.filter_map(|(_, loaded)| loaded.unload_retry_at);
        let waiting = (!self.waiting.is_empty() && !self.observed.yielding).then(|| self.next_replan_at.unwrap_or(now));
        let due = shared.chain(waiting).chain(self.backoff.next_due());
        due.min().map_or(now + MAX_FREE_BYTES_AGE, |due| due.min(now + MAX_FREE_BYTES_AGE))
    }
}
