//! The memory ledger: what a model needs before it is loaded, and which sequences its KV pool admits.
//!
//! Pure arithmetic over a model file's header. Memory is a hard wall: a load that does not fit is refused with the sum,
//! and a pool never admits more tokens than it holds. What a process holds is not the file's size: matrices are held in
//! the kernels' own order, and that is what is counted.

mod blocks;
mod bytes;
mod fit;
mod pool;
mod tables;
mod weights;

pub use blocks::{BlockId, BlockTable, Found, Prefix};
pub use bytes::Bytes;
pub use fit::{DoesNotFit, MOST_CORRECTION, Need, Parts, Shape, fit};
pub use pool::{KvPool, NoRoom, Reservation};
pub use tables::VocabularySize;
pub use weights::{Format, Kernels, Matrix, Placed, WeightSum, place};
