//! Memory estimates for the planner, from the headers of model files.

use std::path::{Path, PathBuf};

use cfq_engine::cuda::{Gpu, estimate_on_gpus};
use cfq_engine::{EngineLimits, FileStamp, LoadError, estimate_memory};
use cfq_memory::MemoryEstimate;
use cfq_proto::model::{ModelId, ModelSource};

use super::Loader;
use super::load::{measurement_key, unusable_reason};
use super::plan::event::{Estimate, EstimateRequest};
use super::plan::host_estimate::HostEstimate;
use crate::models::{InstallState, LoadMeasurements, MeasuredLoad};
use crate::node::error::with_causes;
use crate::node::unusable::UnusableReason;

/// Derives a [`HostEstimate`] from two calls of `fit`, which returns the memory estimate for a number of available
/// bytes: 0 for the estimate with the smallest KV pool, and the maximum for the size of the largest pool.
pub(super) fn host_estimate(fit: impl Fn(u64) -> Result<MemoryEstimate, LoadError>) -> Result<HostEstimate, LoadError> {
    let (path, smallest) = match fit(0) {
        Err(LoadError::DoesNotFit { path, source }) => (path, source.estimate),
        Err(error) => return Err(error),
        Ok(nothing) => (PathBuf::new(), nothing),
    };
    let max_kv_tokens = fit(u64::MAX).map_or(smallest.kv_tokens, |largest| largest.kv_tokens);
    Ok(HostEstimate { path, smallest, max_kv_tokens })
}

impl Loader {
    pub(super) fn estimate(&mut self, model: &ModelId, request: EstimateRequest) -> Estimate {
        let may_fetch = match request {
            EstimateRequest::Host { may_fetch } => may_fetch,
            EstimateRequest::Gpus { .. } => true,
        };
        let path = match self.installed_path(model) {
            Some(path) => path,
            None if may_fetch => match self.fetch(model) {
                // The lock on the file is released here; the load takes it again.
                Ok(held) => held.path.clone(),
                Err(reason) => return Estimate::FetchFailed { reason },
            },
            None => return Estimate::NotInstalled,
        };
        if let Err(reason) = self.inspect(model, &path) {
            return match request {
                EstimateRequest::Host { .. } => Estimate::HostUnusable { reason },
                EstimateRequest::Gpus { free } => Estimate::Gpus { free, fit: Err(reason) },
            };
        }
        match request {
            EstimateRequest::Host { .. } => {
                let overhead = self.host_overhead(model);
                match host_estimate(|memory| estimate_memory(&path, self.limits(memory), overhead)) {
                    Ok(estimate) => Estimate::Host(estimate),
                    Err(error) => Estimate::HostUnusable { reason: unusable_reason(model, &error) },
                }
            }
            EstimateRequest::Gpus { free } => {
                let gpus = self.gpus_with(model, &free);
                let fit = estimate_on_gpus(&path, &gpus, self.limits(0));
                let fit = fit.map_err(|error| unusable_reason(model, &error));
                Estimate::Gpus { free, fit }
            }
        }
    }

    /// Reads the model's file in a child process, before this process reads its header. Does nothing if the same file
    /// was already read.
    fn inspect(&mut self, model: &ModelId, path: &Path) -> Result<(), UnusableReason> {
        let Some(sandbox) = &self.config.sandbox else { return Ok(()) };
        let stamp = FileStamp::of(path);
        if stamp.is_some() && self.inspected.get(model) == stamp.as_ref() {
            return Ok(());
        }
        sandbox.inspect(path).map_err(|error| UnusableReason::of_sandbox(model, path, &error))?;
        if let Some(stamp) = stamp {
            self.inspected.insert(model.clone(), stamp);
        }
        Ok(())
    }

    pub(super) fn limits(&self, memory: u64) -> EngineLimits {
        EngineLimits { memory_bytes: memory, max_sequences: self.config.max_sequences }
    }

    /// Path of the model's file; `None` if the model has to be fetched first.
    fn installed_path(&self, model: &ModelId) -> Option<PathBuf> {
        match model.source() {
            ModelSource::Path(path) => Some(path),
            _ => {
                let installed = self.store.show(model).ok()?;
                // Unfinished models are excluded: their path is the folder of the partial download.
                (installed.state == InstallState::Complete).then_some(installed.path)
            }
        }
    }

    /// Memory estimate on the GPUs as if no other model were loaded there; `None` if there is no GPU, if the model is
    /// not installed, or if it would not fit even then.
    pub(super) fn estimate_alone_on_gpus(&self, model: &ModelId) -> Option<MemoryEstimate> {
        if self.gpus.is_empty() {
            return None;
        }
        let capacities: Vec<u64> = self.gpus.iter().map(|gpu| gpu.free_bytes).collect();
        let path = self.installed_path(model)?;
        estimate_on_gpus(&path, &self.gpus_with(model, &capacities), self.limits(0)).ok()
    }

    /// Measured overhead of earlier loads on the host, in per mille of the prediction.
    pub(super) fn host_overhead(&self, model: &ModelId) -> u64 {
        self.measured(model).and_then(|measured| measured.on_device("cpu")).map_or(0, MeasuredLoad::overhead_per_mille)
    }

    /// Returns copies of the GPUs for an estimate of this model: their free memory is set to `free` (bytes of each
    /// GPU), and their overhead to that measured in earlier loads of the model.
    pub(super) fn gpus_with(&self, model: &ModelId, free: &[u64]) -> Vec<Gpu> {
        let measured = self.measured(model);
        let with = |(gpu, free): (&Gpu, &u64)| {
            let took = measured.as_ref().and_then(|measured| measured.on_device(&measurement_key(gpu)));
            Gpu {
                free_bytes: *free,
                overhead_per_mille: took.map_or(0, MeasuredLoad::overhead_per_mille),
                ..gpu.clone()
            }
        };
        self.gpus.iter().zip(free).map(with).collect()
    }

    /// Measured memory of earlier loads of the model; `None` if there are no measurements.
    pub(super) fn measured(&self, model: &ModelId) -> Option<LoadMeasurements> {
        self.store.load_measurements(model).unwrap_or_else(|error| {
            tracing::warn!(%model, reason = with_causes(&error), "measurements of earlier loads are not used");
            None
        })
    }
}
