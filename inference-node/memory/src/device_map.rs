//! Device map: which layers of a model run on which GPU, for GPUs of different size and speed.
//!
//! A token passes through all layers one after another, so the time of a forward pass is the sum of the times of all
//! GPUs. Therefore GPUs are filled in the order of their bandwidth: each layer is placed on the fastest GPU with free
//! memory, and slower GPUs get only the remaining layers. No more GPUs are used than a sufficient KV pool needs,
//! because every boundary between GPUs costs a copy.
//!
//! Invariants, tested below: no GPU gets more than its free memory; the layer ranges are contiguous, in order, and
//! cover every layer once; the KV pool is the largest that fits the chosen GPUs.

use std::ops::{Range, RangeInclusive};

use crate::bytes::Bytes;
use crate::memory_estimate::MAX_OVERHEAD_PER_MILLE;

/// Free memory and speed of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuCapacity {
    /// Bytes of memory that the model may use.
    pub free_bytes: u64,
    /// Memory bandwidth, in any unit; it is only compared between the GPUs of one call.
    pub bandwidth: f64,
    /// Measured overhead of earlier loads on this GPU, in per mille of the weights; a value above
    /// [`MAX_OVERHEAD_PER_MILLE`] counts as [`MAX_OVERHEAD_PER_MILLE`].
    pub overhead_per_mille: u64,
}

impl GpuCapacity {
    /// Measured overhead of `weight_bytes` bytes of weights, in bytes.
    fn overhead_bytes(&self, weight_bytes: u64) -> u64 {
        let per_mille = self.overhead_per_mille.min(MAX_OVERHEAD_PER_MILLE);
        u64::try_from(u128::from(weight_bytes) * u128::from(per_mille) / 1000).unwrap_or(u64::MAX)
    }
}

/// Sizes of the parts of a model, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerStack {
    /// Size of each layer's weights.
    pub layer_bytes: Vec<u64>,
    /// Size of the embedding matrix, which is on the GPU of the first layer.
    pub embedding_bytes: u64,
    /// Size of the output matrix, which is on the GPU of the last layer.
    pub output_bytes: u64,
    /// Size of scratch memory and reserve on each GPU that is used.
    pub bytes_per_gpu: u64,
    /// Size of the keys and values of one token in one layer.
    pub kv_bytes_per_token_layer: u64,
}

/// The layers of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuShare {
    /// Index of the GPU in the slice given to [`plan_device_map`].
    pub gpu: usize,
    /// Range of layers on this GPU.
    pub layers: Range<usize>,
    /// Bytes of the weights on this GPU.
    pub weight_bytes: u64,
    /// Measured overhead of these weights, in bytes.
    pub overhead_bytes: u64,
    /// Bytes used in total, including the KV pool.
    pub total_bytes: u64,
}

/// A distribution of all layers over GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMap {
    /// The GPUs that have layers, in the order of the layers.
    pub shares: Vec<GpuShare>,
    /// Size of the KV pool, in tokens.
    pub kv_tokens: u64,
}

/// The GPUs are too small for the model; the message lists the terms of the estimate. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "needs {} for its layers, {} for embedding and output, {} of scratch memory and reserve on each GPU, and {} for a \
     KV pool of {kv_tokens} tokens; the GPUs have {}",
    Bytes(*layer_bytes), Bytes(*end_bytes), Bytes(*bytes_per_gpu), Bytes(*kv_bytes), list(free_bytes)
)]
pub struct NoDeviceMap {
    /// Size of the weights of all layers.
    pub layer_bytes: u64,
    /// Size of embedding and output matrix together.
    pub end_bytes: u64,
    /// Size of scratch memory and reserve on each GPU.
    pub bytes_per_gpu: u64,
    /// Size of the smallest useful KV pool, in bytes.
    pub kv_bytes: u64,
    /// Size of the smallest useful KV pool, in tokens.
    pub kv_tokens: u64,
    /// Free memory of each GPU.
    pub free_bytes: Vec<u64>,
}

