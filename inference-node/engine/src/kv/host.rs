//! Storage of KV blocks in host memory, as F32. A block's memory is allocated at its first use and is not freed
//! afterwards.

use candle_core::Result;
use cfq_memory::BlockId;

use crate::kv::{BlockMemory, BlockValues, KV_BLOCK_TOKENS, KvShape};

/// Block storage in host memory.
pub struct HostBlocks {
    pub(super) shape: KvShape,
    /// The memory of each block, empty before its first use. Its dimensions are (layer, key or value, head, position,
    /// stride), so that the positions of a head are contiguous.
    pub(super) blocks: Vec<Vec<f32>>,
}

impl HostBlocks {
    /// Creates the storage of `blocks` blocks, none of them allocated yet.
    pub fn new(shape: KvShape, blocks: usize) -> Self {
        Self { shape, blocks: vec![Vec::new(); blocks] }
    }
}

impl BlockMemory for HostBlocks {
    fn prepare(&mut self, block: BlockId) {
        let memory = &mut self.blocks[block.index()];
        if memory.is_empty() {
            memory.resize(self.shape.values(), 0.0);
        }
    }

    fn copy(&mut self, from: BlockId, to: BlockId, positions: usize) -> Result<()> {
        let Ok([from, to]) = self.blocks.get_disjoint_mut([from.index(), to.index()]) else { return Ok(()) };
        let stride = self.shape.stride();
        for (from, to) in from.chunks_exact(KV_BLOCK_TOKENS * stride).zip(to.chunks_exact_mut(KV_BLOCK_TOKENS * stride))
        {
            to[..positions * stride].copy_from_slice(&from[..positions * stride]);
        }
        Ok(())
    }

    fn read_block(&self, block: BlockId) -> Result<BlockValues> {
        Ok(BlockValues::F32(self.blocks[block.index()].clone()))
    }

    fn write_block(&mut self, block: BlockId, values: &BlockValues) -> Result<()> {
        match values {
            BlockValues::F32(values) if values.len() == self.shape.values() => {
                self.blocks[block.index()].copy_from_slice(values);
                Ok(())
            }
            BlockValues::F32(_) | BlockValues::Half(_) => {
                candle_core::bail!("the given block differs from this KV pool's blocks in number format or size")
            }
        }
    }
}
