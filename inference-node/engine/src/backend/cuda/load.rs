//! Loading a model onto GPUs: assigns the layers to GPUs, loads the weights and allocates the KV pool. If the model
//! does not fit, the error states the memory it needs, term by term, and the memory available.

use std::path::{Path, PathBuf};

use candle_core::DType;
use cfq_memory::{GpuCapacity, GpuShare, MemoryEstimate};
use cfq_proto::model::ModelId;

use crate::backend::candle_transformers::CandleTransformersConfig;
use crate::backend::cuda::device::{Gpu, is_out_of_memory};
use crate::backend::cuda::driver::memory;
use crate::backend::cuda::memory_estimate::{GpuEstimate, estimate_gpus};
use crate::backend::cuda::model::{CudaModel, Stage};
use crate::backend::cuda::paged_kv::PagedKv;
use crate::backend::cuda::weights::supports_half;
use crate::kv::{KV_BLOCK_TOKENS, KvPool};
use crate::load_error::{EngineLimits, LoadError};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;

/// Largest head dimension that the attention kernel supports; its registers hold no more.
const MAX_HEAD_DIM: u64 = 256;

/// Memory that a model takes on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuAllocation {
    /// Index of the GPU ([`Gpu::index`]).
    pub gpu: usize,
    /// Total memory, as estimated before the load.
    pub total_bytes: u64,
    /// Part of `total_bytes` that the load itself does not allocate: scratch memory of forward passes, and the reserve
    /// for the driver.
    pub scratch_bytes: u64,
    /// Part of `total_bytes` for the weights, as estimated before the load.
    pub weight_bytes: u64,
    /// Part of `total_bytes` added for the overhead measured in earlier loads.
    pub overhead_bytes: u64,
}

impl GpuAllocation {
    /// Bytes that the weights actually took, given that the whole load took `loaded_bytes`. Tables and KV pool are
    /// assumed to take exactly the predicted bytes, because each is a single allocation.
    pub fn measured_weight_bytes(&self, loaded_bytes: u64) -> u64 {
        let rest = self.total_bytes.saturating_sub(self.scratch_bytes + self.weight_bytes + self.overhead_bytes);
        loaded_bytes.saturating_sub(rest)
    }
}

/// Assigns the layers of a model to GPUs with the given capacities, without opening a GPU. `gpus` is the list of the
/// GPUs for error messages.
///
/// # Errors
/// [`LoadError::DoesNotFitGpus`] with the memory needed and the memory available, [`LoadError::CpuOnly`], or an error
/// of the file's header.
pub fn fit_on_gpus(
    path: &Path,
    gpus: &str,
    capacities: &[GpuCapacity],
    max_sequences: u32,
) -> Result<GpuEstimate, LoadError> {
    let (file, architecture) = read_for_gpus(path)?;
    estimate_capacities(&file, &architecture, gpus, capacities, max_sequences, true)
}

/// Memory estimate of a model on these GPUs.
///
/// # Errors
/// The errors of [`fit_on_gpus`].
pub fn estimate_on_gpus(path: &Path, gpus: &[Gpu], limits: EngineLimits) -> Result<MemoryEstimate, LoadError> {
    let (file, architecture) = read_for_gpus(path)?;
    Ok(estimate_open_gpus(&file, &architecture, gpus, 1, limits)?.estimate)
}

/// Reads a model's header and architecture.
///
/// # Errors
/// [`LoadError::CpuOnly`] if no GPU forward pass runs the architecture, or an error of the file's header.
pub fn read_for_gpus(path: &Path) -> Result<(ModelFile, Architecture), LoadError> {
    let file = ModelFile::read(path)?;
    if CandleTransformersConfig::read(&file)?.is_some() {
        return Err(LoadError::CpuOnly { path: path.to_owned() });
    }
    let architecture = Architecture::read(&file)?;
    Ok((file, architecture))
}

fn needs_f32(gpus: &[Gpu]) -> bool {
    !gpus.iter().all(|gpu| supports_half(&gpu.device))
}

fn ids<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    gpus.map(Gpu::id).collect::<Vec<_>>().join(",")
}

/// Memory estimate and device map for these GPUs, of each of which the model may use 1/`sharers` of the free memory.
fn estimate_open_gpus(
    file: &ModelFile,
    architecture: &Architecture,
    gpus: &[Gpu],
    sharers: u64,
    limits: EngineLimits,
) -> Result<GpuEstimate, LoadError> {
    let capacities: Vec<GpuCapacity> = gpus.iter().map(|gpu| gpu.capacity(sharers)).collect();
    estimate_capacities(file, architecture, &ids(gpus.iter()), &capacities, limits.max_sequences, !needs_f32(gpus))
}

