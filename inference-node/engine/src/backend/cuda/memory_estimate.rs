//! Memory estimate (VRAM) of a model on one or several GPUs, from its header alone.

use std::ops::RangeInclusive;

use cfq_memory::{
    DeviceMap, DoesNotFit, EstimateTerms, GpuCapacity, LayerStack, MemoryEstimate, ModelShape, NoDeviceMap, WeightSum,
    fit_kv_pool, plan_device_map,
};

use crate::backend::cuda::pass::{QUERIES_PER_THREAD_BLOCK, TARGET_THREAD_BLOCKS};
use crate::backend::cuda::weights::plan;
use crate::backend::forward::{MAX_DRAFT_ROWS, MAX_PREFILL_ROWS};
use crate::kv::{KV_BLOCK_TOKENS, MIN_POOL_TOKENS};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::memory_terms::{activation_shape, vector_bytes};
use crate::model::tensors::TensorRole;

/// Size of one element of a key or value vector on a GPU, in bytes: F16.
pub const ELEMENT_BYTES: u64 = 2;
/// Bytes kept free on each GPU for the driver's context, cuBLAS and its workspace, the kernels' code, and the
/// allocator's rounding. Not measured on a GPU yet.
const GPU_RESERVE_BYTES: u64 = 768 << 20;
/// Number of KV tokens per sequence above which the KV pool is large enough: no further GPU is used only to enlarge it.
pub const MIN_TOKENS_PER_SEQUENCE: u64 = 8192;

/// The memory estimate of a model on GPUs, and its device map.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuEstimate {
    /// Memory estimate, summed over all GPUs.
    pub estimate: MemoryEstimate,
    /// Layers and memory of each GPU.
    pub device_map: DeviceMap,
}

/// Why a model does not fit on the GPUs, with the memory it needs and the memory available.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DoesNotFitGpus {
    /// The model does not fit on the only GPU.
    #[error(transparent)]
    One(DoesNotFit),
    /// The model does not fit on all GPUs together.
    #[error(transparent)]
    Several(NoDeviceMap),
}

/// Assigns the layers of a model to GPUs and estimates the memory. `halves`: see [`super::weights::supports_half`]. The
/// outer error is that of the file; the inner error says why the model does not fit.
pub fn estimate_gpus(
    file: &ModelFile,
    architecture: &Architecture,
    capacities: &[GpuCapacity],
    sequences: u32,
    halves: bool,
) -> Result<Result<GpuEstimate, DoesNotFitGpus>, HeaderError> {
    let (stack, terms) = layer_stack(file, architecture, sequences, halves)?;
    let (tokens, sufficient) = pool_tokens(architecture.shape.context, sequences);
    let device_map = match plan_device_map(&stack, capacities, tokens.clone(), sufficient) {
        Ok(map) => map,
        Err(refused) => {
            let only = <&[GpuCapacity; 1]>::try_from(capacities).ok();
            let terms = |gpu: &GpuCapacity| EstimateTerms { overhead_per_mille: gpu.overhead_per_mille, ..terms };
            let one = only.and_then(|[gpu]| fit_kv_pool(terms(gpu), tokens, gpu.free_bytes).err());
            return Ok(Err(one.map_or(DoesNotFitGpus::Several(refused), DoesNotFitGpus::One)));
        }
    };
    let used = device_map.shares.len() as u64;
    let estimate = MemoryEstimate {
        weights: terms.weights.stored,
        overhead: device_map.shares.iter().map(|share| share.overhead_bytes).sum(),
        tables: terms.tables.saturating_mul(used),
        kv_per_token: terms.kv_per_token,
        // Rounded down to whole KV blocks.
        kv_tokens: device_map.kv_tokens / KV_BLOCK_TOKENS as u64 * KV_BLOCK_TOKENS as u64,
        scratch: terms.activations.saturating_mul(used),
        loading: 0,
        reserve: terms.reserve.saturating_mul(used),
    };
    Ok(Ok(GpuEstimate { estimate, device_map }))
}

/// Minimum and maximum size of the KV pool in tokens, and the size that is enough (see [`MIN_TOKENS_PER_SEQUENCE`]).
fn pool_tokens(context: u64, sequences: u32) -> (RangeInclusive<u64>, u64) {
    let sequences = u64::from(sequences.max(1));
    let whole = |tokens: u64| tokens.next_multiple_of(KV_BLOCK_TOKENS as u64);
    let max = context.saturating_mul(sequences).min(1 << 40);
    (whole(MIN_POOL_TOKENS.min(context))..=whole(max), max.min(MIN_TOKENS_PER_SEQUENCE.saturating_mul(sequences)))
}

