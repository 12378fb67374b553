//! Memory estimate of a model on the GPUs that NVML lists, calculated in the same way as when the model is loaded.
//!
//! No GPU is opened, because opening a GPU takes some of its memory and needs a build with GPU support. The GPUs'
//! speeds are therefore unknown: a model that needs several GPUs is laid out as if all were equally fast, starting with
//! the GPU that has the most free memory. A real load starts with the fastest GPU.

use std::path::Path;

use cfq_engine::LoadError;
use cfq_engine::cuda::{GpuLayout, NoGpuLayout, fit_on_gpus};
use cfq_inference_node::gpu;
use cfq_inference_node::gpu::DeviceChoice;
use cfq_inference_node::models::{LoadMeasurements, MeasuredLoad};
use cfq_memory::{Bytes, DoesNotFit, GpuCapacity, GpuShare};
use cfq_proto::node::{Device, DeviceKind};
use serde::Serialize;

use super::{LengthFit, MemoryTerms, Placement, context_lengths};
use crate::config::NodeConfig;
use crate::output;

/// The estimate on one GPU, or on several together.
#[derive(Serialize)]
pub struct GpuPlacement {
    /// Text: the estimate for the layout that a load would choose, term by term, or the reason why no layout is
    /// possible.
    pub sum: String,
    /// Terms of the estimate. `None` if no layout is possible and there is no single estimate, as with several GPUs.
    pub terms: Option<MemoryTerms>,
    /// Layers and memory on each GPU; empty if there is only one GPU.
    pub shares: Vec<LayerShare>,
}

#[derive(Serialize)]
pub struct LayerShare {
    device: String,
    first_layer: usize,
    /// Number of layers.
    layers: usize,
    bytes: u64,
    available: u64,
}

/// Returns the placement on each GPU alone, then the placement split over all GPUs.
pub fn placements(
    devices: &[Device],
    path: &Path,
    context: u64,
    measured: Option<&LoadMeasurements>,
    node: &NodeConfig,
) -> Result<Vec<Placement>, LoadError> {
    let gpus: Vec<&Device> = devices.iter().filter(|device| device.kind == DeviceKind::Cuda).collect();
    let alone = gpus.iter().map(std::slice::from_ref);
    let together = Some(&gpus[..]).filter(|gpus| gpus.len() > 1 && node.device == DeviceChoice::Auto);
    alone.chain(together).map(|gpus| placement(gpus, path, context, measured, node)).collect()
}

fn placement(
    gpus: &[&Device],
    path: &Path,
    context: u64,
    measured: Option<&LoadMeasurements>,
    node: &NodeConfig,
) -> Result<Placement, LoadError> {
    let capacity = |gpu: &&Device| GpuCapacity {
        free: gpu.memory_total.saturating_sub(gpu.memory_others),
        bandwidth: 1.0,
        overhead_per_mille: measured
            .and_then(|measured| measured.on_device(&gpu::measurement_key(&gpu.id, gpu.uuid.as_deref())))
            .map_or(0, MeasuredLoad::overhead_per_mille),
    };
    let capacities: Vec<GpuCapacity> = gpus.iter().map(capacity).collect();
    let joined = |what: fn(&Device) -> &str| gpus.iter().map(|gpu| what(gpu)).collect::<Vec<_>>();
    let device = joined(|gpu| &gpu.id).join(",");
    let length = |total: u64, tokens, fits| LengthFit { tokens, total, fits };
    let (on_gpus, lengths) = match fit_on_gpus(path, &device, &capacities, node.max_sequences) {
        Ok(GpuLayout { estimate: need, map }) => {
            let part = |share: &GpuShare| {
                Some(LayerShare {
                    device: gpus.get(share.gpu)?.id.clone(),
                    first_layer: share.layers.start,
                    layers: share.layers.len(),
                    bytes: share.bytes,
                    available: capacities.get(share.gpu)?.free,
                })
            };
            let shares = map.shares.iter().filter(|_| gpus.len() > 1).filter_map(part).collect();
            let found = GpuPlacement { sum: need.to_string(), terms: Some(need.into()), shares };
            let fits = |tokens| length(need.with_kv_tokens(tokens).total(), tokens, tokens <= need.kv_tokens);
            (found, context_lengths(context).map(fits).collect())
        }
        Err(LoadError::NoGpuLayout { source, .. }) => {
            let sum = source.to_string();
            match *source {
                NoGpuLayout::One(DoesNotFit { estimate: need, .. }) => {
                    let none = |tokens| length(need.with_kv_tokens(tokens).total(), tokens, false);
                    let found = GpuPlacement { sum, terms: Some(need.into()), shares: Vec::new() };
                    (found, context_lengths(context).map(none).collect())
                }
                NoGpuLayout::Several(_) => (GpuPlacement { sum, terms: None, shares: Vec::new() }, Vec::new()),
            }
        }
        // For example attention heads of a size that the GPU kernel does not support.
        Err(LoadError::Header(refused)) => {
            (GpuPlacement { sum: refused.to_string(), terms: None, shares: Vec::new() }, Vec::new())
        }
        Err(error) => return Err(error),
    };
    let chosen = match node.device {
        DeviceChoice::Auto => true,
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => device == node.device.to_string(),
    };
    Ok(Placement {
        name: joined(|gpu| &gpu.name).join(", "),
        available: capacities.iter().map(|capacity| capacity.free).sum(),
        kv_offload_bytes: 0,
        used: gpu::supports_gpus() && chosen,
        device,
        on_gpus: Some(on_gpus),
        lengths,
    })
}

impl GpuPlacement {
    pub fn describe(&self) -> String {
        let sum = output::sanitize(&self.sum);
        [sum].into_iter().chain(self.shares.iter().map(LayerShare::describe)).collect::<Vec<_>>().join("\n")
    }
}

impl LayerShare {
    fn describe(&self) -> String {
        let last = self.first_layer + self.layers.saturating_sub(1);
        let (device, bytes, available) = (&self.device, Bytes(self.bytes), Bytes(self.available));
        format!("{device}: layers {} to {last}, {bytes} of {available}", self.first_layer)
    }
}
