//! The KV cache: keys and values in blocks that sequences with a common prefix share.
//!
//! [`cfq_memory::BlockTable`] decides which block holds what; [`KvPool`] applies its decisions to the storage of the
//! blocks ([`BlockMemory`]; in host memory [`HostBlocks`]). Whole blocks are shared. If only the first positions of a
//! block match, these are copied into a new block (copy-on-write), which is far cheaper than computing them. Evicted
//! blocks can be offloaded to a second tier in host memory ([`KvOffload`]) and are read back when a sequence begins
//! with the same tokens.

mod block_memory;
mod host;
mod host_view;
mod offload;
mod pool;
#[cfg(test)]
mod tier_tests;

use cfq_memory::{BlockId, PrefixId};

use crate::backend::cpu::simd::LANES;
pub use crate::kv::block_memory::{BlockMemory, BlockValues};
pub use crate::kv::host::HostBlocks;
pub use crate::kv::host_view::KvView;
pub use crate::kv::offload::{HostKvCache, KvOffload, KvOffloadFormat};
pub use crate::kv::pool::KvPool;

/// Number of positions (tokens) in a KV block: small enough that most of a common prefix consists of whole blocks,
/// which can be shared; large enough that iterating over the blocks costs attention no noticeable time.
pub const KV_BLOCK_TOKENS: usize = 32;
/// Smallest useful KV pool, in tokens: enough for a prompt with one file and the output.
pub const MIN_POOL_TOKENS: u64 = 2048;

/// Sizes common to all blocks of a pool.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Dimension of one attention head.
    pub head_dim: usize,
}

impl KvShape {
    /// Distance between the vectors of two positions, in elements: the head dimension, padded to a multiple of the SIMD
    /// width.
    pub fn stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Number of elements in one block, keys and values of all layers together.
    fn values(&self) -> usize {
        2 * self.layers * self.heads * KV_BLOCK_TOKENS * self.stride()
    }
}

/// The block table of one sequence.
#[derive(Debug)]
pub struct SequenceKv {
    blocks: Vec<BlockId>,
    /// Number of leading whole blocks that are in the pool's prefix cache.
    cached: usize,
    /// Id of the prefix that ends with the last of the cached blocks.
    prefix: PrefixId,
    /// Number of filled positions, whose keys and values are computed.
    len: usize,
    /// Whether RoPE uses the long-context frequencies.
    pub long_context: bool,
}

impl SequenceKv {
    /// Number of filled positions, whose keys and values are computed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of allocated blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The allocated blocks in the order of their positions.
    pub fn block_table(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Creates a long block table for measurements: it repeats the blocks of this sequence until there are enough for
    /// `len` filled and `new` more positions. The table holds no references to the blocks. A forward pass with it
    /// overwrites the keys and values of this sequence, so neither the table nor this sequence may be used for anything
    /// but measurements afterwards.
    pub fn repeated(&self, len: usize, new: usize) -> Self {
        let blocks = self.blocks.iter().copied().cycle().take((len + new).div_ceil(KV_BLOCK_TOKENS)).collect();
        Self { len, blocks, cached: 0, prefix: self.prefix, long_context: self.long_context }
    }
}
