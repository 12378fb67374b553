//! What this machine computes on: its graphics cards by NVML where there is a driver, and always the processor.
//!
//! Asking must never end the process: no driver, a driver too old, a card that fell off the bus are all answers.

mod host;

use cfq_proto::node::{Device, DeviceKind};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;

pub use host::available_memory;

/// What was found, and in words what was not.
#[derive(Debug, Clone, PartialEq)]
pub struct Inventory {
    /// The processor first, then the cards.
    pub devices: Vec<Device>,
    /// One line for people: which cards there are, or why none is used.
    pub words: String,
}

/// Asks the driver now; takes milliseconds.
pub fn inventory() -> Inventory {
    let mut devices = vec![host::device()];
    let words = match cards() {
        Ok(found) if found.is_empty() => "an NVIDIA driver but no card: models run on the CPU".to_owned(),
        Ok(found) => {
            let names: Vec<&str> = found.iter().map(|d| d.name.as_str()).collect();
            let words = format!("{}: this version runs models on the CPU", names.join(", "));
            devices.extend(found);
            words
        }
        Err(NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound) => {
            "no NVIDIA driver: models run on the CPU".to_owned()
        }
        Err(error) => format!("the NVIDIA driver does not answer ({error}): models run on the CPU"),
    };
    Inventory { devices, words }
}

fn cards() -> Result<Vec<Device>, NvmlError> {
    let nvml = Nvml::init()?;
    let count = nvml.device_count()?;
    Ok((0..count)
        .filter_map(|index| match card(&nvml, index) {
            Ok(card) => Some(card),
            Err(error) => {
                tracing::warn!(index, %error, "graphics card does not answer");
                None
            }
        })
        .collect())
}

fn card(nvml: &Nvml, index: u32) -> Result<Device, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let capability = device.cuda_compute_capability().ok().map(|c| format!("{}.{}", c.major, c.minor));
    Ok(Device {
        id: format!("cuda:{index}"),
        kind: DeviceKind::Cuda,
        name: device.name()?,
        memory_total: memory.total,
        // This version puts nothing on cards, so all that is used is others'.
        memory_others: memory.used,
        compute_capability: capability,
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_always_a_processor_and_a_word() {
        let found = inventory();
        assert_eq!(found.devices[0].kind, DeviceKind::Cpu);
        assert!(found.devices[0].memory_total > 0);
        assert!(found.words.contains("CPU"), "{}", found.words);
    }
}
