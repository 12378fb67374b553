//! Launches the CUDA kernels of paged.cu.
//!
//! All work on one device goes through one stream, in order.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage};
use half::f16;

use crate::backend::cuda::pass::{AttentionShape, Pass, PassIndices, QUERIES_PER_THREAD_BLOCK, TARGET_THREAD_BLOCKS};
use crate::kv::{KV_BLOCK_TOKENS, KvShape};

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/paged.ptx"));
const MODULE: &str = "cfq_paged";
/// Number of threads in a thread block; must equal THREADS in paged.cu.
const THREADS_PER_BLOCK: u32 = 128;
/// Shared memory that a kernel may use without opting in to more, in bytes.
const DEFAULT_SHARED_BYTES: usize = 48 << 10;

/// Arguments of [`attend`]: parameters of the layer's attention, the pass, its indices on the device, and whether the
/// result must be batch-invariant.
pub type AttendArgs<'a> = (AttentionShape, &'a Pass, &'a PassIndices, bool);
/// Arguments of [`write()`]: the pass, its indices on the device, and the shape of the KV cache.
pub type WriteArgs<'a> = (&'a Pass, &'a PassIndices, KvShape);

fn uints(storage: &Storage) -> Result<&CudaSlice<u32>> {
    match storage {
        Storage::Cuda(storage) => storage.as_cuda_slice::<u32>(),
        Storage::Cpu(_) | Storage::Metal(_) => candle_core::bail!("the index tables of the pass are not on the GPU"),
    }
}

/// Runs paged attention.
pub fn attend(
    op: AttendArgs<'_>,
    queries: &CudaStorage,
    layout: &Layout,
    keys: &CudaStorage,
    values: &CudaStorage,
) -> Result<(CudaStorage, Shape)> {
    let out = match keys.dtype() {
        DType::F16 => launch::<f16>(op, "f16", queries, layout, keys, values)?,
        DType::F32 => launch::<f32>(op, "f32", queries, layout, keys, values)?,
        other => candle_core::bail!("KV pages must be F32 or F16, not {other:?}"),
    };
    Ok((out, layout.shape().clone()))
}