/// Assigns layers to GPUs for a model of which only the shape and the file size in bytes are known. Assumes a typical
/// 4-bit file: the embedding is Q4_K, the output matrix Q6_K, and the rest of the file is spread evenly over the
/// layers.
///
/// # Errors
/// If no assignment of layers fits.
pub fn plan_map_for_shape(
    shape: &ModelShape,
    file_bytes: u64,
    capacities: &[GpuCapacity],
    sequences: u32,
) -> Result<DeviceMap, NoDeviceMap> {
    let (tokens, sufficient) = pool_tokens(shape.context, sequences);
    let matrix = |block: u64| shape.vocabulary.saturating_mul(shape.hidden).saturating_mul(block) / 256;
    let (embedding, output) = (matrix(144), matrix(210));
    let layer = file_bytes.saturating_sub(embedding.saturating_add(output)).div_ceil(shape.layers.max(1));
    let stack = LayerStack {
        layer_bytes: (0..shape.layers).map(|_| layer).collect(),
        embedding_bytes: embedding,
        output_bytes: output,
        bytes_per_gpu: activations(shape, u64::from(sequences.max(1))).saturating_add(GPU_RESERVE_BYTES),
        kv_bytes_per_token_layer: shape.kv_per_token(ELEMENT_BYTES) / shape.layers.max(1),
    };
    plan_device_map(&stack, capacities, tokens, sufficient)
}

/// Sizes of the model's parts in bytes: for each layer, as input of the device map, and summed, as terms of the
/// estimate.
fn layer_stack(
    file: &ModelFile,
    architecture: &Architecture,
    sequences: u32,
    halves: bool,
) -> Result<(LayerStack, EstimateTerms), HeaderError> {
    let no_kernel = || file.unsupported("its matrices have sizes that no kernel supports");
    let stored_bytes = |role: TensorRole, layer: u64| -> Result<u64, HeaderError> {
        let meta = architecture.tensor_meta(file, role, layer);
        meta.and_then(|meta| plan(&meta, halves)).map(|layout| layout.stored).ok_or_else(no_kernel)
    };
    let shape = &architecture.shape;
    let mut layers = Vec::new();
    for layer in 0..shape.layers {
        let mut sum = 0u64;
        for role in architecture.layer_matrices() {
            sum = sum.checked_add(stored_bytes(role, layer)?).ok_or_else(no_kernel)?;
        }
        layers.push(sum);
    }
    let embedding = stored_bytes(TensorRole::Embedding, 0)?;
    let output = if architecture.tied { 0 } else { stored_bytes(TensorRole::Output, 0)? };
    let stored = layers.iter().chain([&embedding, &output]).try_fold(0u64, |sum, bytes| sum.checked_add(*bytes));
    let activations = activations(&activation_shape(architecture), u64::from(sequences.max(1)));
    let tables = vector_bytes(file);
    let terms = EstimateTerms {
        weights: WeightSum { stored: stored.ok_or_else(no_kernel)?, transient: 0 },
        overhead_per_mille: 0,
        tables,
        kv_per_token: shape.kv_per_token(ELEMENT_BYTES),
        activations,
        reserve: GPU_RESERVE_BYTES,
    };
    let stack = LayerStack {
        layer_bytes: layers,
        embedding_bytes: embedding,
        output_bytes: output,
        bytes_per_gpu: activations.saturating_add(GPU_RESERVE_BYTES).saturating_add(tables),
        kv_bytes_per_token_layer: shape.kv_per_token(ELEMENT_BYTES) / shape.layers.max(1),
    };
    Ok((stack, terms))
}

