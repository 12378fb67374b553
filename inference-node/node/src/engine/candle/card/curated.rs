//! Which of the curated models the cards of a machine hold, before any of them is here.
//!
//! By the sum that a load is laid out with, from a model's published shape and its file's size: each card alone, else several
//! together, with room for a task's usual length.
//!
//! What a card has in all counts, not what is free: a choice means gigabytes on the disk and lasts, while a browser or a game
//! holds memory for an hour, and with free memory each start might choose, and fetch, another model. What others hold when the
//! model is loaded is the load's matter: its pool gets smaller, or it waits, or the CPU takes it. The driver and a desktop
//! hold something of every card at all times; a sixteenth is left to them.

use cfq_memory::CardRoom;
use cfq_proto::node::Device;

use crate::engine::candle::card::ledger::{ENOUGH_TOKENS, outlined};
use crate::models::curated::{CODING, Entry};

/// What of a card is not to be had, one part in so many.
const OTHERS: u64 = 16;
/// Ten times the compute capability of the oldest card that a build's kernels run on, as inference-node/cuda/build has it.
const OLDEST: &str = match option_env!("CUDA_COMPUTE_CAP") {
    Some(capability) => capability,
    None => "80",
};

/// The room a card has for a model from now on.
pub fn lasting_room(card: &Device) -> CardRoom {
    CardRoom { free: card.memory_total - card.memory_total / OTHERS, speed: 1.0, correction: 0 }
}

/// From the largest to the smallest, with room for [`ENOUGH_TOKENS`] on these cards.
pub fn curated_that_fit(rooms: &[CardRoom], sequences: u32) -> impl Iterator<Item = &'static Entry> {
    CODING.iter().rev().filter(move |entry| {
        let laid = outlined(&entry.shape, entry.bytes, rooms, sequences);
        laid.is_ok_and(|split| split.kv_tokens >= ENOUGH_TOKENS)
    })
}

/// Why the kernels of a build for cards do not run on this one, if they do not.
pub fn too_old(card: &Device) -> Option<String> {
    let oldest: u32 = OLDEST.parse().unwrap_or(80);
    let told = card.compute_capability.as_deref()?;
    let capability = told.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor): (u32, u32) = capability?;
    let old = major.saturating_mul(10).saturating_add(minor) < oldest;
    let least = format!("{}.{}", oldest / 10, oldest % 10);
    old.then(|| format!("{} has compute capability {told}, and a build for cards wants {least}", card.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(mib: &[u64]) -> Vec<CardRoom> {
        let card = |mib: &u64| Device { memory_total: mib << 20, ..crate::gpu::inventory().devices[0].clone() };
        mib.iter().map(|mib| lasting_room(&card(mib))).collect()
    }

    fn best(mib: &[u64]) -> Option<(u64, u64)> {
        let entry = curated_that_fit(&rooms(mib), 4).find(|entry| entry.for_anybody)?;
        Some((entry.smallest_card, entry.bytes / 1_000_000_000))
    }

    #[test]
    fn cards_get_what_they_hold() {
        assert_eq!(best(&[6_144]), Some((6, 3)), "RTX 2060, 3050");
        assert_eq!(best(&[8_188]), Some((8, 4)), "RTX 4060");
        assert_eq!(best(&[11_264]), Some((8, 4)), "2080 Ti");
        assert_eq!(best(&[12_288]), Some((12, 8)), "RTX 3060");
        assert_eq!(best(&[16_376]), Some((12, 8)), "RTX 4080");
        assert_eq!(best(&[24_564]), Some((24, 19)), "RTX 4090");
        assert_eq!(best(&[24_268]), Some((24, 19)), "as some drivers report 24 GB");
        // The licence of what is between those two is not for everybody.
        assert_eq!(best(&[4_096]), Some((3, 1)));
        assert_eq!(best(&[2_048]), None);
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn several_cards_hold_together_what_none_holds_alone() {
        assert_eq!(best(&[16_376, 16_376]), Some((24, 19)));
        // Each has a reserve of its own.
        assert_eq!(best(&[12_288, 12_288]), Some((12, 8)));
        assert_eq!(best(&[8_188, 8_188]), Some((12, 8)));
        assert_eq!(best(&[12_288, 2_048]), Some((12, 8)));
    }

    /// The table's smallest cards are what its words to people say; drivers report a little less than the box does.
    #[test]
    fn every_entry_fits_the_smallest_card_that_is_said_for_it() {
        for entry in CODING {
            let card = (entry.smallest_card << 30) / 1000 * 985;
            let fits = |bytes: u64| curated_that_fit(&rooms(&[bytes >> 20]), 4).any(|e| e == &entry);
            assert!(fits(card), "{} on {card}", entry.name);
        }
    }

    #[test]
    fn a_card_older_than_the_kernels_is_no_use() {
        let card = |capability: Option<&str>| Device {
            compute_capability: capability.map(str::to_owned),
            name: "a card".to_owned(),
            ..crate::gpu::inventory().devices[0].clone()
        };
        assert_eq!(["8.0", "8.6", "9.0", "12.0"].map(|c| too_old(&card(Some(c)))), [const { None }; 4]);
        assert_eq!(too_old(&card(None)), None);
        let old = too_old(&card(Some("7.5"))).unwrap();
        assert_eq!(old, "a card has compute capability 7.5, and a build for cards wants 8.0");
    }
}
