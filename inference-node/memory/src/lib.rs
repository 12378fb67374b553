//! The memory ledger: what a model needs before it is loaded, and which sequences its KV pool admits.
//!
//! Pure arithmetic over a model file's header. Memory is a hard wall: a load that does not fit is refused with the sum,
//! and a pool never admits more tokens than it holds. What a process holds is not the file's size: matrices are held in
//! the kernels' own order, and that is what is counted.

mod blocks;
mod bytes;
mod card;
mod division;
mod fit;
mod parked;
mod pool;
mod split;
mod tables;
mod weights;

pub use blocks::{Beginning, BlockId, BlockTable, Found, Prefix};
pub use bytes::Bytes;
pub use card::place_on_card;
pub use division::{Division, divide};
pub use fit::{DoesNotFit, Need, Parts, Shape, fit};
pub use parked::{Kin, Parked, Place};
pub use pool::{KvPool, NoRoom, Reservation};
pub use split::{CardRoom, CardShare, NoSplit, Split, Stack, split};
pub use tables::VocabularySize;
pub use weights::{Format, Kernels, Matrix, Placed, WeightSum, place};
