//! The index tables of a forward pass, for the kernels: the KV slot of each new position, the page table of each
//! sequence, and the rows of each thread block.

use candle_core::{Device, Layout, Result, Tensor};

use crate::backend::forward::BatchEntry;
use crate::kv::KV_BLOCK_TOKENS;

/// Number of query vectors per thread block; must equal QUERIES in paged.cu.
pub const QUERIES_PER_THREAD_BLOCK: usize = 16;
/// Number of thread blocks that fill a large GPU; if a pass has fewer, its sequences are split along the KV length. Not
/// measured on a GPU yet.
pub const TARGET_THREAD_BLOCKS: usize = 1024;

/// The part of a pass that belongs to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSpan {
    /// Index of the sequence's first row in the pass.
    pub row: usize,
    /// Number of positions that this pass computes.
    pub new: usize,
    /// Offset of the sequence's page table in [`Pass::page_tables`].
    pub table: usize,
    /// Number of the sequence's positions that earlier passes computed.
    pub past: usize,
}

/// The index tables of a pass, shared by all layers.
pub struct Pass {
    pub sequences: Vec<SequenceSpan>,
    /// The page tables of all sequences, one after the other.
    pub page_tables: Vec<u32>,
    /// Slot of each row: block x [`KV_BLOCK_TOKENS`] + position within the block.
    pub slots: Vec<u32>,
}

/// The index tables of a pass, as tensors on a device.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by the CUDA kernels"))]
pub struct PassIndices {
    pub slots: Tensor,
    pub page_tables: Tensor,
    /// Query tiles, that is, groups of rows of one sequence that a thread block computes together; four numbers each:
    /// first row, number of rows, page table offset, position of the first row.
    pub tiles: Tensor,
    pub tile_count: usize,
}

impl Pass {
    /// Builds the tables of a batch.
    ///
    /// # Errors
    /// If a sequence has too few KV blocks for its new tokens.
    pub fn new(batch: &[BatchEntry<'_>]) -> Result<Self> {
        let mut pass = Self { sequences: Vec::with_capacity(batch.len()), page_tables: Vec::new(), slots: Vec::new() };
        for entry in batch {
            let (past, new, blocks) = (entry.kv.len(), entry.tokens.len(), entry.kv.block_table());
            if blocks.len() * KV_BLOCK_TOKENS < past + new {
                candle_core::bail!("a sequence has no KV blocks for {new} more tokens")
            }
            pass.sequences.push(SequenceSpan { row: pass.slots.len(), new, table: pass.page_tables.len(), past });
            pass.page_tables.extend(blocks.iter().map(|block| block.index() as u32));
            let slot =
                |at: usize| (blocks[at / KV_BLOCK_TOKENS].index() * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS) as u32;
            pass.slots.extend((past..past + new).map(slot));
        }
        Ok(pass)
    }

    /// Number of rows of the pass: one per new token.
    pub fn rows(&self) -> usize {
        self.slots.len()
    }

    /// Copies the tables to a device. `group` is the number of query heads per KV head.
    pub fn indices(&self, group: usize, device: &Device) -> Result<PassIndices> {
        let height = (QUERIES_PER_THREAD_BLOCK / group.max(1)).max(1);
        let mut tiles = Vec::new();
        for span in &self.sequences {
            for first in (0..span.new).step_by(height) {
                let rows = height.min(span.new - first);
                tiles.extend([span.row + first, rows, span.table, span.past + first].map(|n| n as u32));
            }
        }
        let tile_count = tiles.len() / 4;
        let copy = |values: &[u32]| Tensor::from_slice(values, values.len(), device);
        Ok(PassIndices {
            slots: copy(&self.slots)?,
            page_tables: copy(&self.page_tables)?,
            tiles: copy(&tiles)?,
            tile_count,
        })
    }
}

/// Parameters of a layer's attention; see [`crate::backend::cpu::attention::AttentionParams`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
}

/// Elements of a tensor; its layout must be contiguous.
pub fn contiguous<'a, T>(all: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&all[from..to]),
        None => candle_core::bail!("the tensor is not contiguous"),
    }
}
