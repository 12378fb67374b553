//! Opening GPUs through the CUDA driver; only in builds with the `cuda` feature.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
use candle_core::cuda_backend::cudarc::{cublas, curand, driver};
use candle_core::{DType, Device, Result, Tensor};

use crate::backend::cuda::device::{CudaDeviceId, CudaUnavailable, Gpu};

/// Lists the GPUs in CUDA's order, without opening any.
///
/// # Errors
/// The reason why CUDA cannot be used.
pub fn devices() -> std::result::Result<Vec<CudaDeviceId>, CudaUnavailable> {
    check_libraries()?;
    let count = CudaContext::device_count().w().map_err(CudaUnavailable::Driver)?;
    let count = usize::try_from(count).unwrap_or(0);
    Ok((0..count).map(|ordinal| CudaDeviceId { ordinal, uuid: uuid(ordinal as c_int) }).collect())
}

/// UUID of the GPU with CUDA's `ordinal`, if the driver reports it.
fn uuid(ordinal: c_int) -> Option<[u8; 16]> {
    let device = driver::result::device::get(ordinal).ok()?;
    // C declares the bytes as `char`.
    Some(driver::result::device::get_uuid(device).ok()?.bytes.map(|byte| byte as u8))
}

/// Opens the GPU that has the number `ordinal` in CUDA. `index` and `uuid` are copied to the returned [`Gpu`].
///
/// # Errors
/// The driver's error.
pub fn open(ordinal: usize, index: usize, uuid: Option<String>) -> std::result::Result<Gpu, CudaUnavailable> {
    try_open(ordinal, index, uuid).map_err(CudaUnavailable::Driver)
}

fn try_open(ordinal: usize, index: usize, uuid: Option<String>) -> Result<Gpu> {
    // An explicit stream, because the default stream differs per thread, and models are loaded by one thread and run by
    // another.
    let device = Device::new_cuda_with_stream(ordinal)?;
    let cuda = device.as_cuda_device()?;
    let context = cuda.cuda_stream().context().clone();
    // SAFETY: all work on this device's memory goes through this one stream, in order, so no events are needed.
    #[allow(unsafe_code)]
    unsafe {
        cuda.disable_event_tracking();
    }
    // A GPU with too little free memory for the measurement ranks last.
    let bandwidth = copy_bandwidth(&device).unwrap_or(1.0);
    device.synchronize()?;
    keep_freed_memory(&context)?;
    let name = context.name().w()?;
    let free_bytes = memory(&device).map_or(0, |(free, _)| free);
    tracing::debug!(index, ordinal, uuid, name, "gpu opened");
    Ok(Gpu { index, name, uuid, device, free_bytes, bandwidth, overhead_per_mille: 0 })
}

/// Keeps freed memory in the process's pool for reuse: otherwise every step would return its activations to the driver
/// and allocate them again.
fn keep_freed_memory(context: &CudaContext) -> Result<()> {
    let mut max_bytes = u64::MAX;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool belongs to this device; the value has the attribute's type and outlives the call.
    #[allow(unsafe_code)]
    unsafe {
        let pool = driver::result::device::get_default_mem_pool(context.cu_device()).w()?;
        driver::result::mem_pool::set_attribute(pool, threshold, (&raw mut max_bytes).cast::<c_void>()).w()
    }
}

/// Gives the unused memory in this process's pool on a GPU back to the driver, so that other programs can use it.
pub fn trim_memory_pool(device: &Device) {
    let Ok(cuda) = device.as_cuda_device() else { return };
    let context = cuda.cuda_stream().context().clone();
    if let Err(error) = device.synchronize() {
        tracing::debug!(%error, "cannot trim the gpu memory pool");
        return;
    }
    // SAFETY: the pool belongs to this device; memory in use stays allocated.
    #[allow(unsafe_code)]
    let trimmed = unsafe {
        driver::result::device::get_default_mem_pool(context.cu_device())
            .and_then(|pool| driver::result::mem_pool::trim_to(pool, 0))
    };
    if let Err(error) = trimmed {
        tracing::debug!(%error, "cannot trim the gpu memory pool");
    }
}

/// Free and total memory of a device, in bytes; `None` on the CPU or if the driver does not report it. Unused memory in
/// this process's pool counts as free.
pub fn memory(device: &Device) -> Option<(u64, u64)> {
    let cuda = device.as_cuda_device().ok()?;
    let context = cuda.cuda_stream().context().clone();
    let (free, total) = context.mem_get_info().ok()?;
    Some((free as u64 + pooled_bytes(&context).unwrap_or(0), total as u64))
}

