//! The KV cache: keys and values in blocks that sequences with a common prefix share.
//!
//! [`cfq_memory::BlockTable`] decides which block holds what; [`KvPool`] applies its decisions to the storage of the
//! blocks ([`BlockMemory`]; in host memory [`HostBlocks`]). Whole blocks are shared. Of a block that matches in part,
//! the matching positions are copied, which is far cheaper than computing them. Evicted blocks can be offloaded to a
//! second tier in host memory ([`KvOffload`]) and return from there when a sequence begins with them.

mod block_memory;
mod host;
mod offload;
mod pool;
#[cfg(test)]
mod tier_tests;

use cfq_memory::{BlockId, PrefixId};

use crate::backend::cpu::simd::LANES;
pub use crate::kv::block_memory::{BlockMemory, BlockValues};
pub use crate::kv::host::{HostBlocks, KvView};
pub use crate::kv::offload::{HostKvCache, KvOffload, KvOffloadFormat};
pub use crate::kv::pool::KvPool;

/// Positions of a block: small enough to share most of a conversation's prefix, large enough that the attention spends
/// no time on walking blocks.
pub const BLOCK: usize = 32;
/// Smallest useful pool, in tokens: a prompt with one file, and its answer.
pub const MIN_POOL_TOKENS: u64 = 2048;

/// Sizes common to all blocks of a pool.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Values of a head's vector.
    pub head_dim: usize,
}

impl KvShape {
    /// Values of one head's vector, padded to whole lanes.
    pub fn stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Values of one block.
    fn values(&self) -> usize {
        2 * self.layers * self.heads * BLOCK * self.stride()
    }
}

/// The block table of one sequence.
#[derive(Debug)]
pub struct SequenceKv {
    blocks: Vec<BlockId>,
    /// Number of leading whole blocks that are in the pool's prefix cache.
    cached: usize,
    /// The prefix of the cached blocks.
    prefix: PrefixId,
    /// Positions filled.
    len: usize,
    /// Whether RoPE uses the long-context frequencies.
    pub long_context: bool,
}

impl SequenceKv {
    /// Number of filled positions.
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

    /// A block table that repeats this one's blocks to `len` filled positions with room for `new` more; for measuring
    /// only. It owns no blocks. A pass over it overwrites this sequence's values, so neither may be used for anything
    /// else afterwards.
    pub fn repeated(&self, len: usize, new: usize) -> Self {
        let blocks = self.blocks.iter().copied().cycle().take((len + new).div_ceil(BLOCK)).collect();
        Self { len, blocks, cached: 0, prefix: self.prefix, long_context: self.long_context }
    }
}
