//! Selection of the GPUs that a node uses: by the `device` setting, from the GPUs that CUDA and NVML report.

use std::fmt;
use std::str::FromStr;

use cfq_engine::cuda::{self, CudaUnavailable, Gpu};
use serde::{Deserialize, Serialize};

use crate::gpu;
use crate::gpu::device_index::{IndexedGpu, index_gpus};

/// The `device` setting of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// GPUs if there are any and the model fits them, else the CPU.
    #[default]
    Auto,
    /// The CPU only.
    Cpu,
    /// The GPU with this index only.
    Cuda(usize),
}

/// Error for a `device` setting other than `auto`, `cpu` and `cuda:N`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid device {given:?}: expected \"auto\", \"cpu\", or \"cuda:N\", where N is the index of a GPU")]
pub struct InvalidDevice {
    given: String,
}

impl FromStr for DeviceChoice {
    type Err = InvalidDevice;

    fn from_str(text: &str) -> Result<Self, InvalidDevice> {
        let invalid = || InvalidDevice { given: text.to_owned() };
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or_else(invalid),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = InvalidDevice;

    fn try_from(text: String) -> Result<Self, InvalidDevice> {
        text.parse()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

/// Opens the GPUs that `choice` selects, in the order of their indices.
///
/// # Errors
/// [`CudaUnavailable`] if no GPU can be used. With [`DeviceChoice::Cpu`], the result is empty and not an error.
pub fn open_gpus(choice: DeviceChoice) -> Result<Vec<Gpu>, CudaUnavailable> {
    selected(choice)?.into_iter().map(|gpu| cuda::open(gpu.ordinal, gpu.index, gpu.uuid)).collect()
}

/// UUIDs of the GPUs that `choice` selects; GPUs that NVML does not know are left out. No GPU is opened, because that
/// would allocate memory on it.
///
/// # Errors
/// The errors of [`open_gpus`].
pub fn usable_uuids(choice: DeviceChoice) -> Result<Vec<String>, CudaUnavailable> {
    Ok(selected(choice)?.into_iter().filter_map(|gpu| gpu.uuid).collect())
}

fn selected(choice: DeviceChoice) -> Result<Vec<IndexedGpu>, CudaUnavailable> {
    let visible: Vec<Option<[u8; 16]>> = cuda::devices()?.into_iter().map(|device| device.uuid).collect();
    let (all, matched) = index_gpus(&visible, &gpu::uuids());
    if all.is_empty() {
        return Err(CudaUnavailable::NoGpus);
    }
    if !matched {
        tracing::warn!("gpus cannot be matched with nvml's: cuda:N is CUDA's index here, not nvidia-smi's");
    }
    match choice {
        DeviceChoice::Auto => Ok(all),
        DeviceChoice::Cpu => Ok(Vec::new()),
        DeviceChoice::Cuda(index) => match all.iter().find(|gpu| gpu.index == index) {
            Some(gpu) => Ok(vec![gpu.clone()]),
            None => Err(CudaUnavailable::NoSuchGpu { index, seen: all.iter().map(|gpu| gpu.index).collect() }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_settings_parse_and_display_alike() {
        for text in ["auto", "cpu", "cuda:0", "cuda:11"] {
            let choice: DeviceChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
        }
        for text in ["gpu", "cuda", "cuda:", "cuda:x", ""] {
            let refused = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(refused.contains("\"cuda:N\""), "{refused}");
        }
    }

    #[test]
    fn opening_gpus_explains_why_there_are_none() {
        match open_gpus(DeviceChoice::Auto) {
            Ok(found) => assert!(cfg!(feature = "cuda") && !found.is_empty()),
            Err(reason) => {
                assert_eq!(matches!(reason, CudaUnavailable::NotBuilt), !cfg!(feature = "cuda"), "{reason}");
                assert!(reason.to_string().len() > 20, "{reason}");
            }
        }
    }
}