fn list(free: &[u64]) -> String {
    let sizes: Vec<String> = free.iter().map(|free| Bytes(*free).to_string()).collect();
    if sizes.is_empty() { "nothing".to_owned() } else { sizes.join(" and ") }
}

/// Plans a device map with a KV pool that is as large as possible within the range `tokens`. Uses the fastest of the
/// GPUs that alone give a pool of at least `sufficient_tokens`; if no GPU does, the smallest number of the fastest GPUs
/// that together give such a pool; otherwise the GPUs that give the largest pool.
///
/// # Errors
/// [`NoDeviceMap`] if the model with the smallest pool of `tokens` does not fit on all GPUs together.
pub fn plan_device_map(
    stack: &LayerStack,
    gpus: &[GpuCapacity],
    tokens: RangeInclusive<u64>,
    sufficient_tokens: u64,
) -> Result<DeviceMap, NoDeviceMap> {
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&gpus[*a], &gpus[*b]);
        b.bandwidth.total_cmp(&a.bandwidth).then(b.free_bytes.cmp(&a.free_bytes))
    });
    let alone = order.iter().map(std::slice::from_ref);
    let together = (2..=order.len()).map(|count| &order[..count]);
    let mut best: Option<DeviceMap> = None;
    for chosen in alone.chain(together) {
        let Some(found) = largest_pool(stack, gpus, chosen, &tokens) else { continue };
        let tokens = found.kv_tokens;
        if best.as_ref().is_none_or(|best| tokens > best.kv_tokens) {
            best = Some(found);
        }
        if tokens >= sufficient_tokens {
            break;
        }
    }
    best.ok_or_else(|| {
        let sum = |values: &[u64]| values.iter().fold(0u64, |all, bytes| all.saturating_add(*bytes));
        let kv_per_token = stack.kv_bytes_per_token_layer.saturating_mul(stack.layer_bytes.len() as u64);
        NoDeviceMap {
            layer_bytes: sum(&stack.layer_bytes),
            end_bytes: stack.embedding_bytes.saturating_add(stack.output_bytes),
            bytes_per_gpu: stack.bytes_per_gpu,
            kv_bytes: kv_per_token.saturating_mul(*tokens.start()),
            kv_tokens: *tokens.start(),
            free_bytes: gpus.iter().map(|gpu| gpu.free_bytes).collect(),
        }
    })
}

/// Finds the device map with the largest KV pool, filling the GPUs in the order of `order`. `None` if the smallest pool
/// does not fit.
fn largest_pool(
    stack: &LayerStack,
    gpus: &[GpuCapacity],
    order: &[usize],
    tokens: &RangeInclusive<u64>,
) -> Option<DeviceMap> {
    let (mut low, mut high) = (*tokens.start(), (*tokens.end()).max(*tokens.start()));
    let mut best = DeviceMap { shares: fill(stack, gpus, order, low)?, kv_tokens: low };
    // Binary search: if a pool does not fit, no larger one does.
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match fill(stack, gpus, order, middle) {
            Some(shares) => {
                best = DeviceMap { shares, kv_tokens: middle };
                low = middle;
            }
            None => high = middle - 1,
        }
    }
    Some(best)
}