/// Assigns a model's layers to GPUs and estimates its memory. `halves`: whether F16 and BF16 matrices keep their
/// precision; false only on candle's CPU device.
fn estimate_capacities(
    file: &ModelFile,
    architecture: &Architecture,
    gpus: &str,
    capacities: &[GpuCapacity],
    sequences: u32,
    halves: bool,
) -> Result<GpuEstimate, LoadError> {
    let dim = architecture.shape.head_dim;
    if halves && dim > MAX_HEAD_DIM {
        let reason = format!("its head dimension is {dim}, and the GPU kernel supports at most {MAX_HEAD_DIM}");
        return Err(file.unsupported(reason).into());
    }
    estimate_gpus(file, architecture, capacities, sequences, halves)?.map_err(|source| LoadError::DoesNotFitGpus {
        path: file.path().to_owned(),
        gpus: gpus.to_owned(),
        source: Box::new(source),
    })
}

/// A model loaded onto GPUs, with an empty KV pool.
pub struct GpuLoad {
    pub forward: CudaModel,
    pub pool: KvPool<PagedKv>,
    pub allocations: Vec<GpuAllocation>,
    pub error_context: GpuLoadError,
}

/// Details of a load onto GPUs, for error messages.
pub struct GpuLoadError {
    pub path: PathBuf,
    /// The GPUs' ids joined by commas.
    pub gpus: String,
    pub estimate: MemoryEstimate,
}

impl GpuLoadError {
    /// Converts the error of a failed GPU operation into a [`LoadError`].
    pub fn explain(self, source: candle_core::Error) -> LoadError {
        let Self { path, gpus, estimate } = self;
        if is_out_of_memory(&source) {
            LoadError::GpuMemoryExhausted { path, gpus, estimate: Box::new(estimate), source: Box::new(source) }
        } else {
            LoadError::Weights { path, source }
        }
    }
}

/// Loads the weights onto the GPUs of the device map and allocates the KV pool. The model may use 1/`sharers` of
/// the free memory of each GPU. Free memory is the smaller of [`Gpu::free_bytes`] and what the driver reports now.
///
/// # Errors
/// See [`LoadError`].
pub fn load_on_gpus(
    model: &ModelId,
    file: &ModelFile,
    architecture: Architecture,
    gpus: &[Gpu],
    sharers: u64,
    limits: EngineLimits,
) -> Result<GpuLoad, LoadError> {
    let now = |gpu: &Gpu| {
        let reported = memory(&gpu.device).map_or(gpu.free_bytes, |(free, _)| free);
        Gpu { free_bytes: reported.min(gpu.free_bytes), ..gpu.clone() }
    };
    let gpus: Vec<Gpu> = gpus.iter().map(now).collect();
    let GpuEstimate { estimate, device_map } = estimate_open_gpus(file, &architecture, &gpus, sharers, limits)?;
    let device = ids(device_map.shares.iter().filter_map(|share| gpus.get(share.gpu)));
    tracing::info!(%model, device, %estimate, "loading model");
    let context = || GpuLoadError { path: file.path().to_owned(), gpus: device.clone(), estimate };
    let stage =
        |share: &GpuShare| Some(Stage { device: gpus.get(share.gpu)?.device.clone(), layers: share.layers.clone() });
    let stages = device_map.shares.iter().filter_map(stage).collect();
    let forward = CudaModel::load(file, architecture, stages).map_err(|error| context().explain(error))?;
    let precision = if needs_f32(&gpus) { DType::F32 } else { DType::F16 };
    let blocks = estimate.kv_tokens as usize / KV_BLOCK_TOKENS;
    let pool = forward.pool(blocks, precision).map_err(|error| context().explain(error))?;
    let scratch_bytes = (estimate.scratch + estimate.reserve) / (device_map.shares.len() as u64).max(1);
    let allocation = |share: &GpuShare| {
        Some(GpuAllocation {
            gpu: gpus.get(share.gpu)?.index,
            total_bytes: share.total_bytes,
            scratch_bytes,
            weight_bytes: share.weight_bytes,
            overhead_bytes: share.overhead_bytes,
        })
    };
    let allocations = device_map.shares.iter().filter_map(allocation).collect();
    Ok(GpuLoad { forward, pool, allocations, error_context: context() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_load_is_attributed_to_the_weights() {
        let allocation =
            GpuAllocation { gpu: 0, total_bytes: 1000, scratch_bytes: 300, weight_bytes: 400, overhead_bytes: 40 };
        assert_eq!(allocation.measured_weight_bytes(720), 460);
        assert_eq!(allocation.measured_weight_bytes(0), 0);
    }
}
