//! Compares the memory estimate of a model load with the memory that the load took.
//!
//! On a GPU, the driver and (if available) NVML are read before and after the load. Both count the memory of all
//! processes, so no other program may start or end on the GPU meanwhile. On the CPU, the resident memory of this
//! process is read; it may still contain pages that an earlier model freed, so small models may seem to take no memory.

use std::path::Path;

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;
use schemars::JsonSchema;
use serde::Serialize;

use crate::backend::cuda::{Gpu, memory};
use crate::check::{CheckTarget, NotRun, shapes, with_file};
use crate::load_error::EngineLimits;
use crate::local_engine::LocalEngine;

/// Estimated and measured memory of one load.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct MemoryRow {
    /// The loaded model.
    pub model: String,
    /// The memory estimate, term by term.
    pub estimate: String,
    /// Bytes predicted to be allocated by the load: weights, tables and, on a GPU, the KV pool. On the CPU, KV blocks
    /// are allocated only at their first use, after the load.
    pub predicted_bytes: u64,
    /// Increase of the used memory, in bytes.
    pub measured_bytes: u64,
    /// Source of the measurement: `driver`, `nvml` or `process`.
    pub measured_by: &'static str,
    /// Largest difference that passes, in bytes; `None` if the row is only reported and cannot fail. Only rows measured
    /// by the driver can fail: NVML also counts memory that the process pools for later passes, and the resident memory
    /// of the process may include pages of an earlier model.
    pub allowed_bytes: Option<u64>,
}

impl MemoryRow {
    pub(super) fn new(
        model: &str,
        estimate: String,
        predicted_bytes: u64,
        measured_bytes: u64,
        measured_by: &'static str,
    ) -> Self {
        let allowed_bytes = (measured_by == MEASURED_BY_DRIVER).then_some(predicted_bytes / 10 + (64 << 20));
        Self { model: model.to_owned(), estimate, predicted_bytes, measured_bytes, measured_by, allowed_bytes }
    }

    /// Whether the difference exceeds the allowed one.
    pub fn failed(&self) -> bool {
        self.allowed_bytes.is_some_and(|allowed| self.predicted_bytes.abs_diff(self.measured_bytes) > allowed)
    }

    /// Predicted and measured memory as text.
    pub fn summary(&self) -> String {
        let (predicted, measured) = (Bytes(self.predicted_bytes), Bytes(self.measured_bytes));
        format!("predicted {predicted}, measured {measured} ({})", self.measured_by)
    }
}

/// Value of [`MemoryRow::measured_by`] for measurements by the GPU driver.
const MEASURED_BY_DRIVER: &str = "driver";

/// Loads the models of [`shapes::sizes`] and compares the estimated with the measured memory of each.
pub fn check(
    target: &CheckTarget,
    quick: bool,
    nvml_used: &dyn Fn(&str) -> Option<u64>,
    folder: &Path,
    progress: &mut dyn FnMut(&str),
    not_run: &mut dyn FnMut(String, NotRun),
) -> Vec<MemoryRow> {
    let mut rows = Vec::new();
    for (name, shape) in shapes::sizes(quick) {
        progress(&format!("memory of {name}"));
        let done = with_file(&shape, folder, |path| match target {
            CheckTarget::Cpu { available_memory } => on_cpu(name, path, *available_memory),
            CheckTarget::Gpu(gpu) => on_gpu(name, path, gpu, nvml_used),
        });
        match done {
            Ok(found) => rows.extend(found),
            Err(reason) => not_run(format!("memory of {name}"), reason),
        }
    }
    rows
}

/// Maximum batch size of the loaded models.
const MAX_SEQUENCES: u32 = 8;

fn on_gpu(
    name: &str,
    path: &Path,
    gpu: &Gpu,
    nvml_used: &dyn Fn(&str) -> Option<u64>,
) -> Result<Vec<MemoryRow>, NotRun> {
    let driver = || {
        // Memory is freed asynchronously; waits until that is done.
        gpu.device.synchronize().ok()?;
        memory(&gpu.device).map(|(free, total)| total.saturating_sub(free))
    };
    let meters: [(&'static str, &dyn Fn() -> Option<u64>); 2] =
        [(MEASURED_BY_DRIVER, &driver), ("nvml", &|| nvml_used(gpu.uuid.as_deref()?))];
    let before = meters.map(|(by, read)| (by, read, read()));
    let limits = EngineLimits { memory_bytes: u64::MAX, max_sequences: MAX_SEQUENCES };
    let model = "path:check".parse::<ModelId>().map_err(|error| NotRun::Failed(error.to_string()))?;
    let engine = LocalEngine::builder(model, path)
        .limits(limits)
        .load_on_gpus(std::slice::from_ref(gpu), 1)
        .map_err(|error| NotRun::from_load_error(&error))?;
    let row = |(by, read, before): (&'static str, &dyn Fn() -> Option<u64>, Option<u64>)| {
        let measured = read()?.saturating_sub(before?);
        let (estimate, predicted) = (engine.estimate().to_string(), engine.estimate().resident());
        Some(MemoryRow::new(name, estimate, predicted, measured, by))
    };
    let rows: Vec<MemoryRow> = before.into_iter().filter_map(row).collect();
    match rows.iter().any(|row| row.allowed_bytes.is_some()) {
        true => Ok(rows),
        false => Err(NotRun::Skipped("the driver does not report free memory".to_owned())),
    }
}

fn on_cpu(name: &str, path: &Path, available_memory: u64) -> Result<Vec<MemoryRow>, NotRun> {
    let unknown = || NotRun::Skipped("this system does not report the resident memory of a process".to_owned());
    let before = resident().ok_or_else(unknown)?;
    let limits = EngineLimits { memory_bytes: available_memory, max_sequences: MAX_SEQUENCES };
    let model = "path:check".parse::<ModelId>().map_err(|error| NotRun::Failed(error.to_string()))?;
    let loaded = LocalEngine::builder(model, path).limits(limits).load();
    let engine = loaded.map_err(|error| NotRun::from_load_error(&error))?;
    let measured = resident().unwrap_or(before).saturating_sub(before);
    let estimate = engine.estimate();
    // KV blocks are allocated on first use, and no prompt has run yet.
    let predicted = estimate.with_kv_tokens(0).resident();
    Ok(vec![MemoryRow::new(name, estimate.to_string(), predicted, measured, "process")])
}

/// Resident memory of this process, in bytes.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
