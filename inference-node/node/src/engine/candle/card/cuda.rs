//! The cards' side that only a build for CUDA has: opening them, and launching our kernels (paged.cu).
//!
//! Everything of one device goes through one stream, in order.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use candle_core::cuda_backend::cudarc::{cublas, curand, driver};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor};
use half::f16;

use crate::engine::candle::card::attention::{Attend, Kind};
use crate::engine::candle::card::device::{Card, DeviceChoice, NoCard};
use crate::engine::candle::card::numbers::{Numbered, numbered};
use crate::engine::candle::card::pages::Write;
use crate::engine::candle::card::pass::QUERIES;
use crate::engine::candle::kv::BLOCK;
use crate::gpu;

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/paged.ptx"));
const MODULE: &str = "cfq_paged";
/// THREADS in paged.cu.
const THREADS: u32 = 128;
/// Thread blocks that fill a large card; with fewer, sequences are cut into stretches.
const FILL: usize = 1024;
/// Shared memory a kernel gets without asking.
const SHARED: usize = 48 << 10;

/// The cards that `choice` means, opened, in the order of their numbers.
pub fn cards(choice: DeviceChoice) -> std::result::Result<Vec<Card>, NoCard> {
    meant(choice)?.iter().map(|card| open(card).map_err(NoCard::Driver)).collect()
}

/// The UUIDs of the cards that `choice` means, as far as NVML knows them. None is opened, which would take memory of it.
pub fn usable_uuids(choice: DeviceChoice) -> std::result::Result<Vec<String>, NoCard> {
    Ok(meant(choice)?.into_iter().filter_map(|card| card.uuid).collect())
}

fn meant(choice: DeviceChoice) -> std::result::Result<Vec<Numbered>, NoCard> {
    libraries()?;
    let count = CudaContext::device_count().w().map_err(NoCard::Driver)?;
    let seen: Vec<Option<[u8; 16]>> = (0..count).map(uuid).collect();
    let (all, matched) = numbered(&seen, &gpu::uuids());
    if all.is_empty() {
        return Err(NoCard::NoCards);
    }
    if !matched {
        tracing::warn!("cards cannot be matched with NVML's: cuda:N is CUDA's number here, not nvidia-smi's");
    }
    match choice {
        DeviceChoice::Auto => Ok(all),
        DeviceChoice::Cpu => Ok(Vec::new()),
        DeviceChoice::Cuda(index) => match all.iter().find(|card| card.index == index) {
            Some(card) => Ok(vec![card.clone()]),
            None => Err(NoCard::NoSuchCard { index, seen: all.iter().map(|card| card.index).collect() }),
        },
    }
}

/// Of CUDA's card of that number.
fn uuid(ordinal: c_int) -> Option<[u8; 16]> {
    let device = driver::result::device::get(ordinal).ok()?;
    // Bytes, which C calls characters.
    Some(driver::result::device::get_uuid(device).ok()?.bytes.map(|byte| byte as u8))
}

fn open(numbered: &Numbered) -> Result<Card> {
    // A stream of its own: the default one is another for each thread, and models are loaded by one and run by another.
    let device = Device::new_cuda_with_stream(numbered.ordinal)?;
    let cuda = device.as_cuda_device()?;
    let context = cuda.cuda_stream().context().clone();
    // SAFETY: all work on this device's memory goes through this one stream, in order.
    #[allow(unsafe_code)]
    unsafe {
        cuda.disable_event_tracking();
    }
    // A card too full for it is no faster than any other.
    let speed = copy_speed(&device).unwrap_or(1.0);
    device.synchronize()?;
    keep_freed_memory(&context)?;
    let name = context.name().w()?;
    let free = memory(&device).map_or(0, |(free, _)| free);
    let Numbered { index, uuid, .. } = numbered.clone();
    tracing::debug!(index, ordinal = numbered.ordinal, uuid, name, "card opened");
    Ok(Card { index, name, uuid, device, free, speed, correction: 0 })
}

/// What is freed stays with the process until it is wanted again: otherwise every step would give its activations back to
/// the driver, and get them again.
fn keep_freed_memory(context: &CudaContext) -> Result<()> {
    let mut most = u64::MAX;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool is this device's, the value is of the attribute's type and outlives the call.
    #[allow(unsafe_code)]
    unsafe {
        let pool = driver::result::device::get_default_mem_pool(context.cu_device()).w()?;
        driver::result::mem_pool::set_attribute(pool, threshold, (&raw mut most).cast::<c_void>()).w()
    }
}

/// Hands what this process freed on a card and keeps back to the driver: others want it.
pub fn give_back(device: &Device) {
    let Ok(cuda) = device.as_cuda_device() else { return };
    let context = cuda.cuda_stream().context().clone();
    if let Err(error) = device.synchronize() {
        tracing::debug!(%error, "a card's memory is not given back");
        return;
    }
    // SAFETY: the pool is this device's; what is in use of it stays.
    #[allow(unsafe_code)]
    let done = unsafe {
        driver::result::device::get_default_mem_pool(context.cu_device())
            .and_then(|pool| driver::result::mem_pool::trim_to(pool, 0))
    };
    if let Err(error) = done {
        tracing::debug!(%error, "a card's memory is not given back");
    }
}

