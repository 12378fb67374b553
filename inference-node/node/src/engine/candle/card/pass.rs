//! Where the rows of one pass belong, for the kernels: which block each new position is written to, which blocks a sequence
//! has, and which rows share a thread block.

use candle_core::{Device, Result, Tensor};

use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::model::Rows;

/// Query vectors of one thread block: QUERIES in paged.cu.
pub const QUERIES: usize = 16;

/// One sequence's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its first row in the pass.
    pub row: usize,
    /// New positions.
    pub new: usize,
    /// Where its blocks are listed.
    pub table: usize,
    /// Positions before the new ones.
    pub past: usize,
}

/// The arithmetic of a pass, the same for all layers.
pub struct Pass {
    pub parts: Vec<Part>,
    /// The blocks of all parts, one after the other.
    pub tables: Vec<u32>,
    /// For each row, block x [`BLOCK`] + position in it.
    pub slots: Vec<u32>,
}

/// The same where a device's kernels read it.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the cards' kernel reads it"))]
pub struct Indices {
    pub slots: Tensor,
    pub tables: Tensor,
    /// (first row, rows, table, position of the first row) each.
    pub tiles: Tensor,
    pub tile_count: usize,
}

impl Pass {
    pub fn new(parts: &[Rows<'_>]) -> Result<Self> {
        let mut pass = Self { parts: Vec::with_capacity(parts.len()), tables: Vec::new(), slots: Vec::new() };
        for rows in parts {
            let (past, new, blocks) = (rows.kv.len(), rows.tokens.len(), rows.kv.table());
            if blocks.len() * BLOCK < past + new {
                candle_core::bail!("a sequence has no room for {new} more tokens")
            }
            pass.parts.push(Part { row: pass.slots.len(), new, table: pass.tables.len(), past });
            pass.tables.extend(blocks.iter().map(|block| block.index() as u32));
            let slot = |at: usize| (blocks[at / BLOCK].index() * BLOCK + at % BLOCK) as u32;
            pass.slots.extend((past..past + new).map(slot));
        }
        Ok(pass)
    }

    pub fn rows(&self) -> usize {
        self.slots.len()
    }

    /// `group` query heads share a KV head.
    pub fn indices(&self, group: usize, device: &Device) -> Result<Indices> {
        let height = (QUERIES / group.max(1)).max(1);
        let mut tiles = Vec::new();
        for part in &self.parts {
            for first in (0..part.new).step_by(height) {
                let rows = height.min(part.new - first);
                tiles.extend([part.row + first, rows, part.table, part.past + first].map(|n| n as u32));
            }
        }
        let tile_count = tiles.len() / 4;
        let put = |values: &[u32]| Tensor::from_slice(values, values.len(), device);
        Ok(Indices { slots: put(&self.slots)?, tables: put(&self.tables)?, tiles: put(&tiles)?, tile_count })
    }
}
