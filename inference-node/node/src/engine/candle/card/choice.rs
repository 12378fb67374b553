//! Which curated model a machine serves where nobody named one, or why none of them.
//!
//! Only where this build and the driver can use the cards: gigabytes for a model that then runs on the CPU would be no
//! kindness. A card that lies idle for a reason is told of with the reason; what somebody hid or left out is left alone.

use cfq_memory::CardRoom;
use cfq_proto::node::{Device, DeviceKind};

use crate::engine::candle::card::curated::{curated_that_fit, lasting_room, too_old};
use crate::engine::candle::card::device::{DeviceChoice, NoCard, usable_uuids};
use crate::gpu;
use crate::models::curated::Entry;

#[derive(Debug)]
pub enum Choice {
    /// No card that is meant, or none that holds any of the list.
    Nothing,
    /// What these cards would hold, and why it does not run on them.
    Idle {
        entry: &'static Entry,
        cards: Vec<Device>,
        why: Idle,
    },
    Curated {
        entry: &'static Entry,
        cards: Vec<Device>,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum Idle {
    #[error(transparent)]
    NoCard(#[from] NoCard),
    #[error("{0}")]
    TooOld(String),
    #[error(
        "CUDA's cards cannot be matched with those that the driver tells of (a slice of a card, or cards without UUIDs)"
    )]
    Unmatched,
}

/// For a node with such a `device`, by the cards that NVML tells of and those of them that this build can use.
pub fn choose_here(device: DeviceChoice, sequences: u32) -> Choice {
    choose(device, sequences, &gpu::inventory().devices, usable_uuids)
}

fn choose(
    device: DeviceChoice,
    sequences: u32,
    devices: &[Device],
    usable: impl FnOnce(DeviceChoice) -> Result<Vec<String>, NoCard>,
) -> Choice {
    let mut cards: Vec<Device> = devices.iter().filter(|device| device.kind == DeviceKind::Cuda).cloned().collect();
    if device == DeviceChoice::Cpu || cards.is_empty() {
        return Choice::Nothing;
    }
    let idle = |cards: Vec<Device>, why| match best(sequences, &cards) {
        Some(entry) => Choice::Idle { entry, cards, why },
        None => Choice::Nothing,
    };
    let all = cards.clone();
    match usable(device) {
        Ok(uuids) => cards.retain(|card| card.uuid.as_ref().is_some_and(|uuid| uuids.contains(uuid))),
        // There are some: somebody hid them from CUDA.
        Err(NoCard::NoCards) => return Choice::Nothing,
        Err(none) => return idle(cards, none.into()),
    }
    if cards.is_empty() {
        return idle(all, Idle::Unmatched);
    }
    let (old, cards): (Vec<Device>, Vec<Device>) = cards.into_iter().partition(|card| too_old(card).is_some());
    if let (true, Some(why)) = (cards.is_empty(), old.first().and_then(too_old)) {
        return idle(old, Idle::TooOld(why));
    }
    match best(sequences, &cards) {
        Some(entry) => Choice::Curated { entry, cards },
        None => Choice::Nothing,
    }
}

/// The largest that they hold, alone or together, of those that anybody may use for anything: nobody was asked.
fn best(sequences: u32, cards: &[Device]) -> Option<&'static Entry> {
    let rooms: Vec<CardRoom> = cards.iter().map(lasting_room).collect();
    curated_that_fit(&rooms, sequences).find(|entry| entry.for_anybody)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(name: &str, gib: u64, capability: &str) -> Device {
        let mut card = gpu::inventory().devices[0].clone();
        (card.kind, card.name, card.memory_total) = (DeviceKind::Cuda, name.to_owned(), gib << 30);
        (card.uuid, card.compute_capability) = (Some(format!("GPU-{name}")), Some(capability.to_owned()));
        // Nearly all of it is another program's, for now.
        card.memory_others = (gib << 30) - 1;
        card
    }

    /// All but the one called "hidden".
    fn seen(_: DeviceChoice) -> Result<Vec<String>, NoCard> {
        Ok(["a", "b", "old", "tiny"].map(|name| format!("GPU-{name}")).to_vec())
    }

    /// The entry's smallest card.
    fn chosen(cards: &[Device]) -> Option<u64> {
        match choose(DeviceChoice::Auto, 4, cards, seen) {
            Choice::Curated { entry, .. } => Some(entry.smallest_card),
            Choice::Nothing | Choice::Idle { .. } => None,
        }
    }

    #[test]
    fn a_card_of_12_gb_gets_what_suits_it_whoever_holds_it_now() {
        let cards = [gpu::inventory().devices[0].clone(), card("a", 12, "8.6")];
        let Choice::Curated { entry, cards } = choose(DeviceChoice::Auto, 4, &cards, seen) else { panic!("nothing") };
        assert_eq!((entry.smallest_card, entry.for_anybody), (12, true));
        assert_eq!(cards.iter().map(|card| card.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn cards_count_together_and_those_that_are_too_old_or_hidden_do_not() {
        let good = card("a", 12, "8.6");
        assert_eq!(chosen(&[card("a", 16, "8.6"), card("b", 16, "8.6")]), Some(24));
        assert_eq!(chosen(&[good.clone(), card("old", 24, "7.5")]), Some(12));
        assert_eq!(chosen(&[good.clone(), card("hidden", 24, "8.6")]), Some(12));
        assert_eq!(chosen(&[good, card("tiny", 1, "8.6")]), Some(12));
    }

    #[test]
    fn without_a_card_that_is_meant_and_large_enough_there_is_nothing_to_say() {
        let nothing = |device, cards: &[Device]| matches!(choose(device, 4, cards, seen), Choice::Nothing);
        assert!(nothing(DeviceChoice::Auto, &gpu::inventory().devices[..1]));
        assert!(nothing(DeviceChoice::Auto, &[card("hidden", 24, "8.6"), card("tiny", 1, "8.6")]));
        let hidden = choose(DeviceChoice::Auto, 4, &[card("a", 24, "8.6")], |_| Err(NoCard::NoCards));
        assert!(matches!(hidden, Choice::Nothing), "{hidden:?}");
        assert!(nothing(DeviceChoice::Auto, &[card("tiny", 1, "8.6")]));
        assert!(nothing(DeviceChoice::Cpu, &[card("a", 24, "8.6")]));
        let small = choose(DeviceChoice::Auto, 4, &[card("tiny", 1, "8.6")], |_| Err(NoCard::NotBuilt));
        assert!(matches!(small, Choice::Nothing), "{small:?}");
    }

    #[test]
    fn a_card_that_lies_idle_has_a_reason() {
        let cards = [card("a", 12, "8.6")];
        for none in [NoCard::NotBuilt, NoCard::NoLibrary { library: "cuBLAS", package: "nvidia-cublas" }] {
            let said = none.to_string();
            let found = choose(DeviceChoice::Auto, 4, &cards, |_| Err(none));
            let Choice::Idle { entry, why, .. } = found else { panic!("{found:?}") };
            assert_eq!((entry.smallest_card, why.to_string()), (12, said));
        }
        let found = choose(DeviceChoice::Auto, 4, &cards, |_| Ok(Vec::new()));
        let Choice::Idle { why: Idle::Unmatched, .. } = found else { panic!("{found:?}") };
        let found = choose(DeviceChoice::Auto, 4, &[card("old", 24, "7.5")], seen);
        let Choice::Idle { entry, why: Idle::TooOld(why), .. } = found else { panic!("{found:?}") };
        assert!(entry.smallest_card == 24 && why.contains("capability 7.5"), "{why}");
    }
}
