//! Reading of one GPU through NVML.
//!
//! Name and memory are required; other values are omitted if the GPU or the driver does not support them, as laptops
//! and older GPUs do not. A lost GPU returns an error for every query and is then not reported as a device.

use std::fs;

use cfq_memory::Bytes;
use cfq_proto::node::{Device, DeviceKind, DeviceProcess};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::DeviceProblem;

/// Reads the GPU with this NVML index.
///
/// # Errors
/// If the GPU is lost, or does not report its name or memory.
pub fn read(nvml: &Nvml, index: u32) -> Result<Device, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let capability = optional(device.cuda_compute_capability())?.map(|c| format!("{}.{}", c.major, c.minor));
    let mut processes = optional(device.running_compute_processes())?.unwrap_or_default();
    processes.extend(optional(device.running_graphics_processes())?.unwrap_or_default());
    let processes = merge_processes(&processes);
    let own: u64 = processes.iter().filter(|p| p.own).filter_map(|p| p.memory).sum();
    Ok(Device {
        id: id(index),
        kind: DeviceKind::Cuda,
        name: device.name()?,
        memory_total: memory.total,
        // The driver's own memory counts as memory of others, because models cannot use it.
        memory_others: memory.total.saturating_sub(memory.free).saturating_sub(own),
        compute_capability: capability,
        temperature_c: optional(device.temperature(TemperatureSensor::Gpu))?,
        power_mw: optional(device.power_usage())?,
        power_limit_mw: optional(device.enforced_power_limit())?,
        uuid: optional(device.uuid())?,
        throttled: optional(device.current_throttle_reasons())?.map(throttle_reasons).unwrap_or_default(),
        processes,
    })
}

fn id(index: u32) -> String {
    format!("cuda:{index}")
}

/// Returns `None` if this GPU or driver does not support the query. A lost GPU remains an error.
fn optional<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error @ (NvmlError::GpuLost | NvmlError::ResetRequired)) => Err(error),
        Err(error) => {
            tracing::trace!(%error, "nvml query is not supported");
            Ok(None)
        }
    }
}

/// Describes the problem of a GPU that NVML lists but cannot read.
pub fn problem(index: u32, error: &NvmlError) -> DeviceProblem {
    let (problem, next_step) = match error {
        NvmlError::GpuLost => (
            "the GPU is lost (the driver cannot reach it any more)".to_owned(),
            "check power and riser cables and `dmesg | grep Xid`; a restart of the machine brings the GPU back",
        ),
        NvmlError::ResetRequired => (
            "the GPU needs a reset before it can be used".to_owned(),
            "restart the machine, or reset the GPU with nvidia-smi",
        ),
        error => (format!("the GPU does not answer ({error})"), "check what nvidia-smi reports about it"),
    };
    DeviceProblem { device: id(index), problem, next_step: next_step.to_owned() }
}

/// Merges NVML's lists of compute and graphics processes into one entry per process, sorted by memory, the largest
/// first.
fn merge_processes(reported: &[ProcessInfo]) -> Vec<DeviceProcess> {
    let mut all: Vec<DeviceProcess> = Vec::new();
    for info in reported {
        let memory = match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        match all.iter_mut().find(|known| known.pid == info.pid) {
            // Both lists report the total memory of the process, so it is not added.
            Some(known) => known.memory = known.memory.max(memory),
            None => all.push(DeviceProcess {
                pid: info.pid,
                memory,
                name: process_name(info.pid),
                own: info.pid == std::process::id(),
            }),
        }
    }
    all.sort_by_key(|process| (std::cmp::Reverse(process.memory), process.pid));
    all
}

/// Name of a process. It is readable for processes of other users, too, but not for those in another PID namespace.
fn process_name(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(text.trim_end().to_owned()).filter(|name| !name.is_empty())
}

/// Reasons why the GPU is throttled. Low clocks because of idleness or because of application clocks set by the owner
/// do not count.
fn throttle_reasons(bits: ThrottleReasons) -> Vec<String> {
    [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature (hardware slowdown)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power supply"),
        (ThrottleReasons::SYNC_BOOST, "sync boost with another GPU"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display clocks"),
    ]
    .into_iter()
    .chain(is_unexplained(bits).then_some((ThrottleReasons::HW_SLOWDOWN, "hardware slowdown")))
    .filter(|(bit, _)| bits.contains(*bit))
    .map(|(_, words)| words.to_owned())
    .collect()
}

/// Whether a hardware slowdown is reported without a specific reason.
fn is_unexplained(bits: ThrottleReasons) -> bool {
    !bits.intersects(ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN)
}

/// Description of a GPU for users: memory, other processes, temperature and power.
pub fn describe(gpu: &Device) -> String {
    let mut parts = vec![Bytes(gpu.memory_total).to_string()];
    if gpu.memory_others > 0 {
        parts.push(format!("{} held by others", Bytes(gpu.memory_others)));
    }
    if let Some(celsius) = gpu.temperature_c {
        parts.push(format!("{celsius} °C"));
    }
    let watts = |milliwatts: u32| (f64::from(milliwatts) / 1000.0).round();
    match (gpu.power_mw, gpu.power_limit_mw) {
        (Some(drawn), Some(limit)) => parts.push(format!("{} of {} W", watts(drawn), watts(limit))),
        (Some(drawn), None) => parts.push(format!("{} W", watts(drawn))),
        (None, _) => {}
    }
    if !gpu.throttled.is_empty() {
        parts.push(format!("throttled: {}", gpu.throttled.join(", ")));
    }
    let foreign: Vec<String> = gpu.processes.iter().filter(|p| !p.own).map(describe_process).collect();
    if !foreign.is_empty() {
        parts.push(format!("also in use by {}", foreign.join(", ")));
    }
    parts.join(", ")
}

fn describe_process(process: &DeviceProcess) -> String {
    let name = process.name.as_deref().unwrap_or("process");
    match process.memory {
        Some(bytes) => format!("{name} {} ({})", process.pid, Bytes(bytes)),
        None => format!("{name} {}", process.pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(pid: u32, used_gpu_memory: UsedGpuMemory) -> ProcessInfo {
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    #[test]
    fn process_in_both_lists_counts_once() {
        let own = std::process::id();
        let (little, much) = (UsedGpuMemory::Used(5), UsedGpuMemory::Used(9));
        let all = merge_processes(&[info(own, little), info(u32::MAX, UsedGpuMemory::Unavailable), info(own, much)]);
        assert_eq!(
            all.iter().map(|p| (p.pid, p.memory, p.own)).collect::<Vec<_>>(),
            [(own, Some(9), true), (u32::MAX, None, false)]
        );
        assert!(all[0].name.is_some() && all[1].name.is_none());
    }

    #[test]
    fn throttle_reasons_are_named_and_idleness_is_not_one() {
        assert!(throttle_reasons(ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING).is_empty());
        let hot = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        assert_eq!(throttle_reasons(hot), ["temperature (hardware slowdown)"]);
        assert_eq!(throttle_reasons(ThrottleReasons::HW_SLOWDOWN), ["hardware slowdown"]);
        assert_eq!(throttle_reasons(ThrottleReasons::SW_POWER_CAP), ["power limit"]);
    }

    #[test]
    fn only_a_lost_gpu_is_an_error() {
        assert_eq!(optional::<u32>(Err(NvmlError::NotSupported)).unwrap(), None);
        assert!(optional::<u32>(Err(NvmlError::GpuLost)).is_err());
        assert!(problem(1, &NvmlError::GpuLost).problem.contains("lost"));
    }
}
