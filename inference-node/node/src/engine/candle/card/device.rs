//! The cards of this machine as candle's devices, and in words why there are none.
//!
//! A driver or library that is missing makes candle panic, so both are asked for first.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;
use cfq_memory::CardRoom;
use serde::{Deserialize, Serialize};

/// What a node is told to compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The cards where there are any and a model fits them, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// This one card.
    Cuda(usize),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no device: say \"auto\", \"cpu\", or \"cuda:0\" with the number of a card")]
pub struct NoSuchDevice {
    given: String,
}

impl FromStr for DeviceChoice {
    type Err = NoSuchDevice;

    fn from_str(text: &str) -> Result<Self, NoSuchDevice> {
        let wrong = || NoSuchDevice { given: text.to_owned() };
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or_else(wrong),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = NoSuchDevice;

    fn try_from(text: String) -> Result<Self, NoSuchDevice> {
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

/// One card, ready to be used.
#[derive(Debug, Clone)]
pub struct Card {
    /// As in `cuda:0`: NVML's, as far as the two can be matched.
    pub index: usize,
    pub name: String,
    /// By which NVML knows it, if so.
    pub uuid: Option<String>,
    pub device: Device,
    /// Bytes that nobody has taken, when it was looked at.
    pub free: u64,
    /// Bytes per second of a copy within the card, for telling cards apart.
    pub speed: f64,
    /// Thousandths that earlier loads of the model at hand took more here than its weights come to; 0 if none is at hand.
    pub correction: u64,
}

impl Card {
    pub fn id(&self) -> String {
        format!("cuda:{}", self.index)
    }

    /// What is measured of it is kept under: whichever slot it is in, where its UUID is known.
    pub fn kept_as(&self) -> String {
        crate::gpu::kept_as(&self.id(), self.uuid.as_deref())
    }

    /// What it has for one of `of` models.
    pub fn room(&self, of: u64) -> CardRoom {
        CardRoom { free: self.free / of.max(1), speed: self.speed, correction: self.correction }
    }
}

/// Why no card is used.
#[derive(Debug, thiserror::Error)]
pub enum NoCard {
    #[error("this build of cfq computes on the CPU only; docs/gpu.md says how one for NVIDIA cards is built")]
    NotBuilt,
    #[error("there is no NVIDIA driver (libcuda.so.1)")]
    NoDriver,
    #[error(
        "the NVIDIA driver is here and {library} is not: install CUDA 13's libraries, or the package {package} from PyPI \
         and name its folder in LD_LIBRARY_PATH"
    )]
    NoLibrary { library: &'static str, package: &'static str },
    #[error("the NVIDIA driver sees no card")]
    NoCards,
    #[error("there is no card cuda:{index}; the NVIDIA driver shows this process {}", listed(seen))]
    NoSuchCard { index: usize, seen: Vec<usize> },
    #[error("the NVIDIA driver does not answer")]
    Driver(#[source] candle_core::Error),
}

fn listed(cards: &[usize]) -> String {
    cards.iter().map(|index| format!("cuda:{index}")).collect::<Vec<_>>().join(" and ")
}

/// The cards that `choice` means, opened.
#[cfg(not(feature = "cuda"))]
pub fn cards(_: DeviceChoice) -> Result<Vec<Card>, NoCard> {
    Err(NoCard::NotBuilt)
}

#[cfg(feature = "cuda")]
pub use super::cuda::cards;

/// The UUIDs of the cards that `choice` means, as far as NVML knows them. None is opened, which would take memory of it.
#[cfg(not(feature = "cuda"))]
pub fn usable_uuids(_: DeviceChoice) -> Result<Vec<String>, NoCard> {
    Err(NoCard::NotBuilt)
}

#[cfg(feature = "cuda")]
pub use super::cuda::usable_uuids;

/// What a device has free and in all, in bytes; `None` for the CPU.
#[cfg(not(feature = "cuda"))]
pub fn memory(_: &Device) -> Option<(u64, u64)> {
    None
}

#[cfg(feature = "cuda")]
pub use super::cuda::memory;

/// Hands what this process freed on a card and keeps back to the driver: others want it.
#[cfg(not(feature = "cuda"))]
pub fn give_back(_: &Device) {}

#[cfg(feature = "cuda")]
pub use super::cuda::give_back;

/// Bytes that a device says it has free; `None` for the CPU, or where the driver does not say.
pub fn free_of(device: &Device) -> Option<u64> {
    memory(device).map(|(free, _)| free)
}

/// Whether this is a card's memory running out: the names of it that the driver and cuBLAS have are the only thing all their
/// errors have in common.
pub fn is_out_of_memory(error: &candle_core::Error) -> bool {
    let said = error.to_string();
    ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "CURAND_STATUS_ALLOCATION_FAILED"]
        .iter()
        .any(|name| said.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_they_are_shown() {
        for text in ["auto", "cpu", "cuda:0", "cuda:11"] {
            let choice: DeviceChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
        }
        for text in ["gpu", "cuda", "cuda:", "cuda:x", ""] {
            let refused = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(refused.contains("\"cuda:0\""), "{refused}");
        }
    }

    #[test]
    fn asking_for_cards_ends_in_words_where_there_are_none() {
        match cards(DeviceChoice::Auto) {
            Ok(found) => assert!(!found.is_empty()),
            Err(none) => assert!(none.to_string().len() > 20, "{none}"),
        }
    }
}
