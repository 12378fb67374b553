//! The forward pass on NVIDIA GPUs: candle tensors, with keys and values in pages on the GPU.
//!
//! The CPU forward pass works on slices with our own kernels; a GPU needs whole tensors and few kernel launches. Both
//! run the same `model::architecture`, and the batcher drives either. Everything except our CUDA kernels also
//! runs on candle's CPU device, where it is tested against the same references.

mod attention;
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(not(feature = "cuda"))]
#[path = "no_driver.rs"]
mod driver;
mod feed_forward;
#[cfg(feature = "cuda")]
mod kernels;
mod linear;
mod load;
mod memory_estimate;
mod model;
mod paged_kv;
#[cfg(test)]
mod parity;
mod pass;
mod weights;

pub(crate) use device::is_out_of_memory;
pub use device::{CudaDeviceId, CudaUnavailable, Gpu};
pub(crate) use driver::memory;
pub use driver::{devices, open, trim_memory_pool};
pub use load::{GpuAllocation, estimate_on_gpus, fit_on_gpus};
pub(crate) use load::{GpuLoadError, load_on_gpus, read_for_gpus};
pub(crate) use memory_estimate::ELEMENT_BYTES;
pub use memory_estimate::{DoesNotFitGpus, GpuEstimate, MIN_TOKENS_PER_SEQUENCE, plan_map_for_shape};
pub(crate) use model::{CudaModel, Stage};

/// Free memory of a device, in bytes; `None` on the CPU or if the driver does not report it.
pub fn free_of(device: &candle_core::Device) -> Option<u64> {
    memory(device).map(|(free, _)| free)
}
