//! What this machine computes on: its graphics cards by NVML where there is a driver, and always the processor.
//!
//! Asking must never end the process: no driver, a driver too old, a card that fell off the bus are all answers. A card
//! that does not answer is no device; the others go on, and what is missing is said.

mod card;
mod host;

use cfq_proto::node::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

pub use card::words as card_words;
pub use host::{available_memory, give_back, held_memory};

/// What a trouble of all cards at once is of.
pub const DRIVER: &str = "driver";

/// What was found, and in words what was not.
#[derive(Debug, Clone, PartialEq)]
pub struct Inventory {
    /// The processor first, then the cards.
    pub devices: Vec<Device>,
    /// One line for people: which cards there are, or why none is used.
    pub words: String,
    /// Of the NVIDIA driver, where one answers.
    pub driver: Option<String>,
    /// What there is and does not answer.
    pub troubles: Vec<Trouble>,
}

/// A card, or the whole driver, that does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// `cuda:1`, or `driver`.
    pub of: String,
    pub what: String,
    pub next_step: String,
}

/// Whether this build of cfq can run models on cards.
pub fn uses_cards() -> bool {
    cfg!(feature = "cuda")
}

/// What this build of cfq does with cards.
pub fn use_of_cards() -> &'static str {
    if uses_cards() {
        "this build runs models on them where device allows it (`cfq engine check` tries them)"
    } else {
        "this build runs models on the CPU (docs/gpu.md says how one for cards is made)"
    }
}

/// Asks the driver now; takes milliseconds.
pub fn inventory() -> Inventory {
    let mut devices = vec![host::device()];
    let (mut driver, mut troubles) = (None, Vec::new());
    let words = match Nvml::init() {
        Ok(nvml) => {
            driver = nvml.sys_driver_version().ok();
            match cards(&nvml, &mut troubles) {
                Ok(cards) => {
                    let words = cards_in_words(&cards, &troubles);
                    devices.extend(cards);
                    words
                }
                Err(error) => silent(&error, &mut troubles),
            }
        }
        Err(NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound) => {
            "no NVIDIA driver: models run on the CPU".to_owned()
        }
        Err(error) => silent(&error, &mut troubles),
    };
    Inventory { devices, words, driver, troubles }
}

/// What is measured of a device is kept under this: a card's UUID, since another card may be in its slot tomorrow, and it in
/// another; where none is told (a slice of a card, no NVML), and of the processor, what it is called here.
pub fn kept_as(id: &str, uuid: Option<&str>) -> String {
    uuid.unwrap_or(id).to_owned()
}

/// Number and UUID of every card that tells both; none where NVML does not answer.
pub fn uuids() -> Vec<(usize, String)> {
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let of = |index: u32| Some((usize::try_from(index).ok()?, nvml.device_by_index(index).ok()?.uuid().ok()?));
    (0..nvml.device_count().unwrap_or(0)).filter_map(of).collect()
}

fn cards(nvml: &Nvml, troubles: &mut Vec<Trouble>) -> Result<Vec<Device>, NvmlError> {
    let mut found = Vec::new();
    for index in 0..nvml.device_count()? {
        match card::read(nvml, index) {
            Ok(card) => found.push(card),
            Err(error) => troubles.push(card::trouble(index, &error)),
        }
    }
    Ok(found)
}

fn cards_in_words(cards: &[Device], troubles: &[Trouble]) -> String {
    let lost: Vec<String> = troubles.iter().map(|t| format!("{} {}", t.of, t.what)).collect();
    let lost = lost.join("; ");
    match (cards.is_empty(), lost.is_empty()) {
        (true, true) => "an NVIDIA driver but no card: models run on the CPU".to_owned(),
        (true, false) => format!("{lost}: models run on the CPU"),
        (false, _) => {
            let named: Vec<String> =
                cards.iter().map(|d| format!("{} {} ({})", d.id, d.name, card::words(d))).collect();
            let lost = if lost.is_empty() { lost } else { format!("; {lost}") };
            format!("{}{lost}: {}", named.join(", "), use_of_cards())
        }
    }
}

/// The library is there and the driver does not answer.
fn silent(error: &NvmlError, troubles: &mut Vec<Trouble>) -> String {
    let (what, next_step) = match error {
        NvmlError::LibRmVersionMismatch => (
            format!(
                "the NVIDIA library is of another version than the driver in the kernel{}",
                kernel_module().map_or_else(String::new, |version| format!(" ({version})"))
            ),
            "restart the machine: the driver was updated and the old one is still loaded",
        ),
        NvmlError::DriverNotLoaded => (
            "the NVIDIA library is here, its driver is not loaded".to_owned(),
            "load it (modprobe nvidia), or install the driver for this kernel",
        ),
        NvmlError::NoPermission => {
            ("this user may not ask the NVIDIA driver".to_owned(), "let it read and write /dev/nvidia*")
        }
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            ("the NVIDIA driver is too old to be asked".to_owned(), "install version 510 or newer")
        }
        error => (format!("the NVIDIA driver does not answer ({error})"), "see what nvidia-smi says"),
    };
    let words = format!("{what}: models run on the CPU");
    troubles.push(Trouble { of: DRIVER.to_owned(), what, next_step: next_step.to_owned() });
    words
}

/// The version of the driver that the kernel has loaded.
fn kernel_module() -> Option<String> {
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
    fn there_is_always_a_processor_and_a_word() {
        let found = inventory();
        assert_eq!(found.devices[0].kind, DeviceKind::Cpu);
        assert!(found.devices[0].memory_total > 0);
        assert!(found.words.contains("CPU"), "{}", found.words);
    }

    #[test]
    fn where_there_are_cards_it_is_said_what_this_build_does_with_them() {
        let mut card = host::device();
        (card.id, card.kind) = ("cuda:0".to_owned(), DeviceKind::Cuda);
        let words = cards_in_words(&[card], &[]);
        assert!(words.starts_with("cuda:0 ") && words.ends_with(use_of_cards()), "{words}");
        assert_eq!(use_of_cards().contains("on the CPU"), !cfg!(feature = "cuda"));
        assert!(cards_in_words(&[], &[]).ends_with("models run on the CPU"));
    }

    #[test]
    fn a_driver_that_does_not_answer_says_why_and_what_to_do() {
        for (error, word, step) in [
            (NvmlError::LibRmVersionMismatch, "another version", "restart"),
            (NvmlError::DriverNotLoaded, "not loaded", "modprobe"),
            (NvmlError::NoPermission, "may not ask", "/dev/nvidia"),
            (NvmlError::Unknown, "does not answer", "nvidia-smi"),
        ] {
            let mut troubles = Vec::new();
            let words = silent(&error, &mut troubles);
            assert!(words.contains(word) && words.ends_with("models run on the CPU"), "{words}");
            assert!(troubles[0].next_step.contains(step), "{troubles:?}");
        }
    }
}
