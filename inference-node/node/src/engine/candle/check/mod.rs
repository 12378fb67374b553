//! The engine on this machine's devices, checked by itself: `cfq engine check`.
//!
//! For machines with a card and nothing else: no fixtures, no network, no Rust. Models are random and written to a temporary
//! folder, so what is compared is two ways of computing the same, not with a reference; that is what the tests of this crate
//! do with transformers' numbers. It passed if all comparisons did, if every model loaded and ran that there was room for, and
//! if on a card the ledger was right within its tolerance; speed is measured and said.

mod batching;
mod ledger;
mod parity;
mod shapes;
mod speed;

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde::Serialize;

use crate::engine::candle::LoadError;
use crate::engine::candle::card::{Card, DeviceChoice, NoCard, cards, is_out_of_memory};
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
    /// What was begun and did not work, beside what the rows above say.
    pub failures: Vec<String>,
}

impl CheckReport {
    pub fn passed(&self) -> bool {
        !self.parity.is_empty() && self.failed() == 0
    }

    /// How many rows and loads failed.
    pub fn failed(&self) -> usize {
        let parity = self.parity.iter().filter(|row| !row.passed).count();
        parity + self.ledger.iter().filter(|row| row.failed()).count() + self.failures.len()
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

/// Why there is no result.
enum Undone {
    /// There is no room for it here, or nobody who measures: nothing is wrong.
    NoRoom(String),
    Failed(String),
}

impl Undone {
    fn words(self) -> String {
        match self {
            Self::NoRoom(reason) | Self::Failed(reason) => reason,
        }
    }

    fn of_load(error: &LoadError) -> Self {
        let words = match std::error::Error::source(error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        };
        match error {
            LoadError::DoesNotFit { .. } | LoadError::NoLayout { .. } => Self::NoRoom(words),
            // Of a card that proved full the sum had said that it fits.
            LoadError::CardFull { .. }
            | LoadError::Header(_)
            | LoadError::Weights { .. }
            | LoadError::NotOnCards { .. }
            | LoadError::Thread(_) => Self::Failed(words),
        }
    }

    fn of_pass(error: &candle_core::Error) -> Self {
        if is_out_of_memory(error) { Self::NoRoom(error.to_string()) } else { Self::Failed(error.to_string()) }
    }

    fn tell(self, what: &str, not_run: &mut Vec<String>, failures: &mut Vec<String>) {
        match self {
            Self::NoRoom(reason) => not_run.push(format!("{what}: {reason}")),
            Self::Failed(reason) => failures.push(format!("{what}: {reason}")),
        }
    }
}

/// Of the engine's work, and in no part of this check.
const LEFT_OUT: [&str; 2] = [
    "a mixture whose experts are chosen, and stretched rotation: rounding would choose otherwise, and the models here are short",
    "models as safetensors, the tokenizers of real models, StarCoder2 and OLMo 2: no part of this check",
];

/// Runs all of it; `tell` hears what begins. Seconds when quick, else minutes.
pub fn check(options: CheckOptions, tell: &mut dyn FnMut(&str)) -> Result<CheckReport, CheckError> {
    let no_card = |source| CheckError::NoCard { device: options.device, source };
    let mut not_run = Vec::new();
    let mut found = match options.device {
        DeviceChoice::Cpu => Vec::new(),
        DeviceChoice::Cuda(_) => cards(options.device).map_err(no_card)?,
        DeviceChoice::Auto => cards(options.device).unwrap_or_else(|none| {
            not_run.push(format!("anything on a card: {none}"));
            Vec::new()
        }),
    };
    let mut several: Vec<Device> = found.iter().map(|card| card.device.clone()).collect();
    let under = if found.is_empty() { Under::Cpu } else { Under::Card(found.remove(0)) };
    if several.len() < 2 {
        several = vec![under.device(); 2];
        if matches!(under, Under::Card(_)) {
            not_run.push("layers over several cards: the one card was taken for two".to_owned());
        }
    }
    if !found.is_empty() {
        let others: Vec<String> = found.iter().map(Card::id).collect();
        not_run.push(format!(
            "all but the split of layers on {}: --device {} checks one by itself",
            others.join(", "),
            others[0]
        ));
    }
    let folder = Folder::new()?;
    tell("bandwidth");
    let (device, name, bandwidth) = match &under {
        Under::Cpu => {
            let name = crate::gpu::inventory().devices.into_iter().next().map_or_else(String::new, |d| d.name);
            ("cpu".to_owned(), name, speed::host_bandwidth())
        }
        Under::Card(card) => (card.id(), card.name.clone(), card.speed),
    };
    let mut failures = Vec::new();
    let mut parity = parity::check(&under, &several, &folder.path, tell);
    parity.extend(batching::check(&under, &folder.path, tell));
    let mut undone = |what: String, undone: Undone| undone.tell(&what, &mut not_run, &mut failures);
    let ledger = ledger::check(&under, options.quick, &folder.path, tell, &mut undone);
    let speed = speed::check(&under, options.quick, bandwidth, &folder.path, tell, &mut undone);
    if options.quick {
        not_run.push("models of useful size: --quick leaves out the shapes of 1.5 B and 7 B".to_owned());
    }
    if matches!(under, Under::Cpu) && options.device == DeviceChoice::Cpu {
        not_run.push("anything on a card: the device is the CPU, which ran the cards' forward pass too".to_owned());
    }
    not_run.extend(LEFT_OUT.map(str::to_owned));
    let built_for_cuda = crate::gpu::uses_cards();
    Ok(CheckReport { device, name, built_for_cuda, bandwidth, parity, ledger, speed, not_run, failures })
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
    work: impl FnOnce(&Path) -> Result<T, Undone>,
) -> Result<T, Undone> {
    let path = folder.join("model.gguf");
    let done = match shape.write(&path) {
        Ok(()) => work(&path),
        Err(error) => Err(Undone::NoRoom(format!("the model cannot be written into {}: {error}", folder.display()))),
    };
    let _ = std::fs::remove_file(&path);
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> CheckReport {
        let parity = vec![ParityRow::of("a model".to_owned(), 0.1, Ok(0.0))];
        CheckReport {
            device: "cuda:0".to_owned(),
            name: "a card".to_owned(),
            built_for_cuda: true,
            bandwidth: 1.0,
            parity,
            ledger: Vec::new(),
            speed: Vec::new(),
            not_run: Vec::new(),
            failures: Vec::new(),
        }
    }

    #[test]
    fn what_was_begun_and_did_not_work_fails_the_check_and_what_had_no_room_does_not() {
        let mut seen = report();
        assert!(seen.passed());
        let full = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".to_owned());
        Undone::of_pass(&full).tell("the speed of 7 B", &mut seen.not_run, &mut seen.failures);
        assert!(seen.passed() && seen.not_run.len() == 1);
        let lost = candle_core::Error::Msg("DriverError(CUDA_ERROR_LAUNCH_FAILED, \"x\")".to_owned());
        Undone::of_pass(&lost).tell("the speed of 7 B", &mut seen.not_run, &mut seen.failures);
        assert_eq!((seen.passed(), seen.failed()), (false, 1));
        assert!(!CheckReport { parity: Vec::new(), ..report() }.passed(), "nothing was compared");
        let wrong = ParityRow::of("a model".to_owned(), 0.1, Ok(0.2));
        assert!(!CheckReport { parity: vec![wrong], ..report() }.passed());
    }

    #[test]
    fn a_ledger_that_is_far_off_on_a_card_fails_the_check() {
        let row = |by, predicted: u64, measured: u64| LedgerRow::of("a model", String::new(), predicted, measured, by);
        let passes = |row: LedgerRow| CheckReport { ledger: vec![row], ..report() }.passed();
        let (gib, mib) = (1 << 30, 1 << 20);
        assert!(passes(row("driver", 10 * gib, 11 * gib + 60 * mib)) && passes(row("driver", 10 * gib, 9 * gib)));
        assert!(!passes(row("driver", 10 * gib, 11 * gib + 70 * mib)) && !passes(row("driver", 10 * gib, 8 * gib)));
        // These count what others do too, and what is kept for later.
        assert!(passes(row("nvml", gib, 3 * gib)) && passes(row("process", gib, 0)));
    }
}
