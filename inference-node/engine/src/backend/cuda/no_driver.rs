//! Stands in for the CUDA driver in builds without the `cuda` feature.

use candle_core::Device;

use crate::backend::cuda::device::{CudaDeviceId, CudaUnavailable, Gpu};

/// Lists the GPUs in CUDA's order, without opening any, because opening a GPU allocates memory on it. In this build,
/// always fails with [`CudaUnavailable::NotBuilt`].
///
/// # Errors
/// The reason why CUDA cannot be used.
pub fn devices() -> Result<Vec<CudaDeviceId>, CudaUnavailable> {
    Err(CudaUnavailable::NotBuilt)
}

/// Opens the GPU that has the number `ordinal` in CUDA. `index` and `uuid` are copied to the returned [`Gpu`]. In this
/// build, always fails with [`CudaUnavailable::NotBuilt`].
///
/// # Errors
/// The driver's error.
pub fn open(_ordinal: usize, _index: usize, _uuid: Option<String>) -> Result<Gpu, CudaUnavailable> {
    Err(CudaUnavailable::NotBuilt)
}

/// Free and total memory of a device, in bytes; always `None`, because this build opens no GPU.
pub fn memory(_: &Device) -> Option<(u64, u64)> {
    None
}

/// Does nothing: this build has no memory pool on a GPU that could be given back to the driver.
pub fn trim_memory_pool(_: &Device) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_gpus_explains_why_there_are_none() {
        match devices() {
            Ok(found) => assert!(cfg!(feature = "cuda") && !found.is_empty()),
            Err(reason) => {
                assert_eq!(matches!(reason, CudaUnavailable::NotBuilt), !cfg!(feature = "cuda"), "{reason}");
                assert!(reason.to_string().len() > 20, "{reason}");
            }
        }
    }
}
