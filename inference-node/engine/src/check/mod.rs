//! The engine's self-check on this machine's devices: `cfq engine check`.
//!
//! It needs only the program: no fixtures, no network, no Rust. The models have random weights and are written to a
//! temporary folder. There are no reference results for them, so the check compares the logits of the GPU forward pass
//! with those of the CPU forward pass; the tests of this crate compare with Hugging Face transformers. The check passes
//! if all comparisons pass, if every model that fits loads and runs, and if on a GPU the memory estimate is within its
//! tolerance. Speed is only reported.

mod batching;
mod memory;
mod parity;
mod shapes;
mod speed;

use std::path::{Path, PathBuf};

use candle_core::Device;
use schemars::JsonSchema;
use serde::Serialize;

use crate::backend::cuda::{Gpu, is_out_of_memory};
pub use crate::check::memory::MemoryRow;
pub use crate::check::parity::ParityRow;
pub use crate::check::speed::{DecodeRow, PrefillRow, SpeedRow};
use crate::load_error::LoadError;

/// Options of the self-check.
pub struct CheckOptions<'a> {
    /// The GPUs to check, already opened; if empty, the CPU is checked.
    pub gpus: Vec<Gpu>,
    /// Name of the processor, for the report.
    pub cpu_name: String,
    /// Host memory that the models of the check may take, in bytes.
    pub available_memory: u64,
    /// Function that returns the used memory of the GPU with the given UUID, as NVML reports it, in bytes.
    pub nvml_used: &'a dyn Fn(&str) -> Option<u64>,
    /// Parts of the check that the caller had to leave out, with the reason.
    pub not_run: Vec<String>,
    /// Whether to use small models only, which takes seconds instead of minutes.
    pub quick: bool,
}

/// Results of the self-check.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct CheckReport {
    /// `cpu`, or the GPU's id, for example `cuda:0`.
    pub device: String,
    /// Name of the device.
    pub name: String,
    /// Whether this program was built with GPU support.
    pub built_for_cuda: bool,
    /// Bandwidth of a copy within the device's memory, in bytes per second; bytes read and bytes written both count.
    pub bandwidth: f64,
    /// Results of comparing logits and texts.
    pub parity: Vec<ParityRow>,
    /// Memory estimates and measurements.
    pub memory: Vec<MemoryRow>,
    /// Measured prefill and decode rates.
    pub speed: Vec<SpeedRow>,
    /// Parts that were skipped, with the reason.
    pub not_run: Vec<String>,
    /// Parts that failed before they had a row in `parity`, `memory` or `speed`, with the reason.
    pub failures: Vec<String>,
}

impl CheckReport {
    /// Whether something was compared and nothing failed.
    pub fn passed(&self) -> bool {
        !self.parity.is_empty() && self.failed() == 0
    }

    /// Number of failed rows and parts.
    pub fn failed(&self) -> usize {
        let parity = self.parity.iter().filter(|row| !row.passed).count();
        parity + self.memory.iter().filter(|row| row.failed()).count() + self.failures.len()
    }
}

/// Why the self-check could not start.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The random models cannot be written.
    #[error("cannot write a model of random weights into {folder}: {reason}")]
    Write {
        /// The temporary folder.
        folder: PathBuf,
        /// The operating system's error.
        reason: String,
    },
}

/// The device that is checked.
pub(super) enum CheckTarget {
    Cpu { available_memory: u64 },
    Gpu(Gpu),
}

impl CheckTarget {
    fn device(&self) -> Device {
        match self {
            Self::Cpu { .. } => Device::Cpu,
            Self::Gpu(gpu) => gpu.device.clone(),
        }
    }

