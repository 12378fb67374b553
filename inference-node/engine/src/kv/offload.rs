//! KV offload: keys and values of evicted blocks in host memory.
//!
//! All models share one [`HostKvCache`]. Every pool stores its evicted blocks in this cache. For a new sequence, the
//! pool first looks in the cache for the prefix; only what is not there is computed again. Blocks that must stay
//! bit-exact (of F32 models and of deterministic sequences) are stored unchanged; others are stored in a smaller format
//! if one is configured. While a block is moved between a pool and the cache, it counts towards the size of neither.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_memory::{BlockKey, CacheNamespace, OffloadIndex, OffloadNodeId};
use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};

use crate::kv::{BlockValues, KV_BLOCK_TOKENS};

/// Storage format of offloaded keys and values that need not stay bit-exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvOffloadFormat {
    /// Stored unchanged. The default, because even 16-bit floats changed the texts of a small model
    /// (docs/benchmarks.md).
    #[default]
    Exact,
    /// 16-bit floats.
    F16,
    /// 8-bit integers with one scale per group of 32 numbers.
    Q8,
}

/// Number of integers that share a scale in [`KvOffloadFormat::Q8`].
const Q8_GROUP_VALUES: usize = 32;

/// The contents of a block in its storage format.
#[derive(Debug, Clone)]
enum PackedBlock {
    Exact(BlockValues),
    F16(Vec<f16>),
    Q8 { scales: Vec<f32>, values: Vec<i8> },
}

impl PackedBlock {
    fn new(values: BlockValues, format: KvOffloadFormat) -> Self {
        let (BlockValues::F32(plain), KvOffloadFormat::F16 | KvOffloadFormat::Q8) = (&values, format) else {
            return Self::Exact(values);
        };
        // Blocks that contain NaN or numbers beyond the range of F16 are stored unchanged, since a smaller format could
        // not represent them.
        if plain.iter().any(|value| value.abs() > f16::MAX.to_f32() || value.is_nan()) {
            return Self::Exact(values);
        }
        if format == KvOffloadFormat::F16 {
            let mut narrow = vec![f16::ZERO; plain.len()];
            narrow.convert_from_f32_slice(plain);
            return Self::F16(narrow);
        }
        let (mut scales, mut narrow) = (Vec::new(), Vec::with_capacity(plain.len()));
        for group in plain.chunks(Q8_GROUP_VALUES) {
            let scale = group.iter().fold(0.0f32, |max, value| max.max(value.abs())) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            scales.push(scale);
            narrow.extend(group.iter().map(|value| (value * inverse).round() as i8));
        }
        Self::Q8 { scales, values: narrow }
    }

    fn unpack(self) -> BlockValues {
        match self {
            Self::Exact(values) => values,
            Self::F16(narrow) => {
                let mut plain = vec![0.0; narrow.len()];
                narrow.convert_to_f32_slice(&mut plain);
                BlockValues::F32(plain)
            }
            Self::Q8 { scales, values } => {
                let groups = values.chunks(Q8_GROUP_VALUES).zip(scales);
                BlockValues::F32(
                    groups.flat_map(|(group, scale)| group.iter().map(move |v| f32::from(*v) * scale)).collect(),
                )
            }
        }
    }

    fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Exact(BlockValues::F32(values)) => size_of_val(&values[..]),
            Self::Exact(BlockValues::Half(values)) => size_of_val(&values[..]),
            Self::F16(values) => size_of_val(&values[..]),
            Self::Q8 { scales, values } => size_of_val(&scales[..]) + size_of_val(&values[..]),
        };
        bytes as u64
    }
}

/// The cache of offloaded KV blocks in host memory, shared by all models of a process.
#[derive(Debug)]
pub struct HostKvCache {
    index: Mutex<OffloadIndex<PackedBlock>>,
    format: KvOffloadFormat,
}

impl HostKvCache {
    /// Creates a cache of at most `bytes` bytes; `None` if `bytes` is zero.
    pub fn new(bytes: u64, format: KvOffloadFormat) -> Option<Arc<Self>> {
        (bytes > 0).then(|| Arc::new(Self { index: Mutex::new(OffloadIndex::new(bytes, KV_BLOCK_TOKENS)), format }))
    }

    fn index(&self) -> MutexGuard<'_, OffloadIndex<PackedBlock>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maximum size, in bytes.
    pub fn capacity(&self) -> u64 {
        self.index().capacity()
    }

    /// Size in use, in bytes, including the index.
    pub fn bytes(&self) -> u64 {
        self.index().bytes()
    }
}

/// One pool's access to the host KV cache.
#[derive(Debug, Clone)]
pub struct KvOffload {
    cache: Arc<HostKvCache>,
    /// Identifies the model, its file and its device. Keys and values depend on these, the tokens and the salt.
    model: Arc<str>,
    /// Whether every block is stored unchanged.
    lossless: bool,
}