fn launch<T: CudaDType + DeviceRepr>(
    op: AttendArgs<'_>,
    name: &str,
    queries: &CudaStorage,
    layout: &Layout,
    keys: &CudaStorage,
    values: &CudaStorage,
) -> Result<CudaStorage> {
    let device: &CudaDevice = queries.device();
    let (shape, pass, indices, batch_invariant) = op;
    let AttentionShape { heads, kv_heads, head_dim, scale, softcap, window } = shape;
    let (rows, tiles) = (pass.rows(), indices.tile_count);
    let Some((from, to)) = layout.contiguous_offsets() else {
        candle_core::bail!("the query tensor is not contiguous")
    };
    let queries = queries.as_cuda_slice::<f32>()?.slice(from..to);
    let (keys, values) = (keys.as_cuda_slice::<T>()?, values.as_cuda_slice::<T>()?);
    let ((tables, _), (tile_list, _)) = (indices.page_tables.storage_and_layout(), indices.tiles.storage_and_layout());
    let (tables, tile_list) = (uints(&tables)?, uints(&tile_list)?);
    // Up to QUERIES_PER_THREAD_BLOCK query heads that share a KV head are computed by the same thread block.
    let group = (heads / kv_heads).min(QUERIES_PER_THREAD_BLOCK);
    let groups = (heads / kv_heads).div_ceil(group);
    let longest = pass.sequences.iter().map(|span| span.past + span.new).max().unwrap_or(0);
    let blocks = longest.div_ceil(KV_BLOCK_TOKENS).max(1);
    // A KV split of fewer than four blocks is not worth the cost of combining partial sums.
    let max_splits = if batch_invariant { 1 } else { blocks.div_ceil(4).max(1) };
    let splits = TARGET_THREAD_BLOCKS.div_ceil((tiles * kv_heads * groups).max(1)).clamp(1, max_splits);
    let blocks_per_split = blocks.div_ceil(splits);
    let splits = blocks.div_ceil(blocks_per_split);
    let dims = match head_dim {
        0..=64 => 2,
        65..=128 => 4,
        129..=256 => 8,
        _ => candle_core::bail!("the attention kernel supports head dimensions up to 256, not {head_dim}"),
    };
    // SAFETY: the kernels write every value of both buffers before it is read.
    #[allow(unsafe_code)]
    let (out, partials) = unsafe {
        let partials = if splits == 1 { 1 } else { rows * heads * splits * (head_dim + 2) };
        (device.alloc::<f32>(rows * heads * head_dim)?, device.alloc::<f32>(partials)?)
    };
    let shared = QUERIES_PER_THREAD_BLOCK * head_dim * 4 + KV_BLOCK_TOKENS * (head_dim * size_of::<T>() + 4);
    let function = device.get_or_load_custom_func(&format!("attend_{name}_{dims}"), MODULE, PTX)?;
    if shared > DEFAULT_SHARED_BYTES {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared as i32).w()?;
    }
    let sizes = [heads, kv_heads, head_dim, group, groups, splits, blocks_per_split, window.unwrap_or(0)];
    let sizes = sizes.map(|n| n as u32);
    let softcap = softcap.unwrap_or(0.0);
    let mut kernel = function.builder();
    kernel.arg(&queries).arg(keys).arg(values).arg(&out).arg(&partials).arg(tables).arg(tile_list);
    sizes.iter().for_each(|size| {
        kernel.arg(size);
    });
    kernel.arg(&scale).arg(&softcap);
    let config = LaunchConfig {
        grid_dim: (tiles as u32, (kv_heads * groups) as u32, splits as u32),
        block_dim: (THREADS_PER_BLOCK, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    // SAFETY: the arguments match the kernel's parameters in order and type; every index of `Pass` is within its
    // tensor.
    #[allow(unsafe_code)]
    unsafe { kernel.launch(config) }.w()?;
    if splits > 1 {
        let function = device.get_or_load_custom_func("combine_splits", MODULE, PTX)?;
        let (splits, head_dim) = (splits as u32, head_dim as u32);
        let mut kernel = function.builder();
        kernel.arg(&partials).arg(&out).arg(&splits).arg(&head_dim);
        let config = LaunchConfig {
            grid_dim: ((rows * heads) as u32, 1, 1),
            block_dim: (THREADS_PER_BLOCK, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe { kernel.launch(config) }.w()?;
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// Writes new keys or values (`rows`) into their slots in `pages`.
pub fn write(op: WriteArgs<'_>, pages: &mut CudaStorage, rows: &CudaStorage, layout: &Layout) -> Result<()> {
    match pages.dtype() {
        DType::F16 => write_as::<f16>(op, "write_f16", pages, rows, layout),
        DType::F32 => write_as::<f32>(op, "write_f32", pages, rows, layout),
        other => candle_core::bail!("KV pages must be F32 or F16, not {other:?}"),
    }
}

fn write_as<T: CudaDType + DeviceRepr>(
    op: WriteArgs<'_>,
    name: &str,
    pages: &mut CudaStorage,
    rows: &CudaStorage,
    layout: &Layout,
) -> Result<()> {
    let (pass, indices, shape) = op;
    let device = rows.device().clone();
    let Some((from, to)) = layout.contiguous_offsets() else {
        candle_core::bail!("the tensor of new keys or values is not contiguous")
    };
    let rows = rows.as_cuda_slice::<f32>()?.slice(from..to);
    let (slots, _) = indices.slots.storage_and_layout();
    let slots = uints(&slots)?;
    let pages = pages.as_cuda_slice_mut::<T>()?;
    let [count, heads, head_dim] = [pass.rows(), shape.heads, shape.head_dim].map(|n| n as u32);
    let function = device.get_or_load_custom_func(name, MODULE, PTX)?;
    let mut kernel = function.builder();
    kernel.arg(&rows).arg(pages).arg(slots).arg(&count).arg(&heads).arg(&head_dim);
    // SAFETY: the arguments match the kernel's parameters in order and type; every slot of `Pass` is within the pages.
    #[allow(unsafe_code)]
    unsafe { kernel.launch(LaunchConfig::for_num_elems(count * heads * head_dim)) }.w()?;
    Ok(())
}