/// Assigns to each GPU in turn as many of the remaining layers as fit. `None` if layers are left over.
fn fill(stack: &LayerStack, gpus: &[GpuCapacity], order: &[usize], tokens: u64) -> Option<Vec<GpuShare>> {
    let layer_kv = stack.kv_bytes_per_token_layer.checked_mul(tokens)?;
    let count = stack.layer_bytes.len();
    let mut shares = Vec::new();
    let mut next = 0;
    for index in order {
        let (gpu, capacity) = (*index, &gpus[*index]);
        let mut share =
            GpuShare { gpu, layers: next..next, weight_bytes: 0, overhead_bytes: 0, total_bytes: stack.bytes_per_gpu };
        let mut kv = 0u64;
        while next < count {
            let mut weight_bytes = share.weight_bytes.checked_add(stack.layer_bytes[next])?;
            if next == 0 {
                weight_bytes = weight_bytes.checked_add(stack.embedding_bytes)?;
            }
            if next + 1 == count {
                weight_bytes = weight_bytes.checked_add(stack.output_bytes)?;
            }
            kv = kv.checked_add(layer_kv)?;
            let overhead_bytes = capacity.overhead_bytes(weight_bytes);
            let reserved = stack.bytes_per_gpu.checked_add(kv)?;
            let total_bytes = reserved.checked_add(weight_bytes)?.checked_add(overhead_bytes)?;
            if total_bytes > capacity.free_bytes {
                break;
            }
            next += 1;
            let layers = share.layers.start..next;
            share = GpuShare { gpu, layers, weight_bytes, overhead_bytes, total_bytes };
        }
        if !share.layers.is_empty() {
            shares.push(share);
        }
    }
    (next == count && count > 0).then_some(shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn stack(layers: usize, layer_bytes: u64) -> LayerStack {
        LayerStack {
            layer_bytes: vec![layer_bytes; layers],
            embedding_bytes: GIB / 4,
            output_bytes: GIB / 2,
            bytes_per_gpu: GIB / 2,
            kv_bytes_per_token_layer: 4096,
        }
    }

    fn gpu(free_gib: u64, bandwidth: f64) -> GpuCapacity {
        GpuCapacity { free_bytes: free_gib * GIB, bandwidth, overhead_per_mille: 0 }
    }

    fn used(map: &DeviceMap) -> Vec<usize> {
        map.shares.iter().map(|share| share.gpu).collect()
    }

    #[test]
    fn fastest_gpu_is_filled_first() {
        let gpus = [gpu(12, 360.0), gpu(24, 936.0)];
        let map = plan_device_map(&stack(40, GIB * 3 / 4), &gpus, 2048..=2048, 2048).unwrap();
        assert_eq!(used(&map), [1, 0]);
        assert_eq!((map.shares[0].layers.start, map.shares[1].layers.end), (0, 40));
        assert!(map.shares[0].layers.len() > map.shares[1].layers.len());
    }

    #[test]
    fn one_gpu_is_used_if_its_pool_is_sufficient() {
        let gpus = [gpu(24, 900.0), gpu(24, 900.0)];
        assert_eq!(plan_device_map(&stack(20, GIB / 2), &gpus, 2048..=1 << 20, 8192).unwrap().shares.len(), 1);
        // A larger pool needs the other GPU too.
        let map = plan_device_map(&stack(20, GIB / 2), &gpus, 2048..=1 << 20, 1 << 18).unwrap();
        assert_eq!(map.shares.len(), 2);
        assert!(map.kv_tokens >= 1 << 18);
    }

    #[test]
    fn one_large_slow_gpu_is_preferred_to_two() {
        let gpus = [gpu(8, 900.0), gpu(24, 300.0)];
        let map = plan_device_map(&stack(20, GIB / 2), &gpus, 2048..=8192, 2048).unwrap();
        assert_eq!(used(&map), [1]);
    }

    #[test]
    fn measured_overhead_moves_layers_to_the_next_gpu() {
        let gpus = |overhead_per_mille| [GpuCapacity { overhead_per_mille, ..gpu(24, 900.0) }, gpu(24, 300.0)];
        let on_first = |per_mille| {
            let map = plan_device_map(&stack(40, GIB * 3 / 4), &gpus(per_mille), 2048..=2048, 2048).unwrap();
            let share = map.shares[0].clone();
            let rest = share.total_bytes - share.weight_bytes - share.overhead_bytes;
            (share, rest)
        };
        let (plain, rest) = on_first(0);
        let (raised, _) = on_first(200);
        assert_eq!((plain.overhead_bytes, rest > GIB / 2), (0, true));
        assert!(raised.layers.end < plain.layers.end, "{raised:?} {plain:?}");
        assert_eq!(raised.overhead_bytes, raised.weight_bytes / 5);
        // The overhead is limited.
        assert_eq!(on_first(5000), on_first(MAX_OVERHEAD_PER_MILLE));
    }

    #[test]
    fn error_lists_the_terms_of_the_estimate() {
        let gpus = [gpu(12, 1.0), gpu(8, 1.0)];
        let refused = plan_device_map(&stack(40, GIB), &gpus, 2048..=4096, 2048).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "needs 40.0 GiB for its layers, 768.0 MiB for embedding and output, 512.0 MiB of scratch memory and \
             reserve on each GPU, and 320.0 MiB for a KV pool of 2048 tokens; the GPUs have 12.0 GiB and 8.0 GiB"
        );
        let refused = plan_device_map(&stack(1, 1), &[], 1..=1, 1).unwrap_err();
        assert!(refused.to_string().ends_with("the GPUs have nothing"));
    }

    proptest! {
        #[test]
        fn map_covers_all_layers_and_fits_every_gpu(
            layer_bytes in proptest::collection::vec(1u64..1 << 30, 1..80),
            gpus in proptest::collection::vec((0u64..48 << 30, 1u32..1000, 0u64..800), 0..5),
            embedding_bytes in 0u64..1 << 30, output_bytes in 0u64..1 << 30, bytes_per_gpu in 0u64..1 << 30,
            kv_bytes_per_token_layer in 1u64..1 << 14, min_tokens in 1u64..8192, span in 0u64..1 << 18,
            sufficient in 0u64..1 << 18,
        ) {
            let stack =
                LayerStack { layer_bytes, embedding_bytes, output_bytes, bytes_per_gpu, kv_bytes_per_token_layer };
            let capacity = |(free_bytes, bandwidth, overhead_per_mille)| {
                GpuCapacity { free_bytes, bandwidth: f64::from(bandwidth), overhead_per_mille }
            };
            let gpus: Vec<GpuCapacity> = gpus.into_iter().map(capacity).collect();
            let max_tokens = min_tokens + span;
            let tokens = min_tokens..=max_tokens;
            match plan_device_map(&stack, &gpus, tokens.clone(), sufficient) {
                Ok(map) => {
                    prop_assert!(tokens.contains(&map.kv_tokens));
                    let mut next = 0;
                    for share in &map.shares {
                        prop_assert_eq!(share.layers.start, next);
                        prop_assert!(!share.layers.is_empty());
                        next = share.layers.end;
                        let mut weights = stack.layer_bytes[share.layers.clone()].iter().sum::<u64>();
                        weights += if share.layers.start == 0 { embedding_bytes } else { 0 };
                        weights += if share.layers.end == stack.layer_bytes.len() { output_bytes } else { 0 };
                        let overhead = weights * gpus[share.gpu].overhead_per_mille.min(MAX_OVERHEAD_PER_MILLE) / 1000;
                        prop_assert_eq!((share.weight_bytes, share.overhead_bytes), (weights, overhead));
                        let kv = kv_bytes_per_token_layer * map.kv_tokens * share.layers.len() as u64;
                        prop_assert_eq!(share.total_bytes, bytes_per_gpu + kv + weights + overhead);
                        prop_assert!(share.total_bytes <= gpus[share.gpu].free_bytes);
                    }
                    prop_assert_eq!(next, stack.layer_bytes.len());
                    let order = used(&map);
                    let mut distinct = order.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    prop_assert_eq!(distinct.len(), map.shares.len(), "each GPU is used once");
                    // One more token does not fit in this order of GPUs, or exceeds the limit.
                    let larger = fill(&stack, &gpus, &order, map.kv_tokens + 1);
                    prop_assert!(larger.is_none() || map.kv_tokens == max_tokens);
                }
                Err(_) => {
                    // No single GPU fits it either.
                    for gpu in 0..gpus.len() {
                        prop_assert!(fill(&stack, &gpus, &[gpu], min_tokens).is_none());
                    }
                }
            }
        }
    }
}
