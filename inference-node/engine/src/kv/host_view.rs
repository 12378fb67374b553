//! Writing and reading of a sequence's keys and values in a pool whose blocks are in host memory.

use cfq_memory::BlockId;

use crate::kv::{HostBlocks, KV_BLOCK_TOKENS, KvPool, KvShape, SequenceKv};

impl KvPool {
    /// Writes the keys and values of new positions in one layer. `keys` and `values` have the dimensions (new
    /// positions, KV heads, head dim). [`Self::grow`] must be called before, to allocate the blocks, and
    /// [`Self::advance`] after all layers are written, to count the positions as filled. Returns false and writes
    /// nothing if the sequence has too few blocks.
    pub fn write(&mut self, sequence: &SequenceKv, layer: usize, keys: &[f32], values: &[f32]) -> bool {
        let KvShape { heads, head_dim, .. } = self.memory.shape;
        let row = heads * head_dim;
        let new = keys.len() / row;
        if sequence.blocks.len() * KV_BLOCK_TOKENS < sequence.len + new || keys.len() != values.len() {
            return false;
        }
        let stride = self.memory.shape.stride();
        for (which, from) in [keys, values].into_iter().enumerate() {
            for (at, row) in (sequence.len..).zip(from.chunks_exact(row)) {
                let block = &mut self.memory.blocks[sequence.blocks[at / KV_BLOCK_TOKENS].index()];
                for (head, vector) in row.chunks_exact(head_dim).enumerate() {
                    let to = (((layer * 2 + which) * heads + head) * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS) * stride;
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
    /// Keys of `head` in the sequence's `block`th block, with the dimensions (KV_BLOCK_TOKENS, stride).
    #[inline(always)]
    pub fn keys(&self, head: usize, block: usize) -> &'a [f32] {
        self.part(0, head, block)
    }

    /// Values of `head` in the sequence's `block`th block, with the dimensions (KV_BLOCK_TOKENS, stride).
    #[inline(always)]
    pub fn values(&self, head: usize, block: usize) -> &'a [f32] {
        self.part(1, head, block)
    }

    #[inline(always)]
    fn part(&self, which: usize, head: usize, block: usize) -> &'a [f32] {
        let shape = self.memory.shape;
        let length = KV_BLOCK_TOKENS * shape.stride();
        let from = ((self.layer * 2 + which) * shape.heads + head) * length;
        &self.memory.blocks[self.blocks[block].index()][from..from + length]
    }
}
