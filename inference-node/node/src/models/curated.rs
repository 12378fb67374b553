//! Coding models to begin with, by the memory of a card: so that nobody has to know the hub to get a first good one.
//!
//! What stands behind the entries, since no hub could be asked when they were written: repository, file name and size are
//! those that several independent public projects record for these files and agree on (a pull asks the hub itself, and
//! checks); the licences are what the publisher's model cards say, the shapes what its configurations say. None was run
//! here. What a card holds is reckoned from shape and size by the sum that a load is laid out with
//! ([`crate::engine::candle::curated_that_fit`], which also holds the smallest cards below to it).

use cfq_memory::Shape;
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
    /// Its licence lets anybody use it for anything: it may be chosen for somebody who was not asked.
    #[serde(skip)]
    pub for_anybody: bool,
    /// GiB of the smallest card that holds it.
    pub smallest_card: u64,
    /// The publisher's files have an output matrix beside the embedding, also of models that need none.
    #[serde(skip)]
    pub shape: Shape,
}

/// Of the Qwen2.5 family: heads are 128 wide.
const fn qwen(layers: u64, heads: [u64; 2], hidden: u64, feed_forward: u64, vocabulary: u64) -> Shape {
    let [heads, kv_heads] = heads;
    Shape { layers, heads, kv_heads, head_dim: 128, hidden, feed_forward, vocabulary, context: 32_768 }
}

const QWEN_7B: Shape = qwen(28, [28, 4], 3584, 18_944, 152_064);

/// From the smallest to the largest.
pub const CODING: [Entry; 6] = [
    Entry {
        name: "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        licence: "Apache-2.0",
        for_anybody: true,
        smallest_card: 3,
        shape: qwen(28, [12, 2], 1536, 8960, 151_936),
    },
    Entry {
        name: "Qwen2.5-Coder 3B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:qwen2.5-coder-3b-instruct-q4_k_m.gguf",
        bytes: 2_104_932_800,
        licence: "Qwen Research License (not for commercial use)",
        for_anybody: false,
        smallest_card: 4,
        shape: qwen(36, [16, 2], 2048, 11_008, 151_936),
    },
    Entry {
        name: "Qwen2.5-Coder 7B Instruct, Q3_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q3_k_m.gguf",
        bytes: 3_808_391_104,
        licence: "Apache-2.0",
        for_anybody: true,
        smallest_card: 6,
        shape: QWEN_7B,
    },
    Entry {
        name: "Qwen2.5-Coder 7B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q4_k_m.gguf",
        bytes: 4_683_073_536,
        licence: "Apache-2.0",
        for_anybody: true,
        smallest_card: 8,
        shape: QWEN_7B,
    },
    Entry {
        name: "Qwen2.5-Coder 14B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf",
        bytes: 8_988_110_272,
        licence: "Apache-2.0",
        for_anybody: true,
        smallest_card: 12,
        shape: qwen(48, [40, 8], 5120, 13_824, 152_064),
    },
    Entry {
        name: "Qwen2.5-Coder 32B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-32B-Instruct-GGUF:qwen2.5-coder-32b-instruct-q4_k_m.gguf",
        bytes: 19_851_335_872,
        licence: "Apache-2.0",
        for_anybody: true,
        smallest_card: 24,
        shape: qwen(64, [40, 8], 5120, 27_648, 152_064),
    },
];

impl Entry {
    pub fn id(&self) -> Option<ModelId> {
        self.model.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_name_that_can_be_pulled() {
        for entry in CODING {
            assert!(entry.id().is_some(), "{}", entry.model);
        }
        assert!(CODING.is_sorted_by_key(|entry| (entry.smallest_card, entry.bytes)));
    }

    /// Two numbers of the table that must agree: so many bits for each weight are what these mixtures come to.
    #[test]
    fn sizes_are_those_of_files_of_such_shapes() {
        for Entry { name, bytes, shape, .. } in CODING {
            let attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads);
            let layer = attention + 3 * shape.hidden * shape.feed_forward;
            let ends = shape.vocabulary * shape.hidden * 2;
            let bits = (bytes * 8) as f64 / (shape.layers * layer + ends) as f64;
            let expected = if name.ends_with("Q3_K_M") { 3.9..4.1 } else { 4.8..5.1 };
            assert!(expected.contains(&bits), "{name}: {bits}");
        }
    }
}
