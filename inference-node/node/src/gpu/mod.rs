//! Inventory of the devices that models can run on: NVIDIA GPUs as NVML reports them, and always the CPU.
//!
//! A query never fails: a missing driver, an old driver, and a lost GPU (fallen off the bus) are reported as results. A
//! GPU that does not answer is left out of the devices and reported as a problem; the others are used.

mod device_choice;
mod device_index;
mod host;
mod nvml;

use cfq_proto::node::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

pub use device_choice::{DeviceChoice, InvalidDevice, open_gpus, usable_uuids};
pub use host::{anonymous_memory, available_memory, trim_heap};
pub use nvml::describe as describe_gpu;

/// Value of [`DeviceProblem::device`] for a problem that affects all GPUs.
pub const DRIVER_PROBLEM_DEVICE: &str = "driver";

/// The devices of this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Inventory {
    /// The CPU, followed by the GPUs.
    pub devices: Vec<Device>,
    /// Summary in one line for users: the GPUs, or why none is used.
    pub summary: String,
    /// Version of the NVIDIA driver, if one answers.
    pub driver_version: Option<String>,
    /// Problems of devices that exist but cannot be used.
    pub problems: Vec<DeviceProblem>,
}

/// A problem that makes one GPU, or all GPUs of the driver, unusable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProblem {
    /// Id of the GPU, as `cuda:1`, or [`DRIVER_PROBLEM_DEVICE`].
    pub device: String,
    /// The problem, as a clause that follows `device` and a colon in messages.
    pub problem: String,
    /// Next step for the user, as text.
    pub next_step: String,
}

/// Whether this build can run models on GPUs.
pub fn supports_gpus() -> bool {
    cfg!(feature = "cuda")
}

/// A clause for messages that says whether this build runs models on GPUs.
pub fn gpu_support_text() -> &'static str {
    if supports_gpus() {
        "this build runs models on them where device allows it (`cfq engine check` tests them)"
    } else {
        "this build runs models on the CPU (docs/how-to/run-on-an-nvidia-gpu.md describes how to build one for GPUs)"
    }
}

/// Queries the driver for the devices of this machine. Takes milliseconds.
pub fn inventory() -> Inventory {
    let mut devices = vec![host::device()];
    let (mut driver_version, mut problems) = (None, Vec::new());
    let summary = match Nvml::init() {
        Ok(nvml) => {
            driver_version = nvml.sys_driver_version().ok();
            match read_gpus(&nvml, &mut problems) {
                Ok(gpus) => {
                    let summary = summarize(&gpus, &problems);
                    devices.extend(gpus);
                    summary
                }
                Err(error) => add_driver_problem(&error, &mut problems),
            }
        }
        Err(NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound) => {
            "no NVIDIA driver: models run on the CPU".to_owned()
        }
        Err(error) => add_driver_problem(&error, &mut problems),
    };
    Inventory { devices, summary, driver_version, problems }
}

/// Key of a device in [`crate::models::LoadMeasurements`]: the UUID of a GPU, because the GPU in a slot may be
/// replaced, or the id of a device without a known UUID (the CPU, a MIG slice, a GPU without NVML).
pub fn measurement_key(id: &str, uuid: Option<&str>) -> String {
    uuid.unwrap_or(id).to_owned()
}

/// NVML's index and UUID of every GPU that reports both; empty if NVML does not answer.
pub(crate) fn uuids() -> Vec<(usize, String)> {
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let of = |index: u32| Some((usize::try_from(index).ok()?, nvml.device_by_index(index).ok()?.uuid().ok()?));
    (0..nvml.device_count().unwrap_or(0)).filter_map(of).collect()
}

fn read_gpus(nvml: &Nvml, problems: &mut Vec<DeviceProblem>) -> Result<Vec<Device>, NvmlError> {
    let mut found = Vec::new();
    for index in 0..nvml.device_count()? {
        match nvml::read(nvml, index) {
            Ok(gpu) => found.push(gpu),
            Err(error) => problems.push(nvml::problem(index, &error)),
        }
    }
    Ok(found)
}

