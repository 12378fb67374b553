//! Table of curated coding models, and the choice of those that fit the GPUs of a machine, without fetching them. With
//! the table, users start with a good model and need not search the hub.
//!
//! Sources of the table: repository, file name and size were not queried from the hub but taken from several
//! independent public projects that agree on them; a pull verifies them against the hub. The licences are taken from
//! the publisher's model cards, the shapes from its configuration files. None of these models has been tested with this
//! engine.
//!
//! Whether a model fits is computed from its shape and file size in the same way as for a load
//! ([`cfq_engine::cuda::plan_map_for_shape`]): on a single GPU, otherwise on several together, with a KV pool for
//! sequences of the usual length of a task.
//!
//! The calculation uses the total memory of a GPU, not its free memory: a browser or a game uses memory only for some
//! time, and with free memory each start might choose another model and download gigabytes. The load itself handles the
//! memory that other programs use at that time: the KV pool gets smaller, the load waits, or the model runs on the CPU.
//! The driver and the desktop always use some memory of a GPU; a sixteenth is left to them.

use cfq_engine::cuda::{MIN_TOKENS_PER_SEQUENCE, plan_map_for_shape};
use cfq_memory::{GpuCapacity, ModelShape};
use cfq_proto::model::ModelId;
use cfq_proto::node::Device;

/// Memory of a GPU that is left to the driver and the desktop, as a divisor of its total memory: a sixteenth.
const DESKTOP_MEMORY_DIVISOR: u64 = 16;

/// A recommended model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct CuratedModel {
    /// Display name.
    pub name: &'static str,
    /// Model id, as text.
    pub model: &'static str,
    /// Size of the model's file, in bytes.
    pub bytes: u64,
    /// Name of the model's licence.
    pub licence: &'static str,
    /// Whether the licence permits any use, so that the model may be chosen without asking the user.
    #[serde(skip)]
    pub unrestricted_licence: bool,
    /// Memory of the smallest GPU that can hold the model, in GiB.
    pub min_gpu_gib: u64,
    /// Dimensions of the model. The publisher's files contain an output matrix in addition to the embedding, even for
    /// models with tied weights.
    #[serde(skip)]
    pub shape: ModelShape,
}

/// Shape of a model of the Qwen2.5 family, which has a head dimension of 128. `heads` are the numbers of attention
/// heads and of KV heads.
const fn qwen(layers: u64, heads: [u64; 2], hidden: u64, feed_forward: u64, vocabulary: u64) -> ModelShape {
    let [heads, kv_heads] = heads;
    ModelShape { layers, heads, kv_heads, head_dim: 128, hidden, feed_forward, vocabulary, context: 32_768 }
}

const QWEN_7B: ModelShape = qwen(28, [28, 4], 3584, 18_944, 152_064);

/// The curated models, from the smallest to the largest.
pub const CURATED_MODELS: [CuratedModel; 6] = [
    CuratedModel {
        name: "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        licence: "Apache-2.0",
        unrestricted_licence: true,
        min_gpu_gib: 3,
        shape: qwen(28, [12, 2], 1536, 8960, 151_936),
    },
    CuratedModel {
        name: "Qwen2.5-Coder 3B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:qwen2.5-coder-3b-instruct-q4_k_m.gguf",
        bytes: 2_104_932_800,
        licence: "Qwen Research License (not for commercial use)",
        unrestricted_licence: false,
        min_gpu_gib: 4,
        shape: qwen(36, [16, 2], 2048, 11_008, 151_936),
    },
    CuratedModel {
        name: "Qwen2.5-Coder 7B Instruct, Q3_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q3_k_m.gguf",
        bytes: 3_808_391_104,
        licence: "Apache-2.0",
        unrestricted_licence: true,
        min_gpu_gib: 6,
        shape: QWEN_7B,
    },
    CuratedModel {
        name: "Qwen2.5-Coder 7B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q4_k_m.gguf",
        bytes: 4_683_073_536,
        licence: "Apache-2.0",
        unrestricted_licence: true,
        min_gpu_gib: 8,
        shape: QWEN_7B,
    },
    CuratedModel {
        name: "Qwen2.5-Coder 14B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf",
        bytes: 8_988_110_272,
        licence: "Apache-2.0",
        unrestricted_licence: true,
        min_gpu_gib: 12,
        shape: qwen(48, [40, 8], 5120, 13_824, 152_064),
    },
    CuratedModel {
        name: "Qwen2.5-Coder 32B Instruct, Q4_K_M",
        model: "hf:Qwen/Qwen2.5-Coder-32B-Instruct-GGUF:qwen2.5-coder-32b-instruct-q4_k_m.gguf",
        bytes: 19_851_335_872,
        licence: "Apache-2.0",
        unrestricted_licence: true,
        min_gpu_gib: 24,
        shape: qwen(64, [40, 8], 5120, 27_648, 152_064),
    },
];

