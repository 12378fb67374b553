//! The engine on this machine's devices, checked by itself: `cfq engine check`.
//!
//! For machines with a card and nothing else: no fixtures, no network, no Rust. Models are random and written to a temporary
//! folder, so what is compared is two ways of computing the same, not with a reference; that is what the tests of this crate
//! do with transformers' numbers. Only parity decides whether the check passed; the rest is measured and said.

mod batching;
mod ledger;
mod parity;
mod shapes;
mod speed;

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde::Serialize;

use crate::engine::candle::card::{Card, DeviceChoice, NoCard, cards};
pub use crate::engine::candle::check::ledger::LedgerRow;
pub use crate::engine::candle::check::parity::ParityRow;
pub use crate::engine::candle::check::speed::{DecodeRow, PrefillRow, SpeedRow};

/// What to check, and how much of it.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions {
    pub device: DeviceChoice,
    /// Small shapes only, for tests and for a first look.
    pub quick: bool,
}

/// What was seen.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// `cpu`, or the card.
    pub device: String,
    pub name: String,
    /// Whether this program can use cards at all.
    pub built_for_cuda: bool,
    /// Bytes per second of a copy within the device's memory, both ways counted.
    pub bandwidth: f64,
    pub parity: Vec<ParityRow>,
    pub ledger: Vec<LedgerRow>,
    pub speed: Vec<SpeedRow>,
    /// What was left out, and why.
    pub not_run: Vec<String>,
}

impl CheckReport {
    pub fn passed(&self) -> bool {
        !self.parity.is_empty() && self.parity.iter().all(|row| row.passed)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("the engine cannot be checked on {device}: {source}")]
    NoCard { device: DeviceChoice, source: NoCard },
    #[error("cannot write a model of random weights into {folder}: {reason}")]
    Write { folder: PathBuf, reason: String },
}

/// The device under test.
pub(super) enum Under {
    Cpu,
    Card(Card),
}

impl Under {
    fn device(&self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Card(card) => card.device.clone(),
        }
    }

    /// The card's forward pass runs on either.
    fn card(&self) -> Card {
        match self {
            Self::Cpu => Card {
                index: 0,
                name: "the CPU as a card".to_owned(),
                uuid: None,
                device: Device::Cpu,
                free: crate::gpu::available_memory(),
                speed: 1.0,
                correction: 0,
            },
            Self::Card(card) => card.clone(),
        }
    }
}

/// Runs all of it; `tell` hears what begins. Seconds when quick, else minutes.
pub fn check(options: CheckOptions, tell: &mut dyn FnMut(&str)) -> Result<CheckReport, CheckError> {
    let no_card = |source| CheckError::NoCard { device: options.device, source };
    let mut not_run = Vec::new();
    let under = match options.device {
        DeviceChoice::Cpu => Under::Cpu,
        DeviceChoice::Cuda(_) => {
            cards(options.device).map_err(no_card)?.into_iter().next().map_or(Under::Cpu, Under::Card)
        }
        DeviceChoice::Auto => match cards(options.device) {
            Ok(found) => found.into_iter().next().map_or(Under::Cpu, Under::Card),
            Err(none) => {
                not_run.push(format!("anything on a card: {none}"));
                Under::Cpu
            }
        },
    };
    let folder = Folder::new()?;
    tell("bandwidth");
    let (device, name, bandwidth) = match &under {
        Under::Cpu => {
            let name = crate::gpu::inventory().devices.into_iter().next().map_or_else(String::new, |d| d.name);
            ("cpu".to_owned(), name, speed::host_bandwidth())
        }
        Under::Card(card) => (card.id(), card.name.clone(), card.speed),
    };
    let mut parity = parity::check(&under, &folder.path, tell);
    parity.push(batching::check(&under, &folder.path, tell));
    let ledger = ledger::check(&under, options.quick, &folder.path, tell, &mut not_run);
    let speed = speed::check(&under, options.quick, bandwidth, &folder.path, tell, &mut not_run);
    if options.quick {
        not_run.push("models of useful size: --quick leaves out the shapes of 1.5 B and 7 B".to_owned());
    }
    if matches!(under, Under::Cpu) && options.device == DeviceChoice::Cpu {
        not_run.push("anything on a card: the device is the CPU, which ran the cards' forward pass too".to_owned());
    }
    let built_for_cuda = cfg!(feature = "cuda");
    Ok(CheckReport { device, name, built_for_cuda, bandwidth, parity, ledger, speed, not_run })
}

/// A temporary folder, gone when dropped.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn new() -> Result<Self, CheckError> {
        let path = std::env::temp_dir().join(format!("cfq-check-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| CheckError::Write { folder: path.clone(), reason: error.to_string() })?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of it is the system's to clear.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Calls `work` with a file of the shape, which is removed afterwards.
fn with_file<T>(
    shape: &crate::engine::candle::random::RandomFile,
    folder: &Path,
    work: impl FnOnce(&Path) -> Result<T, String>,
) -> Result<T, String> {
    let path = folder.join("model.gguf");
    let done = match shape.write(&path) {
        Ok(()) => work(&path),
        Err(error) => Err(format!("the model cannot be written into {}: {error}", folder.display())),
    };
    let _ = std::fs::remove_file(&path);
    done
}