    /// The target as a GPU. For the CPU, this is candle's CPU device, on which the GPU forward pass also runs.
    fn gpu(&self) -> Gpu {
        match self {
            Self::Cpu { available_memory } => Gpu {
                index: 0,
                name: "the CPU as a GPU".to_owned(),
                uuid: None,
                device: Device::Cpu,
                free_bytes: *available_memory,
                bandwidth: 1.0,
                overhead_per_mille: 0,
            },
            Self::Gpu(gpu) => gpu.clone(),
        }
    }
}

/// Why a part of the check has no result.
enum NotRun {
    /// The part cannot run on this machine, for example because a model does not fit; the check does not fail.
    Skipped(String),
    /// The part failed, and so does the check.
    Failed(String),
}

impl NotRun {
    fn into_reason(self) -> String {
        match self {
            Self::Skipped(reason) | Self::Failed(reason) => reason,
        }
    }

    fn from_load_error(error: &LoadError) -> Self {
        let reason = match std::error::Error::source(error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        };
        match error {
            LoadError::DoesNotFit { .. } | LoadError::DoesNotFitGpus { .. } => Self::Skipped(reason),
            // If GPU memory runs out during a load, the estimate was wrong.
            LoadError::GpuMemoryExhausted { .. }
            | LoadError::Header(_)
            | LoadError::Weights { .. }
            | LoadError::CpuOnly { .. }
            | LoadError::Thread(_) => Self::Failed(reason),
        }
    }

    fn from_pass_error(error: &candle_core::Error) -> Self {
        if is_out_of_memory(error) { Self::Skipped(error.to_string()) } else { Self::Failed(error.to_string()) }
    }

    /// Adds the reason to `not_run` or to `failures`.
    fn record(self, what: &str, not_run: &mut Vec<String>, failures: &mut Vec<String>) {
        match self {
            Self::Skipped(reason) => not_run.push(format!("{what}: {reason}")),
            Self::Failed(reason) => failures.push(format!("{what}: {reason}")),
        }
    }
}

/// Parts of the engine that the self-check does not cover, with the reason.
const NOT_COVERED: [&str; 2] = [
    "top-k expert routing and RoPE scaling: rounding may choose other experts, and the test prompts are short",
    "safetensors, the tokenizers of real models, StarCoder2 and OLMo 2: not part of this check",
];

/// Runs the self-check; `progress` receives the name of each part as it starts. Takes seconds if quick, else minutes.
///
/// # Errors
/// [`CheckError::Write`] if the random models cannot be written. A failed comparison is part of the report.
pub fn check(options: CheckOptions<'_>, progress: &mut dyn FnMut(&str)) -> Result<CheckReport, CheckError> {
    let CheckOptions { gpus: mut found, cpu_name, available_memory, nvml_used, mut not_run, quick } = options;
    let mut several: Vec<Device> = found.iter().map(|gpu| gpu.device.clone()).collect();
    let target =
        if found.is_empty() { CheckTarget::Cpu { available_memory } } else { CheckTarget::Gpu(found.remove(0)) };
    if several.len() < 2 {
        several = vec![target.device(); 2];
        if matches!(target, CheckTarget::Gpu(_)) {
            not_run.push("layers split over several GPUs: there is one GPU, which was used as two devices".to_owned());
        }
    }
    if !found.is_empty() {
        let others: Vec<String> = found.iter().map(Gpu::id).collect();
        not_run.push(format!(
            "{}: only the layer split was checked; run with --device {} to check a GPU fully",
            others.join(", "),
            others[0]
        ));
    }
    let folder = TemporaryFolder::new()?;
    progress("memory bandwidth");
    let (device, name, bandwidth) = match &target {
        CheckTarget::Cpu { .. } => ("cpu".to_owned(), cpu_name, speed::host_bandwidth()),
        CheckTarget::Gpu(gpu) => (gpu.id(), gpu.name.clone(), gpu.bandwidth),
    };
    let mut failures = Vec::new();
    let mut parity = parity::check(&target, &several, &folder.path, progress);
    parity.extend(batching::check(&target, &folder.path, progress));
    let mut record = |what: String, reason: NotRun| reason.record(&what, &mut not_run, &mut failures);
    let memory = memory::check(&target, quick, nvml_used, &folder.path, progress, &mut record);
    let speed = speed::check(&target, quick, bandwidth, &folder.path, progress, &mut record);
    if quick {
        not_run.push("models of realistic size: --quick skips the shapes of 1.5 B and 7 B".to_owned());
    }
    not_run.extend(NOT_COVERED.map(str::to_owned));
    let built_for_cuda = cfg!(feature = "cuda");
    Ok(CheckReport { device, name, built_for_cuda, bandwidth, parity, memory, speed, not_run, failures })
}