/// GPU memory that this process holds in its pool but does not use, in bytes.
fn pooled_bytes(context: &CudaContext) -> Option<u64> {
    let read = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the pool belongs to this device; the value has the attribute's type and outlives the call.
        #[allow(unsafe_code)]
        unsafe {
            let pool = driver::result::device::get_default_mem_pool(context.cu_device()).ok()?;
            driver::result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast::<c_void>()).ok()?;
        }
        Some(bytes)
    };
    let reserved = read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    Some(reserved.saturating_sub(read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?))
}

/// Bandwidth of a copy within the GPU, in bytes per second; bytes read and bytes written both count.
fn copy_bandwidth(device: &Device) -> Result<f64> {
    // Larger than the cache of any GPU.
    const COPIED_BYTES: usize = 256 << 20;
    let from = Tensor::zeros(COPIED_BYTES / 4, DType::F32, device)?;
    let to = Tensor::zeros(COPIED_BYTES / 4, DType::F32, device)?;
    let mut best = 0f64;
    for _ in 0..3 {
        device.synchronize()?;
        let began = std::time::Instant::now();
        to.slice_set(&from, 0, 0)?;
        device.synchronize()?;
        best = best.max(2.0 * COPIED_BYTES as f64 / began.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Checks for the driver and the libraries without which candle panics; if a library is missing, first tries to load it
/// from other folders.
fn check_libraries() -> std::result::Result<(), CudaUnavailable> {
    // SAFETY: the calls load NVIDIA's libraries by name and run their initializers.
    #[allow(unsafe_code)]
    let present = || unsafe {
        let missing = |library, package| CudaUnavailable::NoLibrary { library, package };
        [
            (driver::sys::is_culib_present(), CudaUnavailable::NoDriver),
            (cublas::sys::is_culib_present(), missing("cuBLAS", "nvidia-cublas")),
            (curand::sys::is_culib_present(), missing("cuRAND", "nvidia-curand")),
        ]
    };
    let missing = |libraries: [(bool, CudaUnavailable); 3]| {
        libraries.into_iter().find(|(found, _)| !found).map(|(_, reason)| reason)
    };
    match missing(present()) {
        None => Ok(()),
        Some(CudaUnavailable::NoDriver) => Err(CudaUnavailable::NoDriver),
        Some(_) => {
            preload_libraries();
            missing(present()).map_or(Ok(()), Err)
        }
    }
}

/// Loads CUDA's libraries from the folders of Python packages and toolkits, which are outside the system's search path.
/// After that, `dlopen` finds the loaded libraries by their bare names.
fn preload_libraries() {
    #[allow(unsafe_code)]
    unsafe extern "C" {
        fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    }
    const RTLD_NOW_GLOBAL: c_int = 0x2 | 0x100;
    let folders = library_folders();
    // libcublasLt comes first, because libcublas depends on it.
    for stem in ["libcublasLt.so", "libcublas.so", "libcurand.so"] {
        let mut candidates: Vec<PathBuf> = folders
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
            .map(|entry| entry.path())
            .filter(|path| path.file_name().and_then(|n| n.to_str()).is_some_and(|name| name.starts_with(stem)))
            .collect();
        // Tries the newest version first.
        candidates.sort_by(|a, b| b.file_name().cmp(&a.file_name()));
        let opened = candidates.iter().find(|path| {
            let Ok(path) = CString::new(path.as_os_str().as_encoded_bytes()) else { return false };
            // SAFETY: the path is NUL-terminated; the library is NVIDIA's.
            #[allow(unsafe_code)]
            unsafe {
                !dlopen(path.as_ptr(), RTLD_NOW_GLOBAL).is_null()
            }
        });
        tracing::debug!(library = stem, found = ?opened, "searched for a cuda library");
    }
}

/// Library folders of CUDA toolkits, and the folders `nvidia/*/lib` of Python packages.
fn library_folders() -> Vec<PathBuf> {
    let entries = |folder: PathBuf| {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut roots: Vec<PathBuf> = ["/usr/lib", "/usr/local/lib", "/opt/conda/lib"].map(PathBuf::from).to_vec();
    for variable in ["HOME", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(folder) = std::env::var_os(variable).map(PathBuf::from) {
            roots.extend([folder.join(".local/lib"), folder.join("lib")]);
        }
    }
    let pythons = roots
        .into_iter()
        .flat_map(entries)
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3")));
    let vendors = pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|p| python.join(p).join("nvidia")));
    let packages = vendors.flat_map(entries).map(|package| package.join("lib"));
    let toolkits = ["/usr/local/cuda/lib64", "/opt/cuda/lib64"].map(PathBuf::from);
    toolkits.into_iter().chain(packages).collect()
}
