//! Storage of KV blocks in host memory, as F32. A block's memory is allocated at its first use and is not freed
//! afterwards.

use candle_core::Result;
use cfq_memory::BlockId;

use crate::kv::{BLOCK, BlockMemory, BlockValues, KvPool, KvShape, SequenceKv};

/// Block storage in host memory.
pub struct HostBlocks {
    shape: KvShape,
    /// The memory of each block, empty before its first use. Its dimensions are (layer, key or value, head, position,
    /// stride), so that the positions of a head are contiguous.
    blocks: Vec<Vec<f32>>,
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
        for (from, to) in from.chunks_exact(BLOCK * stride).zip(to.chunks_exact_mut(BLOCK * stride)) {
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
                candle_core::bail!("the values are not those of a block of this pool")
            }
        }
    }
}

impl KvPool {
    /// Writes the keys and values of new positions in one layer. `keys` and `values` have the dimensions (new
    /// positions, KV heads, head dim). [`Self::advance`] counts the positions afterwards. Returns false and writes
    /// nothing if the sequence has too few blocks; [`Self::grow`] allocates them.
    pub fn write(&mut self, sequence: &SequenceKv, layer: usize, keys: &[f32], values: &[f32]) -> bool {
        let KvShape { heads, head_dim, .. } = self.memory.shape;
        let row = heads * head_dim;
        let new = keys.len() / row;
        if sequence.blocks.len() * BLOCK < sequence.len + new || keys.len() != values.len() {
            return false;
        }
        let stride = self.memory.shape.stride();
        for (which, from) in [keys, values].into_iter().enumerate() {
            for (at, row) in (sequence.len..).zip(from.chunks_exact(row)) {
                let block = &mut self.memory.blocks[sequence.blocks[at / BLOCK].index()];
                for (head, vector) in row.chunks_exact(head_dim).enumerate() {
                    let to = (((layer * 2 + which) * heads + head) * BLOCK + at % BLOCK) * stride;
                    block[to..to + head_dim].copy_from_slice(vector);
                }
            }
        }
        true
    }

    /// Returns a view of the keys and values of one sequence in one layer.
    pub fn view<'a>(&'a self, sequence: &'a SequenceKv, layer: usize) -> KvView<'a> {
        KvView { memory: &self.memory, blocks: &sequence.blocks, layer }
    }
}

/// Keys and values of one sequence in one layer.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    memory: &'a HostBlocks,
    blocks: &'a [BlockId],
    layer: usize,
}

impl<'a> KvView<'a> {
    /// Keys of `head` in the sequence's `block`th block: (BLOCK, stride).
    #[inline(always)]
    pub fn keys(&self, head: usize, block: usize) -> &'a [f32] {
        self.part(0, head, block)
    }

    /// Values of `head` in the sequence's `block`th block: (BLOCK, stride).
    #[inline(always)]
    pub fn values(&self, head: usize, block: usize) -> &'a [f32] {
        self.part(1, head, block)
    }

    #[inline(always)]
    fn part(&self, which: usize, head: usize, block: usize) -> &'a [f32] {
        let shape = self.memory.shape;
        let length = BLOCK * shape.stride();
        let from = ((self.layer * 2 + which) * shape.heads + head) * length;
        &self.memory.blocks[self.blocks[block].index()][from..from + length]
    }
}