/// A temporary folder, removed when dropped.
struct TemporaryFolder {
    path: PathBuf,
}

impl TemporaryFolder {
    fn new() -> Result<Self, CheckError> {
        let path = std::env::temp_dir().join(format!("cfq-check-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| CheckError::Write { folder: path.clone(), reason: error.to_string() })?;
        Ok(Self { path })
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // If this fails, the files are left to the system's cleanup of temporary files.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Writes a model file of this shape, calls `work` with its path and removes the file.
fn with_file<T>(
    shape: &crate::model::random::RandomFile,
    folder: &Path,
    work: impl FnOnce(&Path) -> Result<T, NotRun>,
) -> Result<T, NotRun> {
    let path = folder.join("model.gguf");
    let done = match shape.write(&path) {
        Ok(()) => work(&path),
        Err(error) => Err(NotRun::Skipped(format!("cannot write the model into {}: {error}", folder.display()))),
    };
    let _ = std::fs::remove_file(&path);
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passing_report() -> CheckReport {
        let parity = vec![ParityRow::new("a model".to_owned(), 0.1, Ok(0.0))];
        CheckReport {
            device: "cuda:0".to_owned(),
            name: "a GPU".to_owned(),
            built_for_cuda: true,
            bandwidth: 1.0,
            parity,
            memory: Vec::new(),
            speed: Vec::new(),
            not_run: Vec::new(),
            failures: Vec::new(),
        }
    }

    #[test]
    fn failures_fail_the_check_and_skipped_parts_do_not() {
        let mut report = passing_report();
        assert!(report.passed());
        let full = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".to_owned());
        NotRun::from_pass_error(&full).record("speed of 7 B", &mut report.not_run, &mut report.failures);
        assert!(report.passed() && report.not_run.len() == 1);
        let lost = candle_core::Error::Msg("DriverError(CUDA_ERROR_LAUNCH_FAILED, \"x\")".to_owned());
        NotRun::from_pass_error(&lost).record("speed of 7 B", &mut report.not_run, &mut report.failures);
        assert_eq!((report.passed(), report.failed()), (false, 1));
        assert!(!CheckReport { parity: Vec::new(), ..passing_report() }.passed(), "nothing was compared");
        let wrong = ParityRow::new("a model".to_owned(), 0.1, Ok(0.2));
        assert!(!CheckReport { parity: vec![wrong], ..passing_report() }.passed());
    }

    #[test]
    fn memory_estimate_far_from_the_drivers_count_fails_the_check() {
        let row = |by, predicted: u64, measured: u64| MemoryRow::new("a model", String::new(), predicted, measured, by);
        let passes = |row: MemoryRow| CheckReport { memory: vec![row], ..passing_report() }.passed();
        let (gib, mib) = (1 << 30, 1 << 20);
        assert!(passes(row("driver", 10 * gib, 11 * gib + 60 * mib)) && passes(row("driver", 10 * gib, 9 * gib)));
        assert!(!passes(row("driver", 10 * gib, 11 * gib + 70 * mib)) && !passes(row("driver", 10 * gib, 8 * gib)));
        // These measurements include the memory of other programs, and memory pooled for later.
        assert!(passes(row("nvml", gib, 3 * gib)) && passes(row("process", gib, 0)));
    }
}
