//! `cfq engine check`: runs the engine's self-check on this machine's devices.

use cfq_engine::check::{CheckError, CheckOptions, CheckReport, check};
use cfq_engine::cuda::CudaUnavailable;
use nvml_wrapper::Nvml;

use crate::gpu::{self, DeviceChoice, open_gpus};

/// Why the self-check did not run.
#[derive(Debug, thiserror::Error)]
pub enum EngineCheckError {
    /// The chosen GPU cannot be used.
    #[error("cannot check the engine on {device}: {source}")]
    Device {
        /// The `--device` option.
        device: DeviceChoice,
        /// Why the GPU cannot be used.
        source: CudaUnavailable,
    },
    /// The self-check could not start.
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// Runs the self-check on `device`; `progress` is called with the name of each part as it starts.
///
/// # Errors
/// If the device cannot be used, or the check cannot write its test models. A failed comparison is not an error but
/// part of the report.
pub fn check_engine(
    device: DeviceChoice,
    quick: bool,
    progress: &mut dyn FnMut(&str),
) -> Result<CheckReport, EngineCheckError> {
    let mut not_run = Vec::new();
    let gpus = match device {
        DeviceChoice::Cpu => {
            not_run.push("anything on a GPU: the device is the CPU, which also ran the GPU forward pass".to_owned());
            Vec::new()
        }
        DeviceChoice::Cuda(_) => open_gpus(device).map_err(|source| EngineCheckError::Device { device, source })?,
        DeviceChoice::Auto => open_gpus(device).unwrap_or_else(|reason| {
            not_run.push(format!("anything on a GPU: {reason}"));
            Vec::new()
        }),
    };
    let cpu_name = gpu::inventory().devices.into_iter().next().map_or_else(String::new, |device| device.name);
    let options = CheckOptions {
        gpus,
        cpu_name,
        available_memory: gpu::available_memory(),
        nvml_used: &nvml_used,
        not_run,
        quick,
    };
    Ok(check(options, progress)?)
}

/// Used memory of the GPU with this UUID, in bytes.
fn nvml_used(uuid: &str) -> Option<u64> {
    let nvml = Nvml::init().ok()?;
    Some(nvml.device_by_uuid(uuid).ok()?.memory_info().ok()?.used)
}
