//! Memory estimate of a model on the GPUs that NVML lists, calculated in the same way as when the model is loaded.
//!
//! No GPU is opened, because opening a GPU takes some of its memory and needs a build with GPU support. The GPUs'
//! speeds are therefore unknown: the layers of a model that needs several GPUs are assigned as if all were equally
//! fast, starting with the GPU that has the most free memory. A real load starts with the fastest GPU.

use std::path::Path;

use cfq_engine::LoadError;
use cfq_engine::cuda::{DoesNotFitGpus, GpuEstimate, fit_on_gpus};
use cfq_inference_node::gpu;
use cfq_inference_node::gpu::DeviceChoice;
use cfq_inference_node::models::{LoadMeasurements, MeasuredLoad};
use cfq_memory::{Bytes, DoesNotFit, GpuCapacity, GpuShare};
use cfq_proto::node::{Device, DeviceKind};
use schemars::JsonSchema;
use serde::Serialize;

use super::{DeviceFit, LengthFit, MemoryTerms, context_lengths};
use crate::config::NodeConfig;

/// The estimate on one GPU, or on several together.
#[derive(Serialize, JsonSchema)]
pub struct GpuFit {
    /// Text: the estimate for the device map that a load would choose, term by term, or the reason why the model does
    /// not fit.
    pub estimate: String,
    /// Terms of the estimate; `None` if the model does not fit on several GPUs together, or if the GPU forward pass
    /// does not support it. `estimate` then states the reason.
    pub terms: Option<MemoryTerms>,
    /// Layers and memory on each GPU; empty if there is only one GPU.
    pub shares: Vec<LayerShare>,
}

#[derive(Serialize, JsonSchema)]
pub struct LayerShare {
    device: String,
    first_layer: usize,
    /// Number of layers.
    layers: usize,
    total_bytes: u64,
    available_bytes: u64,
}

/// Returns one estimate for each GPU alone. If there are several GPUs and `device` is `auto`, a last estimate is for
/// the model split over all of them.
pub fn gpu_fits(
    devices: &[Device],
    path: &Path,
    context: u64,
    measured: Option<&LoadMeasurements>,
    node: &NodeConfig,
) -> Result<Vec<DeviceFit>, LoadError> {
    let gpus: Vec<&Device> = devices.iter().filter(|device| device.kind == DeviceKind::Cuda).collect();
    let alone = gpus.iter().map(std::slice::from_ref);
    let together = Some(&gpus[..]).filter(|gpus| gpus.len() > 1 && node.device == DeviceChoice::Auto);
    alone.chain(together).map(|gpus| gpu_fit(gpus, path, context, measured, node)).collect()
}

fn gpu_fit(
    gpus: &[&Device],
    path: &Path,
    context: u64,
    measured: Option<&LoadMeasurements>,
    node: &NodeConfig,
) -> Result<DeviceFit, LoadError> {
    let capacity = |gpu: &&Device| GpuCapacity {
        free_bytes: gpu.memory_total.saturating_sub(gpu.memory_others),
        bandwidth: 1.0,
        overhead_per_mille: measured
            .and_then(|measured| measured.on_device(&gpu::measurement_key(&gpu.id, gpu.uuid.as_deref())))
            .map_or(0, MeasuredLoad::overhead_per_mille),
    };
    let capacities: Vec<GpuCapacity> = gpus.iter().map(capacity).collect();
    let joined = |what: fn(&Device) -> &str| gpus.iter().map(|gpu| what(gpu)).collect::<Vec<_>>();
    let device = joined(|gpu| &gpu.id).join(",");
    let length = |total_bytes: u64, tokens, fits| LengthFit { tokens, total_bytes, fits };
    let (on_gpus, lengths) = match fit_on_gpus(path, &device, &capacities, node.max_sequences) {
        Ok(GpuEstimate { estimate, device_map }) => {
            let part = |share: &GpuShare| {
                Some(LayerShare {
                    device: gpus.get(share.gpu)?.id.clone(),
                    first_layer: share.layers.start,
                    layers: share.layers.len(),
                    total_bytes: share.total_bytes,
                    available_bytes: capacities.get(share.gpu)?.free_bytes,
                })
            };
            let shares = device_map.shares.iter().filter(|_| gpus.len() > 1).filter_map(part).collect();
            let found = GpuFit { estimate: estimate.to_string(), terms: Some(estimate.into()), shares };
            let fits = |tokens| length(estimate.with_kv_tokens(tokens).total(), tokens, tokens <= estimate.kv_tokens);
            (found, context_lengths(context).map(fits).collect())
        }
        Err(LoadError::DoesNotFitGpus { source, .. }) => {
            let text = source.to_string();
            match *source {
                DoesNotFitGpus::One(DoesNotFit { estimate, .. }) => {
                    let none = |tokens| length(estimate.with_kv_tokens(tokens).total(), tokens, false);
                    let found = GpuFit { estimate: text, terms: Some(estimate.into()), shares: Vec::new() };
                    (found, context_lengths(context).map(none).collect())
                }
                DoesNotFitGpus::Several(_) => (GpuFit { estimate: text, terms: None, shares: Vec::new() }, Vec::new()),
            }
        }
        // For example attention heads of a size that the GPU kernel does not support.
        Err(LoadError::Header(refused)) => {
            (GpuFit { estimate: refused.to_string(), terms: None, shares: Vec::new() }, Vec::new())
        }
        Err(error) => return Err(error),
    };
    let chosen = match node.device {
        DeviceChoice::Auto => true,
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => device == node.device.to_string(),
    };
    Ok(DeviceFit {
        name: joined(|gpu| &gpu.name).join(", "),
        available_bytes: capacities.iter().map(|capacity| capacity.free_bytes).sum(),
        kv_offload_bytes: 0,
        usable: gpu::supports_gpus() && chosen,
        device,
        on_gpus: Some(on_gpus),
        lengths,
    })
}

impl GpuFit {
    pub fn describe(&self) -> Vec<String> {
        [self.estimate.clone()].into_iter().chain(self.shares.iter().map(LayerShare::describe)).collect()
    }
}

impl LayerShare {
    fn describe(&self) -> String {
        let last = self.first_layer + self.layers.saturating_sub(1);
        let (device, bytes, available) = (&self.device, Bytes(self.total_bytes), Bytes(self.available_bytes));
        format!("{device}: layers {} to {last}, {bytes} of {available}", self.first_layer)
    }
}