/// What a card has free and in all, in bytes; `None` for the CPU, or where the driver does not say. What this process freed
/// and keeps is free for it.
pub fn memory(device: &Device) -> Option<(u64, u64)> {
    let cuda = device.as_cuda_device().ok()?;
    let context = cuda.cuda_stream().context().clone();
    let (free, total) = context.mem_get_info().ok()?;
    Some((free as u64 + kept(&context).unwrap_or(0), total as u64))
}

/// Bytes this process has of a card without using them.
fn kept(context: &CudaContext) -> Option<u64> {
    let read = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the pool is this device's, the value is of the attribute's type and outlives the call.
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

/// Bytes per second of a copy within the card, read and written counted.
fn copy_speed(device: &Device) -> Result<f64> {
    // More than any card's cache.
    const BYTES: usize = 256 << 20;
    let from = Tensor::zeros(BYTES / 4, DType::F32, device)?;
    let to = Tensor::zeros(BYTES / 4, DType::F32, device)?;
    let mut best = 0f64;
    for _ in 0..3 {
        device.synchronize()?;
        let began = std::time::Instant::now();
        to.slice_set(&from, 0, 0)?;
        device.synchronize()?;
        best = best.max(2.0 * BYTES as f64 / began.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Finds what candle would panic without.
fn libraries() -> std::result::Result<(), NoCard> {
    // SAFETY: they load libraries by name, whose initialisers are the vendor's.
    #[allow(unsafe_code)]
    let present = || unsafe {
        [
            (driver::sys::is_culib_present(), NoCard::NoDriver),
            (cublas::sys::is_culib_present(), NoCard::NoLibrary { library: "cuBLAS", package: "nvidia-cublas" }),
            (curand::sys::is_culib_present(), NoCard::NoLibrary { library: "cuRAND", package: "nvidia-curand" }),
        ]
    };
    let missing = |found: [(bool, NoCard); 3]| found.into_iter().find(|(there, _)| !there).map(|(_, why)| why);
    match missing(present()) {
        None => Ok(()),
        Some(NoCard::NoDriver) => Err(NoCard::NoDriver),
        Some(_) => {
            preload();
            missing(present()).map_or(Ok(()), Err)
        }
    }
}

/// Loads CUDA's libraries from where Python packages and toolkits put them, outside the system's search path: once loaded,
/// they are found by their bare names.
fn preload() {
    #[allow(unsafe_code)]
    unsafe extern "C" {
        fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    }
    const NOW_AND_FOR_ALL: c_int = 0x2 | 0x100;
    let folders = library_folders();
    // cuBLAS needs the first of them.
    for stem in ["libcublasLt.so", "libcublas.so", "libcurand.so"] {
        let mut inside: Vec<PathBuf> = folders
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
            .map(|entry| entry.path())
            .filter(|path| path.file_name().and_then(|n| n.to_str()).is_some_and(|name| name.starts_with(stem)))
            .collect();
        // The newest first.
        inside.sort_by(|a, b| b.file_name().cmp(&a.file_name()));
        let opened = inside.iter().find(|path| {
            let Ok(path) = CString::new(path.as_os_str().as_encoded_bytes()) else { return false };
            // SAFETY: a path that ends in a zero; the library's initialisers are the vendor's.
            #[allow(unsafe_code)]
            unsafe {
                !dlopen(path.as_ptr(), NOW_AND_FOR_ALL).is_null()
            }
        });
        tracing::debug!(library = stem, found = ?opened, "looked for beside the system's libraries");
    }
}

/// Folders `nvidia/*/lib` of Python's packages, and those of toolkits.
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

fn uints(storage: &Storage) -> Result<&CudaSlice<u32>> {
    match storage {
        Storage::Cuda(storage) => storage.as_cuda_slice::<u32>(),
        Storage::Cpu(_) | Storage::Metal(_) => candle_core::bail!("indices that are not on the card"),
    }
}

/// [`Attend`] by the kernel.
pub fn attend(
    op: &Attend<'_>,
    queries: &CudaStorage,
    layout: &Layout,
    keys: &CudaStorage,
    values: &CudaStorage,
) -> Result<(CudaStorage, Shape)> {
    let out = match keys.dtype() {
        DType::F16 => launch::<f16>(op, "f16", queries, layout, keys, values)?,
        DType::F32 => launch::<f32>(op, "f32", queries, layout, keys, values)?,
        other => candle_core::bail!("pages are F32 or F16, not {other:?}"),
    };
    Ok((out, layout.shape().clone()))
}

fn launch<T: CudaDType + DeviceRepr>(
    op: &Attend<'_>,
    name: &str,
    queries: &CudaStorage,
    layout: &Layout,
    keys: &CudaStorage,
    values: &CudaStorage,
) -> Result<CudaStorage> {
    let device: &CudaDevice = queries.device();
    let Kind { heads, kv_heads, head_dim, scale, cap, window } = op.kind;
    let (rows, tiles) = (op.pass.rows(), op.indices.tile_count);
    let Some((from, to)) = layout.contiguous_offsets() else {
        candle_core::bail!("queries that do not lie side by side")
    };
    let queries = queries.as_cuda_slice::<f32>()?.slice(from..to);
    let (keys, values) = (keys.as_cuda_slice::<T>()?, values.as_cuda_slice::<T>()?);
    let ((tables, _), (tile_list, _)) = (op.indices.tables.storage_and_layout(), op.indices.tiles.storage_and_layout());
    let (tables, tile_list) = (uints(&tables)?, uints(&tile_list)?);
    // Heads that share a KV head share a thread block, as far as it has room for them.
    let group = (heads / kv_heads).min(QUERIES);
    let groups = (heads / kv_heads).div_ceil(group);
    let longest = op.pass.parts.iter().map(|part| part.past + part.new).max().unwrap_or(0);
    let blocks = longest.div_ceil(BLOCK).max(1);
    // A stretch of fewer than four blocks is not worth its part of the sum.
    let most = if op.exact { 1 } else { blocks.div_ceil(4).max(1) };
    let stretches = FILL.div_ceil((tiles * kv_heads * groups).max(1)).clamp(1, most);
    let stretch = blocks.div_ceil(stretches);
    let stretches = blocks.div_ceil(stretch);
    let dims = match head_dim {
        0..=64 => 2,
        65..=128 => 4,
        129..=256 => 8,
        _ => candle_core::bail!("heads of {head_dim} values are larger than the kernel's"),
    };
    // SAFETY: the kernels write all of both that is read.
    #[allow(unsafe_code)]
    let (out, parts) = unsafe {
        let parts = if stretches == 1 { 1 } else { rows * heads * stretches * (head_dim + 2) };
        (device.alloc::<f32>(rows * heads * head_dim)?, device.alloc::<f32>(parts)?)
    };
    let shared = QUERIES * head_dim * 4 + BLOCK * (head_dim * size_of::<T>() + 4);
    let function = device.get_or_load_custom_func(&format!("attend_{name}_{dims}"), MODULE, PTX)?;
    if shared > SHARED {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared as i32).w()?;
    }
    let sizes = [heads, kv_heads, head_dim, group, groups, stretches, stretch, window.unwrap_or(0)].map(|n| n as u32);
    let cap = cap.unwrap_or(0.0);
    let mut kernel = function.builder();
    kernel.arg(&queries).arg(keys).arg(values).arg(&out).arg(&parts).arg(tables).arg(tile_list);
    sizes.iter().for_each(|size| {
        kernel.arg(size);
    });
    kernel.arg(&scale).arg(&cap);
    let config = LaunchConfig {
        grid_dim: (tiles as u32, (kv_heads * groups) as u32, stretches as u32),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    // SAFETY: the arguments are the kernel's, in its order; `Pass` holds every index within its tensor.
    #[allow(unsafe_code)]
    unsafe { kernel.launch(config) }.w()?;
    if stretches > 1 {
        let function = device.get_or_load_custom_func("combine_parts", MODULE, PTX)?;
        let (stretches, head_dim) = (stretches as u32, head_dim as u32);
        let mut kernel = function.builder();
        kernel.arg(&parts).arg(&out).arg(&stretches).arg(&head_dim);
        let config =
            LaunchConfig { grid_dim: ((rows * heads) as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe { kernel.launch(config) }.w()?;
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// [`Write`] by the kernel.
pub fn write(op: &Write<'_>, pages: &mut CudaStorage, rows: &CudaStorage, layout: &Layout) -> Result<()> {
    match pages.dtype() {
        DType::F16 => write_as::<f16>(op, "write_f16", pages, rows, layout),
        DType::F32 => write_as::<f32>(op, "write_f32", pages, rows, layout),
        other => candle_core::bail!("pages are F32 or F16, not {other:?}"),
    }
}

fn write_as<T: CudaDType + DeviceRepr>(
    op: &Write<'_>,
    name: &str,
    pages: &mut CudaStorage,
    rows: &CudaStorage,
    layout: &Layout,
) -> Result<()> {
    let device = rows.device().clone();
    let Some((from, to)) = layout.contiguous_offsets() else { candle_core::bail!("rows that do not lie side by side") };
    let rows = rows.as_cuda_slice::<f32>()?.slice(from..to);
    let (slots, _) = op.indices.slots.storage_and_layout();
    let slots = uints(&slots)?;
    let pages = pages.as_cuda_slice_mut::<T>()?;
    let [count, heads, head_dim] = [op.pass.rows(), op.shape.heads, op.shape.head_dim].map(|n| n as u32);
    let function = device.get_or_load_custom_func(name, MODULE, PTX)?;
    let mut kernel = function.builder();
    kernel.arg(&rows).arg(pages).arg(slots).arg(&count).arg(&heads).arg(&head_dim);
    // SAFETY: the arguments are the kernel's, in its order; `Pass` holds every slot within the pages.
    #[allow(unsafe_code)]
    unsafe { kernel.launch(LaunchConfig::for_num_elems(count * heads * head_dim)) }.w()?;
    Ok(())
}
