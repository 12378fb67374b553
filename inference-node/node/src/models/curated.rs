//! Coding models to begin with, by the memory of a card: so that nobody has to know the hub to get a first good one.
//!
//! What stands behind the entries, since no hub could be asked when they were written: repository, file name and size are
//! those that several independent public projects record for these files and agree on (a pull asks the hub itself, and
//! checks); the licences are what the publisher's model cards say. None was run here. The smallest card is arithmetic: the
//! file, a KV cache of 8,192 tokens in 16 bits, and 0.8 GB for everything else.

use cfq_proto::model::ModelId;

/// One recommendation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Entry {
    pub name: &'static str,
    /// As a model is written.
    pub model: &'static str,
    /// Of the file, as recorded by others.
    pub bytes: u64,
    pub licence: &'static str,
    /// GiB of the smallest card that holds it.
    pub smallest_card: u64,
}

/// From the smallest to the largest.
pub const CODING: [Entry; 5] = [
    Entry {
        name: "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        licence: "Apache-2.0",
        smallest_card: 3,
    },
    Entry {
        name: "Qwen2.5-Coder 3B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:qwen2.5-coder-3b-instruct-q4_k_m.gguf",
        bytes: 2_104_932_800,
        licence: "Qwen Research License (not for commercial use)",
        smallest_card: 4,
    },
    Entry {
        name: "Qwen2.5-Coder 7B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q4_k_m.gguf",
        bytes: 4_683_073_536,
        licence: "Apache-2.0",
        smallest_card: 8,
    },
    Entry {
        name: "Qwen2.5-Coder 14B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf",
        bytes: 8_988_110_272,
        licence: "Apache-2.0",
        smallest_card: 12,
    },
    Entry {
        name: "Qwen2.5-Coder 32B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-32B-Instruct-GGUF:qwen2.5-coder-32b-instruct-q4_k_m.gguf",
        bytes: 19_851_335_872,
        licence: "Apache-2.0",
        smallest_card: 24,
    },
];

/// The largest that a card of so many bytes holds. Drivers report a little less than what is printed on the box.
pub fn for_card(bytes: u64) -> Option<&'static Entry> {
    CODING.iter().rev().find(|entry| bytes >= (entry.smallest_card << 30) / 100 * 92)
}

impl Entry {
    pub fn id(&self) -> Option<ModelId> {
        self.model.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_name_that_can_be_pulled_and_fits_its_card() {
        // Layers, KV heads; heads are 128 wide.
        let shapes = [(28, 2), (36, 2), (28, 4), (48, 8), (64, 8)];
        for (entry, (layers, heads)) in CODING.iter().zip(shapes) {
            assert!(entry.id().is_some(), "{}", entry.model);
            let per_token = 2 * layers * heads * 128 * 2;
            let need = entry.bytes + 8_192 * per_token + 800_000_000;
            let card = (entry.smallest_card << 30) / 100 * 92;
            assert!(need <= card, "{}: {need} > {card}", entry.name);
        }
        assert!(CODING.is_sorted_by_key(|entry| entry.smallest_card));
    }

    #[test]
    fn cards_get_what_they_hold() {
        let card = |mib: u64| for_card(mib << 20).map(|entry| entry.smallest_card);
        assert_eq!(card(12_288), Some(12), "RTX 3060");
        assert_eq!(card(11_264), Some(8), "2080 Ti: 11 GB");
        assert_eq!(card(8_188), Some(8), "RTX 4060");
        assert_eq!(card(6_144), Some(4), "RTX 2060");
        assert_eq!(card(24_564), Some(24), "RTX 4090");
        assert_eq!(card(24_268), Some(24), "as some drivers report 24 GB");
        assert_eq!(card(1_024), None);
    }
}
