//! What a pool needs of the memory its blocks are in, so that a graphics card's can stand where this process's does.

use candle_core::Result;
use cfq_memory::BlockId;

/// Memory of a pool's blocks, each of the same size. The forward pass writes and reads it in its own way.
pub trait BlockMemory {
    /// Called before anything is written into a block that was allocated.
    fn prepare(&mut self, block: BlockId);

    /// Makes the first `positions` of `to`, in all layers, those of `from`.
    fn copy(&mut self, from: BlockId, to: BlockId, positions: usize) -> Result<()>;

    /// The values of a whole block, in an order of this memory's own.
    fn take_out(&self, block: BlockId) -> Result<Values>;

    /// Fills a prepared block with what [`Self::take_out`] gave, of this block or another.
    fn put_back(&mut self, block: BlockId, values: &Values) -> Result<()>;
}

/// A block's values outside its memory, as that holds them.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    F32(Vec<f32>),
    #[cfg_attr(not(test), allow(dead_code, reason = "no such device is built in yet"))]
    /// Of a device that holds two bytes a value.
    Half(Vec<u16>),
}