/// Size of the activations of the largest forward pass in bytes, including the partial sums of sequences that are split
/// along the KV length.
fn activations(shape: &ModelShape, sequences: u64) -> u64 {
    let (rows, scored) = (MAX_PREFILL_ROWS as u64 + sequences, sequences + MAX_DRAFT_ROWS as u64);
    let vectors = (TARGET_THREAD_BLOCKS as u64).saturating_mul(2 * QUERIES_PER_THREAD_BLOCK as u64);
    let partial_sums = vectors.saturating_mul(shape.head_dim.saturating_add(2));
    shape.activations(rows, scored).saturating_add(partial_sums.saturating_mul(4))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::backend::cuda::model::{CudaModel, Stage};
    use crate::parity::{FAMILIES, folder};

    fn gpu(free_bytes: u64) -> GpuCapacity {
        GpuCapacity { free_bytes, bandwidth: 1.0, overhead_per_mille: 0 }
    }

    fn estimate(family: &str, gpus: &[GpuCapacity]) -> Result<GpuEstimate, DoesNotFitGpus> {
        let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
        estimate_gpus(&file, &Architecture::read(&file).unwrap(), gpus, 4, false).unwrap()
    }

    #[test]
    fn estimate_is_the_sum_over_the_gpus() {
        let one = estimate("llama", &[gpu(8 << 30)]).unwrap();
        let smallest = one.estimate.with_kv_tokens(MIN_POOL_TOKENS.min(512));
        assert_eq!(one.estimate.total(), one.device_map.shares[0].total_bytes);
        // Neither GPU alone has enough memory for the model.
        let raised = GpuCapacity { overhead_per_mille: 100, ..gpu(smallest.total() - 1) };
        let two = estimate("llama", &[raised, raised]).unwrap();
        assert_eq!(two.device_map.shares.len(), 2);
        // The sum of the shares exceeds the estimate by less than one KV block.
        let over = two.device_map.shares.iter().map(|share| share.total_bytes).sum::<u64>() - two.estimate.total();
        assert!(over < KV_BLOCK_TOKENS as u64 * two.estimate.kv_per_token, "{over}");
        assert!(two.estimate.overhead > two.estimate.weights / 11, "{}", two.estimate);
    }

    #[test]
    fn estimated_weights_equal_the_loaded_bytes() {
        for family in FAMILIES {
            for path in [folder(family), folder(family).join("model.gguf")] {
                let file = ModelFile::read(&path).unwrap();
                let architecture = Architecture::read(&file).unwrap();
                let fit = estimate_gpus(&file, &architecture, &[gpu(8 << 30)], 4, false).unwrap().unwrap();
                let stages = vec![Stage { device: Device::Cpu, layers: fit.device_map.shares[0].layers.clone() }];
                let model = CudaModel::load(&file, architecture, stages).unwrap();
                assert_eq!(fit.estimate.weights, model.stored_bytes() as u64, "{}", path.display());
                assert!(fit.estimate.total() <= 8 << 30);
            }
        }
    }

    /// The estimate from shape and file size exceeds the one from the header by at most the part of the file that is
    /// not weights: header and tokenizer.
    #[test]
    fn estimate_by_shape_and_size_matches_the_one_by_header() {
        for family in ["llama", "qwen2"] {
            let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
            let architecture = Architecture::read(&file).unwrap();
            let (shape, capacities) = (architecture.shape, [gpu(8 << 30)]);
            let by_header = estimate_gpus(&file, &architecture, &capacities, 4, true).unwrap().unwrap();
            let by_shape = plan_map_for_shape(&shape, file.size(), &capacities, 4).unwrap();
            let rest = file.size() - by_header.estimate.weights - by_header.estimate.tables;
            let (header, outline) = (by_header.device_map.shares[0].total_bytes, by_shape.shares[0].total_bytes);
            assert_eq!(by_shape.kv_tokens, by_header.device_map.kv_tokens);
            assert!((header..=header + rest + shape.layers).contains(&outline), "{family}: {outline} for {header}");
        }
    }

    #[test]
    fn mixture_counts_its_gathered_rows() {
        let scratch = |family: &str, experts: bool| {
            let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
            let mut architecture = Architecture::read(&file).unwrap();
            architecture.experts = architecture.experts.filter(|_| experts);
            let shape = activation_shape(&architecture);
            (activations(&shape, 4), 4 * (MAX_PREFILL_ROWS as u64 + 4) * shape.hidden)
        };
        let (with, gathered) = scratch("qwen3-moe", true);
        let (without, _) = scratch("qwen3-moe", false);
        // Three buffers: gathered inputs, the expert's outputs, and weighted outputs.
        assert!(with >= without + 3 * gathered, "{with} and {without}, a row of each {gathered}");
        assert_eq!(scratch("llama", true), scratch("llama", false));
    }

    #[test]
    fn too_small_gpus_are_refused_with_the_terms_of_the_estimate() {
        let refused = estimate("llama", &[gpu(512 << 20)]).unwrap_err().to_string();
        assert!(refused.contains("512.0 MiB are available") && refused.contains("reserve 768.0 MiB"), "{refused}");
        let refused = estimate("llama", &[gpu(512 << 20), gpu(1 << 20)]).unwrap_err().to_string();
        assert!(refused.ends_with("the GPUs have 512.0 MiB and 1.0 MiB"), "{refused}");
    }
}
