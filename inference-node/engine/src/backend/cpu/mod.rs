//! The CPU forward pass: slices of F32 and our own kernels.

pub mod attention;
pub mod dense;
pub mod elementwise;
pub mod feed_forward;
pub mod linear;
pub mod model;
pub mod simd;
pub mod thread_pool;
pub mod tiles;
pub mod weights;