fn summarize(gpus: &[Device], problems: &[DeviceProblem]) -> String {
    let lost: Vec<String> = problems.iter().map(|p| format!("{}: {}", p.device, p.problem)).collect();
    let lost = lost.join("; ");
    match (gpus.is_empty(), lost.is_empty()) {
        (true, true) => "an NVIDIA driver but no GPU: models run on the CPU".to_owned(),
        (true, false) => format!("{lost}; models run on the CPU"),
        (false, _) => {
            let named: Vec<String> =
                gpus.iter().map(|d| format!("{} {} ({})", d.id, d.name, nvml::describe(d))).collect();
            let lost = if lost.is_empty() { lost } else { format!("; {lost}") };
            format!("{}{lost}: {}", named.join(", "), gpu_support_text())
        }
    }
}

/// Adds the problem of a driver whose library is installed but cannot be used. Returns the text for
/// [`Inventory::summary`].
fn add_driver_problem(error: &NvmlError, problems: &mut Vec<DeviceProblem>) -> String {
    let (problem, next_step) = match error {
        NvmlError::LibRmVersionMismatch => (
            format!(
                "the NVIDIA library is of another version than the driver in the kernel{}",
                kernel_driver_version().map_or_else(String::new, |version| format!(" ({version})"))
            ),
            "restart the machine: the driver was updated and the old one is still loaded",
        ),
        NvmlError::DriverNotLoaded => (
            "the NVIDIA library is installed, but its driver is not loaded".to_owned(),
            "load it (modprobe nvidia), or install the driver for this kernel",
        ),
        NvmlError::NoPermission => (
            "this user has no permission to query the NVIDIA driver".to_owned(),
            "grant read and write access to /dev/nvidia*",
        ),
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            ("the NVIDIA driver is too old".to_owned(), "install version 510 or newer")
        }
        error => (format!("the NVIDIA driver does not answer ({error})"), "check what nvidia-smi reports"),
    };
    let summary = format!("{problem}: models run on the CPU");
    problems.push(DeviceProblem { device: DRIVER_PROBLEM_DEVICE.to_owned(), problem, next_step: next_step.to_owned() });
    summary
}

/// Version of the driver that the kernel has loaded.
fn kernel_driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::node::DeviceKind;

    #[test]
    fn inventory_always_has_the_cpu_and_a_summary() {
        let found = inventory();
        assert_eq!(found.devices[0].kind, DeviceKind::Cpu);
        assert!(found.devices[0].memory_total > 0);
        assert!(found.summary.contains("CPU"), "{}", found.summary);
    }

    #[test]
    fn summary_states_what_this_build_uses_gpus_for() {
        let mut gpu = host::device();
        (gpu.id, gpu.kind) = ("cuda:0".to_owned(), DeviceKind::Cuda);
        let summary = summarize(&[gpu], &[]);
        assert!(summary.starts_with("cuda:0 ") && summary.ends_with(gpu_support_text()), "{summary}");
        assert_eq!(gpu_support_text().contains("on the CPU"), !cfg!(feature = "cuda"));
        assert!(summarize(&[], &[]).ends_with("models run on the CPU"));
    }

    #[test]
    fn driver_problem_has_a_reason_and_a_next_step() {
        for (error, word, step) in [
            (NvmlError::LibRmVersionMismatch, "another version", "restart"),
            (NvmlError::DriverNotLoaded, "not loaded", "modprobe"),
            (NvmlError::NoPermission, "no permission", "/dev/nvidia"),
            (NvmlError::Unknown, "does not answer", "nvidia-smi"),
        ] {
            let mut problems = Vec::new();
            let summary = add_driver_problem(&error, &mut problems);
            assert!(summary.contains(word) && summary.ends_with("models run on the CPU"), "{summary}");
            assert!(problems[0].next_step.contains(step), "{problems:?}");
        }
    }
}
