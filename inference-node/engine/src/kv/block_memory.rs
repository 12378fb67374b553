//! The storage of a pool's blocks: the interface that host memory and a GPU's memory implement.

use candle_core::Result;
use cfq_memory::BlockId;

/// Storage of a pool's blocks, all of the same size. The forward pass accesses the storage directly, not through this
/// trait.
pub trait BlockMemory {
    /// Prepares an allocated block; must be called before anything is written into it.
    fn prepare(&mut self, block: BlockId);

    /// Copies the first `positions` positions of all layers from one block to another.
    ///
    /// # Errors
    /// The device's error.
    fn copy(&mut self, from: BlockId, to: BlockId, positions: usize) -> Result<()>;

    /// Reads the elements of a whole block, in the order in which this storage keeps them.
    ///
    /// # Errors
    /// The device's error.
    fn read_block(&self, block: BlockId) -> Result<BlockValues>;

    /// Fills a prepared block with `values`, which [`Self::read_block`] returned for this or another block.
    ///
    /// # Errors
    /// The device's error, or an error if the values have another size or type.
    fn write_block(&mut self, block: BlockId, values: &BlockValues) -> Result<()>;
}

/// The keys and values of one block, copied out of its pool, in the number format of the pool.
#[derive(Debug, Clone, PartialEq)]
pub enum BlockValues {
    /// 32-bit floats.
    F32(Vec<f32>),
    #[cfg_attr(not(test), allow(dead_code, reason = "no device with such values is built in yet"))]
    /// Bit patterns of 16-bit floats.
    Half(Vec<u16>),
}
