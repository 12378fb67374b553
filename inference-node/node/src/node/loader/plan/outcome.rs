//! Handling of the outcomes of commands: loads, unloads and estimates.

use std::time::{Duration, Instant};

use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use super::event::{Command, Estimate, LoadFailure, LoadedSize, Status};
use super::state::{CachedModel, LoadOrigin, LoadedModel, LoaderState, ModelPhase};
use super::waiting::Refusal;

/// Wait before an unload is retried if another thread holds the engine. A thread holds it while it admits a sequence or
/// runs a chunk of speculative prefill, and releases it without a notification.
const SHARED_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Interval of checks while models wait for memory, since other programs free memory, and grace periods end, without an
/// event.
pub(super) const WAITING_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum age of the value of free memory in the ledger.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);

impl LoaderState {
    pub(super) fn on_estimated(
        &mut self,
        model: ModelId,
        estimate: Estimate,
        now: Instant,
        commands: &mut Vec<Command>,
    ) {
        let known = self.estimates.entry(model.clone()).or_default();
        match estimate {
            Estimate::Host(estimate) => known.host = Some(Ok(estimate)),
            Estimate::HostUnreadable { reason } => known.host = Some(Err(reason)),
            Estimate::NotInstalled => known.not_installed = true,
            Estimate::Gpus { free, fit } => {
                known.gpus.insert(free, fit);
            }
            Estimate::FetchFailed { reason } => {
                self.waiting.retain(|waiting| *waiting != model);
                self.refuse(&model, Refusal::Permanent { reason }, now, commands);
            }
        }
    }

    pub(super) fn on_load_finished(
        &mut self,
        model: &ModelId,
        result: Result<LoadedSize, LoadFailure>,
        now: Instant,
        commands: &mut Vec<Command>,
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
                let loaded = LoadedModel { host_bytes, gpus, loaded_at: now, used_before, unload_retry_at: None };
                self.loaded.insert(model.clone(), loaded);
                commands.push(Command::SetStatus { model: model.clone(), status: Status::Ready });
                return;
            }
            Err(failure) => failure,
        };
        let (device, estimate, reason) = match self.refusal_of(failure) {
            Refusal::NotNow { device, estimate, reason } => (device, estimate, reason),
            permanent @ Refusal::Permanent { .. } => return self.refuse(model, permanent, now, commands),
        };
        match load.origin {
            LoadOrigin::Start { may_retry: true } => {
                let target = self.start_target(1);
                let origin = LoadOrigin::Start { may_retry: false };
                self.begin_load(model.clone(), self.have(), target, origin, commands);
            }
            LoadOrigin::Start { may_retry: false } => {
                self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
                let state = self.state_on_disk(model, &device, &estimate);
                let status = Status::OnDisk { state, reason: Some(reason) };
                commands.push(Command::SetStatus { model: model.clone(), status });
            }
            LoadOrigin::Requested => {
                self.refuse(model, Refusal::NotNow { device, estimate, reason }, now, commands);
            }
        }
    }

    /// Converts the failure of a load into a refusal: temporary if the model would fit once other models or programs
    /// free memory, else permanent.
    fn refusal_of(&self, failure: LoadFailure) -> Refusal {
        match failure {
            LoadFailure::Permanent { reason } => Refusal::Permanent { reason },
            LoadFailure::OutOfMemory { reason, host: Some(estimate), .. }
                if estimate.total() <= self.config.host_bytes =>
            {
                Refusal::NotNow { device: "cpu".to_owned(), estimate: *estimate, reason }
            }
            LoadFailure::OutOfMemory { reason, gpus: Some(estimate), .. } => {
                Refusal::NotNow { device: self.gpu_ids(), estimate: *estimate, reason }
            }
            LoadFailure::OutOfMemory { reason, gpus: None, .. } => Refusal::Permanent { reason },
        }
    }

    /// Publishes that the model is unusable, and starts its backoff if the load may be retried.
    pub(super) fn refuse(&mut self, model: &ModelId, refusal: Refusal, now: Instant, commands: &mut Vec<Command>) {
        let status = match refusal {
            Refusal::NotNow { device, estimate, reason } => {
                let state = self.state_on_disk(model, &device, &estimate);
                let wait = self.backoff.start(model, state, now);
                let reason =
                    format!("{reason}. The load is retried at the first request after {} s", wait.as_secs().max(1));
                Status::Unusable { reason, permanent: false }
            }
            Refusal::Permanent { reason } => {
                self.backoff.reset(model);
                Status::Unusable { reason, permanent: true }
            }
        };
        self.unloaded.insert(model.clone(), ModelPhase::Unusable);
        commands.push(Command::SetStatus { model: model.clone(), status });
    }

    pub(super) fn on_unloaded(
        &mut self,
        model: &ModelId,
        state: ModelState,
        cached: Option<CachedModel>,
        commands: &mut Vec<Command>,
    ) {
        self.draining.retain(|(draining, _)| draining != model);
        self.unloaded.insert(model.clone(), ModelPhase::OnDisk);
        self.cached.extend(cached);
        while self.cached_bytes() > self.config.weight_cache_bytes
            && let Some(oldest) = self.cached.front().map(|cached| cached.model.clone())
        {
            self.drop_cached_weights(&oldest, commands);
        }
        // Last, so that the memory is free when the model is reported as unloaded.
        commands.push(Command::SetStatus { model: model.clone(), status: Status::OnDisk { state, reason: None } });
        self.begin_round();
    }

    pub(super) fn on_still_shared(&mut self, model: &ModelId, now: Instant) {
        for (_, loaded) in self.draining.iter_mut().filter(|(draining, _)| draining == model) {
            loaded.unload_retry_at = Some(now + SHARED_RETRY_INTERVAL);
        }
    }

    /// Time at which the planner has to be called with [`super::Event::Tick`] if no other event occurs before.
    pub fn next_wakeup(&self, now: Instant) -> Instant {
        let shared = self.draining.iter().filter(|(model, _)| self.is_idle(model));
        let shared = shared.filter_map(|(_, loaded)| loaded.unload_retry_at);
        let waiting = (!self.waiting.is_empty() && !self.observed.yielding).then(|| self.next_round_at.unwrap_or(now));
        let due = shared.chain(waiting).chain(self.backoff.next_due());
        due.min().map_or(now + SAMPLE_INTERVAL, |due| due.min(now + SAMPLE_INTERVAL))
    }
}
