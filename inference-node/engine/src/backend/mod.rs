//! Forward passes: the same architecture on the CPU, on NVIDIA GPUs, or in candle-transformers.

pub(crate) mod candle_transformers;
pub(crate) mod cpu;
pub mod cuda;
pub(crate) mod forward;
mod ragged_batch;
