//! The GPUs of this machine as candle devices, or the reason why there are none.
//!
//! candle panics on a missing driver or library, so both are probed first. Which GPUs to use, and what `cuda:N` means,
//! is the caller's decision: [`super::devices`] lists them in CUDA's order and [`super::open`] opens one.

use candle_core::Device;
use cfq_memory::GpuCapacity;

/// An opened GPU.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// Number N in the GPU's id `cuda:N`, chosen by the caller.
    pub index: usize,
    /// Marketing name, from the driver.
    pub name: String,
    /// UUID that NVML reports; `None` if the caller could not match this GPU with one of NVML's.
    pub uuid: Option<String>,
    /// The GPU as a candle device.
    pub device: Device,
    /// Memory that was free when the GPU was opened, in bytes.
    pub free_bytes: u64,
    /// Measured bandwidth of a copy within the GPU, in bytes per second; for ranking GPUs.
    pub bandwidth: f64,
    /// Memory overhead measured in earlier loads of the model that is about to be loaded, in per mille of its weights;
    /// 0 if it was never measured.
    pub overhead_per_mille: u64,
}

impl Gpu {
    /// Id of the GPU: `cuda:N`.
    pub fn id(&self) -> String {
        format!("cuda:{}", self.index)
    }

    /// Capacity for one model if `sharers` models share the GPU's free memory equally.
    pub fn capacity(&self, sharers: u64) -> GpuCapacity {
        GpuCapacity {
            free_bytes: self.free_bytes / sharers.max(1),
            bandwidth: self.bandwidth,
            overhead_per_mille: self.overhead_per_mille,
        }
    }
}

/// Identifies a GPU in CUDA's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaDeviceId {
    /// CUDA's number of the GPU.
    pub ordinal: usize,
    /// UUID of the GPU; `None` if the driver does not report it.
    pub uuid: Option<[u8; 16]>,
}

/// Why no GPU can be used.
#[derive(Debug, thiserror::Error)]
pub enum CudaUnavailable {
    /// The program was built without the `cuda` feature.
    #[error(
        "this program was built for the CPU only; docs/how-to/run-on-an-nvidia-gpu.md explains how to build it for \
         NVIDIA GPUs"
    )]
    NotBuilt,
    /// libcuda.so.1 is missing.
    #[error("no NVIDIA driver found: libcuda.so.1 cannot be loaded")]
    NoDriver,
    /// A CUDA library is missing.
    #[error(
        "the NVIDIA driver is installed, but {library} is missing: install CUDA 13's libraries, or the PyPI package \
         {package} and add its folder to LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// Name of the library, for example `cuBLAS`.
        library: &'static str,
        /// The PyPI package that contains the library.
        package: &'static str,
    },
    /// The driver lists no device.
    #[error("the NVIDIA driver reports no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoGpus,
    /// The requested index is not among the visible GPUs.
    #[error("there is no GPU cuda:{index}; this process sees {}", listed(seen))]
    NoSuchGpu {
        /// The requested N of `cuda:N`.
        index: usize,
        /// Indices of the GPUs that this process sees.
        seen: Vec<usize>,
    },
    /// A driver call failed.
    #[error("a call to the NVIDIA driver failed")]
    Driver(#[source] candle_core::Error),
}

fn listed(indices: &[usize]) -> String {
    indices.iter().map(|index| format!("cuda:{index}")).collect::<Vec<_>>().join(" and ")
}

/// Whether an error means that GPU memory ran out. Searches the error's text for the names of the out-of-memory errors
/// of the driver, cuBLAS and cuRAND, because their errors have no common type.
pub fn is_out_of_memory(error: &candle_core::Error) -> bool {
    let text = error.to_string();
    ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "CURAND_STATUS_ALLOCATION_FAILED"]
        .iter()
        .any(|name| text.contains(name))
}
