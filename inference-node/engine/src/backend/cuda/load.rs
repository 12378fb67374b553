//! Loading a model onto GPUs: lay it out, load the weights, allocate the KV pool, or refuse with the arithmetic.

use std::path::{Path, PathBuf};

use candle_core::DType;
use cfq_memory::{GpuCapacity, GpuShare, MemoryEstimate};
use cfq_proto::model::ModelId;

use crate::backend::candle_transformers::CandleTransformersConfig;
use crate::backend::cuda::device::{Gpu, is_out_of_memory};
use crate::backend::cuda::driver::memory;
use crate::backend::cuda::memory_estimate::{GpuLayout, layout};
use crate::backend::cuda::model::{CudaModel, Stage};
use crate::backend::cuda::paged_kv::PagedKv;
use crate::backend::cuda::weights::supports_half;
use crate::kv::{BLOCK, KvPool};
use crate::load_error::{EngineLimits, LoadError};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;

/// Largest head dimension that the attention kernel's registers hold.
const MAX_HEAD_DIM: u64 = 256;

/// Memory a model takes on one GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuAllocation {
    /// [`Gpu::index`].
    pub gpu: usize,
    /// Total, as estimated.
    pub bytes: u64,
    /// The part that the load does not allocate: scratch memory of passes and the driver's own.
    pub later: u64,
    /// The part for weights.
    pub weights: u64,
    /// The part added for the measured overhead of earlier loads.
    pub overhead: u64,
}

impl GpuAllocation {
    /// Bytes that the weights took, if the whole load took `bytes`: tables and pool are one allocation each and take
    /// exactly the predicted bytes.
    pub fn measured_weights(&self, bytes: u64) -> u64 {
        let rest = self.bytes.saturating_sub(self.later + self.weights + self.overhead);
        bytes.saturating_sub(rest)
    }
}

/// Lays a model out over GPUs with the given capacities, without opening one. `gpus` names them in errors.
///
/// # Errors
/// [`LoadError::NoGpuLayout`] with the arithmetic, [`LoadError::CpuOnly`], or the file's header error.
pub fn fit_on_gpus(
    path: &Path,
    gpus: &str,
    capacities: &[GpuCapacity],
    max_sequences: u32,
) -> Result<GpuLayout, LoadError> {
    let (file, architecture) = read_for_gpus(path)?;
    lay_out(&file, &architecture, gpus, capacities, max_sequences, true)
}

/// Memory estimate of a model on these GPUs.
///
/// # Errors
/// As [`fit_on_gpus`].
pub fn estimate_on_gpus(path: &Path, gpus: &[Gpu], limits: EngineLimits) -> Result<MemoryEstimate, LoadError> {
    let (file, architecture) = read_for_gpus(path)?;
    Ok(lay_out_on(&file, &architecture, gpus, 1, limits)?.estimate)
}

/// Reads a model's header and architecture.
///
/// # Errors
/// [`LoadError::CpuOnly`] if no GPU forward pass runs the architecture; the file's header error.
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

fn lay_out_on(
    file: &ModelFile,
    architecture: &Architecture,
    gpus: &[Gpu],
    share_of: u64,
    limits: EngineLimits,
) -> Result<GpuLayout, LoadError> {
    let capacities: Vec<GpuCapacity> = gpus.iter().map(|gpu| gpu.capacity(share_of)).collect();
    lay_out(file, architecture, &ids(gpus.iter()), &capacities, limits.max_sequences, !needs_f32(gpus))
}

/// The one layout calculation, for loads and for `cfq models fit`. `halves` is false on candle's CPU device only.
fn lay_out(
    file: &ModelFile,
    architecture: &Architecture,
    gpus: &str,
    capacities: &[GpuCapacity],
    sequences: u32,
    halves: bool,
) -> Result<GpuLayout, LoadError> {
    let dim = architecture.shape.head_dim;
    if halves && dim > MAX_HEAD_DIM {
        let reason = format!("its head dimension is {dim}, and the GPU kernel supports at most {MAX_HEAD_DIM}");
        return Err(file.unsupported(reason).into());
    }
    layout(file, architecture, capacities, sequences, halves)?.map_err(|source| LoadError::NoGpuLayout {
        path: file.path().to_owned(),
        gpus: gpus.to_owned(),
        source: Box::new(source),
    })
}

/// A model on GPUs with an empty KV pool.
pub struct GpuLoad {
    pub forward: CudaModel,
    pub pool: KvPool<PagedKv>,
    pub allocations: Vec<GpuAllocation>,
    pub error_context: GpuLoadError,
}

/// What an error message needs to know of a load onto GPUs.
pub struct GpuLoadError {
    pub path: PathBuf,
    /// The GPUs' ids joined by commas.
    pub gpus: String,
    pub estimate: MemoryEstimate,
}

impl GpuLoadError {
    /// The load error for a failed GPU operation.
    pub fn explain(self, source: candle_core::Error) -> LoadError {
        let Self { path, gpus, estimate } = self;
        if is_out_of_memory(&source) {
            LoadError::GpuMemoryExhausted { path, gpus, estimate: Box::new(estimate), source: Box::new(source) }
        } else {
            LoadError::Weights { path, source }
        }
    }
}

/// Loads the weights onto the GPUs where they fit best and allocates the KV pool. The model may take one part in
/// `share_of` of the free memory, which is [`Gpu::free`] or what the driver reports now, whichever is less.
///
/// # Errors
/// See [`LoadError`].
pub fn load_on_gpus(
    model: &ModelId,
    file: &ModelFile,
    architecture: Architecture,
    gpus: &[Gpu],
    share_of: u64,
    limits: EngineLimits,
) -> Result<GpuLoad, LoadError> {
    let now =
        |gpu: &Gpu| Gpu { free: memory(&gpu.device).map_or(gpu.free, |(free, _)| free).min(gpu.free), ..gpu.clone() };
    let gpus: Vec<Gpu> = gpus.iter().map(now).collect();
    let GpuLayout { estimate, map } = lay_out_on(file, &architecture, &gpus, share_of, limits)?;
    let device = ids(map.shares.iter().filter_map(|share| gpus.get(share.gpu)));
    tracing::info!(%model, device, %estimate, "loading model");
    let context = || GpuLoadError { path: file.path().to_owned(), gpus: device.clone(), estimate };
    let stage =
        |share: &GpuShare| Some(Stage { device: gpus.get(share.gpu)?.device.clone(), layers: share.layers.clone() });
    let stages = map.shares.iter().filter_map(stage).collect();
    let forward = CudaModel::load(file, architecture, stages).map_err(|error| context().explain(error))?;
    let precision = if needs_f32(&gpus) { DType::F32 } else { DType::F16 };
    let blocks = estimate.kv_tokens as usize / BLOCK;
    let pool = forward.pool(blocks, precision).map_err(|error| context().explain(error))?;
    let later = (estimate.scratch + estimate.reserve) / (map.shares.len() as u64).max(1);
    let allocation = |share: &GpuShare| {
        let &GpuShare { bytes, weights, overhead, .. } = share;
        Some(GpuAllocation { gpu: gpus.get(share.gpu)?.index, bytes, later, weights, overhead })
    };
    let allocations = map.shares.iter().filter_map(allocation).collect();
    Ok(GpuLoad { forward, pool, allocations, error_context: context() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_load_is_attributed_to_the_weights() {
        let allocation = GpuAllocation { gpu: 0, bytes: 1000, later: 300, weights: 400, overhead: 40 };
        assert_eq!(allocation.measured_weights(720), 460);
        assert_eq!(allocation.measured_weights(0), 0);
    }
}
