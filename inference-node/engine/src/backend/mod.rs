//! Forward passes: our own on the CPU and on NVIDIA GPUs, and those of candle-transformers.

pub(crate) mod candle_transformers;
pub(crate) mod cpu;
pub mod cuda;
pub(crate) mod forward;
mod ragged_batch;