impl KvOffload {
    /// Creates the access of one pool to `cache`. `model` identifies the model, its file and its device. With
    /// `lossless`, all blocks of the pool are stored unchanged.
    pub fn new(cache: Arc<HostKvCache>, model: &str, lossless: bool) -> Self {
        Self { cache, model: model.into(), lossless }
    }

    /// Number of offloaded tokens of this model.
    pub fn tokens(&self) -> u64 {
        self.cache.index().tokens(&self.model)
    }

    fn namespace(&self, salt: u8) -> CacheNamespace {
        CacheNamespace { model: self.model.clone(), salt }
    }

    /// Stores the block of `key` unless it is already stored. `values` reads the contents of the block and is called
    /// only if needed.
    pub(super) fn store(
        &self,
        key: &BlockKey,
        lossless: bool,
        values: impl FnOnce() -> candle_core::Result<BlockValues>,
    ) {
        let namespace = self.namespace(key.salt);
        if self.cache.index().touch(&namespace, &key.tokens) {
            return;
        }
        // The block is read and packed without holding the lock, so that the pools of other models do not wait.
        let format = if lossless || self.lossless { KvOffloadFormat::Exact } else { self.cache.format };
        match values() {
            Ok(values) => {
                let packed = PackedBlock::new(values, format);
                let bytes = packed.bytes();
                self.cache.index().insert(&namespace, &key.tokens, packed, bytes);
            }
            Err(error) => tracing::warn!(%error, "cannot offload an evicted KV block; it is computed again if needed"),
        }
    }

    /// Index node of the prefix `tokens`, whose length is a multiple of the block size.
    pub(super) fn node_of(&self, salt: u8, tokens: &[u32]) -> Option<OffloadNodeId> {
        self.cache.index().lookup(&self.namespace(salt), tokens)
    }

    /// Whether a whole block that holds `tokens` is stored after the prefix `node`.
    pub(super) fn contains(&self, node: OffloadNodeId, tokens: &[u32]) -> bool {
        self.cache.index().longest_match(node, tokens).is_some_and(|(count, _)| count == KV_BLOCK_TOKENS)
    }

    /// Removes the block that holds `tokens` after the prefix `node`; returns its index node and its contents.
    pub(super) fn take(&self, node: OffloadNodeId, tokens: &[u32]) -> Option<(OffloadNodeId, BlockValues)> {
        let (node, packed) = self.cache.index().take(node, tokens)?;
        Some((node, packed.unpack()))
    }

    /// Finds the block after the prefix `node` that shares the most leading positions with `tokens`. Returns the number
    /// of shared positions and a copy of the block's contents; `None` if fewer than `min` positions match.
    pub(super) fn partial_match(
        &self,
        node: OffloadNodeId,
        tokens: &[u32],
        min: usize,
    ) -> Option<(usize, BlockValues)> {
        let index = self.cache.index();
        let (count, packed) = index.longest_match(node, tokens).filter(|(count, _)| *count >= min)?;
        let packed = packed.clone();
        drop(index);
        Some((count, packed.unpack()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Vec<f32> {
        (0..1000).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.37).collect()
    }

    #[test]
    fn packing_error_is_within_the_precision_of_the_format() {
        let largest = plain().iter().fold(0.0f32, |a, b| a.max(b.abs()));
        for (format, bytes, error) in [
            (KvOffloadFormat::Exact, 4000, 0.0),
            (KvOffloadFormat::F16, 2000, 1.0 / 2048.0),
            (KvOffloadFormat::Q8, 1128, 1.0 / 253.0),
        ] {
            let packed = PackedBlock::new(BlockValues::F32(plain()), format);
            assert_eq!(packed.bytes(), bytes);
            let BlockValues::F32(back) = packed.unpack() else { panic!("{format:?}") };
            let max_error = plain().iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(max_error <= error * largest, "{format:?}: {max_error}");
            if format == KvOffloadFormat::F16 {
                // Packing a second time loses nothing more.
                let again = PackedBlock::new(BlockValues::F32(back.clone()), format).unpack();
                assert_eq!(again, BlockValues::F32(back));
            }
        }
    }

    #[test]
    fn values_beyond_two_bytes_are_stored_unchanged() {
        for extreme in [70_000.0, f32::INFINITY, f32::NEG_INFINITY] {
            for format in [KvOffloadFormat::F16, KvOffloadFormat::Q8] {
                let values = BlockValues::F32([plain(), vec![extreme]].concat());
                assert_eq!(PackedBlock::new(values.clone(), format).unpack(), values);
            }
        }
        let half = BlockValues::Half(vec![1, 2, 3]);
        assert_eq!(PackedBlock::new(half.clone(), KvOffloadFormat::Q8).unpack(), half);
    }
}
