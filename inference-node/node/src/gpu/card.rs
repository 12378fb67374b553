//! One graphics card, as NVML tells of it.
//!
//! Name and memory must be there; whatever else a card or a driver does not tell is left out, since laptops' and older
//! cards tell less. But a card that is lost says so to any question, and then it is no device whatever it said before.

use std::fs;

use cfq_memory::Bytes;
use cfq_proto::node::{Device, DeviceKind, DeviceProcess};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::Trouble;

pub fn read(nvml: &Nvml, index: u32) -> Result<Device, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let capability = told(device.cuda_compute_capability())?.map(|c| format!("{}.{}", c.major, c.minor));
    let mut processes = told(device.running_compute_processes())?.unwrap_or_default();
    processes.extend(told(device.running_graphics_processes())?.unwrap_or_default());
    let processes = merged(&processes);
    let own: u64 = processes.iter().filter(|p| p.own).filter_map(|p| p.memory).sum();
    Ok(Device {
        id: id(index),
        kind: DeviceKind::Cuda,
        name: device.name()?,
        memory_total: memory.total,
        // What the driver keeps for itself is no more to be had than what others hold.
        memory_others: memory.total.saturating_sub(memory.free).saturating_sub(own),
        compute_capability: capability,
        temperature_c: told(device.temperature(TemperatureSensor::Gpu))?,
        power_mw: told(device.power_usage())?,
        power_limit_mw: told(device.enforced_power_limit())?,
        uuid: told(device.uuid())?,
        throttled: told(device.current_throttle_reasons())?.map(reasons).unwrap_or_default(),
        processes,
    })
}

fn id(index: u32) -> String {
    format!("cuda:{index}")
}

/// `None` where this card or driver does not tell; a card that is gone is an error.
fn told<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error @ (NvmlError::GpuLost | NvmlError::ResetRequired)) => Err(error),
        Err(error) => {
            tracing::trace!(%error, "not told");
            Ok(None)
        }
    }
}

/// What a card that does not answer is called.
pub fn trouble(index: u32, error: &NvmlError) -> Trouble {
    let (what, next_step) = match error {
        NvmlError::GpuLost => (
            "is lost: the driver cannot reach it any more".to_owned(),
            "look at power and riser cables and at `dmesg | grep Xid`; the card comes back with a restart of the machine",
        ),
        NvmlError::ResetRequired => {
            ("needs a reset before it can be used".to_owned(), "restart the machine, or reset it with nvidia-smi")
        }
        error => (format!("does not answer ({error})"), "see what nvidia-smi says about it"),
    };
    Trouble { of: id(index), what, next_step: next_step.to_owned() }
}

/// One entry a process, also where it both computes and draws; the most memory first.
fn merged(told: &[ProcessInfo]) -> Vec<DeviceProcess> {
    let mut all: Vec<DeviceProcess> = Vec::new();
    for info in told {
        let memory = match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        match all.iter_mut().find(|known| known.pid == info.pid) {
            // Both lists give the process's whole use.
            Some(known) => known.memory = known.memory.max(memory),
            None => all.push(DeviceProcess {
                pid: info.pid,
                memory,
                name: name(info.pid),
                own: info.pid == std::process::id(),
            }),
        }
    }
    all.sort_by_key(|process| (std::cmp::Reverse(process.memory), process.pid));
    all
}

/// Readable for processes of other users too, but not from within another namespace of process ids.
fn name(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(text.trim_end().to_owned()).filter(|name| !name.is_empty())
}

/// An idle card is not held back, and neither is one at clocks that its owner set for applications.
fn reasons(bits: ThrottleReasons) -> Vec<String> {
    [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature, stopped by the hardware"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power supply"),
        (ThrottleReasons::SYNC_BOOST, "another card it keeps pace with"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display clocks"),
    ]
    .into_iter()
    .chain(unexplained(bits).then_some((ThrottleReasons::HW_SLOWDOWN, "slowed by the hardware")))
    .filter(|(bit, _)| bits.contains(*bit))
    .map(|(_, words)| words.to_owned())
    .collect()
}

/// The hardware says that it slows down beside why, and sometimes without.
fn unexplained(bits: ThrottleReasons) -> bool {
    !bits.intersects(ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN)
}

/// For people: memory, who else is on it, heat and power.
pub fn words(card: &Device) -> String {
    let mut parts = vec![Bytes(card.memory_total).to_string()];
    if card.memory_others > 0 {
        parts.push(format!("{} held by others", Bytes(card.memory_others)));
    }
    if let Some(celsius) = card.temperature_c {
        parts.push(format!("{celsius} °C"));
    }
    let watts = |milliwatts: u32| (f64::from(milliwatts) / 1000.0).round();
    match (card.power_mw, card.power_limit_mw) {
        (Some(drawn), Some(limit)) => parts.push(format!("{} of {} W", watts(drawn), watts(limit))),
        (Some(drawn), None) => parts.push(format!("{} W", watts(drawn))),
        (None, _) => {}
    }
    if !card.throttled.is_empty() {
        parts.push(format!("throttled: {}", card.throttled.join(", ")));
    }
    let foreign: Vec<String> = card.processes.iter().filter(|p| !p.own).map(process).collect();
    if !foreign.is_empty() {
        parts.push(format!("also in use by {}", foreign.join(", ")));
    }
    parts.join(", ")
}

fn process(process: &DeviceProcess) -> String {
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
    fn a_process_in_both_lists_counts_once_and_this_one_is_known() {
        let own = std::process::id();
        let (little, much) = (UsedGpuMemory::Used(5), UsedGpuMemory::Used(9));
        let all = merged(&[info(own, little), info(u32::MAX, UsedGpuMemory::Unavailable), info(own, much)]);
        assert_eq!(
            all.iter().map(|p| (p.pid, p.memory, p.own)).collect::<Vec<_>>(),
            [(own, Some(9), true), (u32::MAX, None, false)]
        );
        assert!(all[0].name.is_some() && all[1].name.is_none());
    }

    #[test]
    fn throttling_is_told_in_words_and_idling_is_none() {
        assert!(reasons(ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING).is_empty());
        let hot = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        assert_eq!(reasons(hot), ["temperature, stopped by the hardware"]);
        assert_eq!(reasons(ThrottleReasons::HW_SLOWDOWN), ["slowed by the hardware"]);
        assert_eq!(reasons(ThrottleReasons::SW_POWER_CAP), ["power limit"]);
    }

    #[test]
    fn only_a_card_that_is_gone_is_an_error() {
        assert_eq!(told::<u32>(Err(NvmlError::NotSupported)).unwrap(), None);
        assert!(told::<u32>(Err(NvmlError::GpuLost)).is_err());
        assert!(trouble(1, &NvmlError::GpuLost).what.contains("lost"));
    }
}