impl CuratedModel {
    /// Returns the model id; `None` if the text in the table is not a valid id.
    pub fn id(&self) -> Option<ModelId> {
        self.model.parse().ok()
    }
}

/// Capacity of a GPU for choosing a model: its total memory without the share of the driver and the desktop.
pub fn nominal_capacity(gpu: &Device) -> GpuCapacity {
    let free = gpu.memory_total - gpu.memory_total / DESKTOP_MEMORY_DIVISOR;
    GpuCapacity { free_bytes: free, bandwidth: 1.0, overhead_per_mille: 0 }
}

/// The curated models that fit these GPUs with [`MIN_TOKENS_PER_SEQUENCE`], from the largest to the smallest.
pub fn fitting_models(gpus: &[GpuCapacity], sequences: u32) -> impl Iterator<Item = &'static CuratedModel> {
    CURATED_MODELS.iter().rev().filter(move |entry| {
        let map = plan_map_for_shape(&entry.shape, entry.bytes, gpus, sequences);
        map.is_ok_and(|map| map.kv_tokens >= MIN_TOKENS_PER_SEQUENCE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_has_a_model_id() {
        for entry in CURATED_MODELS {
            assert!(entry.id().is_some(), "{}", entry.model);
        }
        assert!(CURATED_MODELS.is_sorted_by_key(|entry| (entry.min_gpu_gib, entry.bytes)));
    }

    /// Checks file size and shape against each other: together they give the bits per weight, which are known for these
    /// quantisations.
    #[test]
    fn file_sizes_agree_with_the_shapes() {
        for CuratedModel { name, bytes, shape, .. } in CURATED_MODELS {
            let attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads);
            let layer = attention + 3 * shape.hidden * shape.feed_forward;
            let ends = shape.vocabulary * shape.hidden * 2;
            let bits = (bytes * 8) as f64 / (shape.layers * layer + ends) as f64;
            let expected = if name.ends_with("Q3_K_M") { 3.9..4.1 } else { 4.8..5.1 };
            assert!(expected.contains(&bits), "{name}: {bits}");
        }
    }

    fn capacities(mib: &[u64]) -> Vec<GpuCapacity> {
        let gpu = |mib: &u64| Device { memory_total: mib << 20, ..crate::gpu::inventory().devices[0].clone() };
        mib.iter().map(|mib| nominal_capacity(&gpu(mib))).collect()
    }

    /// Finds the largest model with an unrestricted licence that fits GPUs with `mib` MiB of memory each. Returns the
    /// memory of its minimum GPU, in GiB, and its file size, in GB.
    fn best(mib: &[u64]) -> Option<(u64, u64)> {
        let entry = fitting_models(&capacities(mib), 4).find(|entry| entry.unrestricted_licence)?;
        Some((entry.min_gpu_gib, entry.bytes / 1_000_000_000))
    }

    #[test]
    fn largest_fitting_model_is_found_for_each_gpu_size() {
        assert_eq!(best(&[6_144]), Some((6, 3)), "RTX 2060, 3050");
        assert_eq!(best(&[8_188]), Some((8, 4)), "RTX 4060");
        assert_eq!(best(&[11_264]), Some((8, 4)), "2080 Ti");
        assert_eq!(best(&[12_288]), Some((12, 8)), "RTX 3060");
        assert_eq!(best(&[16_376]), Some((12, 8)), "RTX 4080");
        assert_eq!(best(&[24_564]), Some((24, 19)), "RTX 4090");
        assert_eq!(best(&[24_268]), Some((24, 19)), "as some drivers report 24 GB");
        // The table has a model between these two sizes, but its licence is restricted.
        assert_eq!(best(&[4_096]), Some((3, 1)));
        assert_eq!(best(&[2_048]), None);
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn several_gpus_together_fit_larger_models() {
        assert_eq!(best(&[16_376, 16_376]), Some((24, 19)));
        // Each GPU has a reserve of its own.
        assert_eq!(best(&[12_288, 12_288]), Some((12, 8)));
        assert_eq!(best(&[8_188, 8_188]), Some((12, 8)));
        assert_eq!(best(&[12_288, 2_048]), Some((12, 8)));
    }

    /// Checks each entry with 1.5 % less memory than its minimum GPU nominally has, because drivers report a little
    /// less.
    #[test]
    fn every_entry_fits_its_minimum_gpu() {
        for entry in CURATED_MODELS {
            let bytes = (entry.min_gpu_gib << 30) / 1000 * 985;
            let fits = fitting_models(&capacities(&[bytes >> 20]), 4).any(|e| e == &entry);
            assert!(fits, "{} in {bytes} bytes", entry.name);
        }
    }
}
