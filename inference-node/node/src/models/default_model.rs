//! Choice of the default model of a machine without a configured model: a curated model that its GPUs can run, or the
//! reason why they cannot.
//!
//! A model is chosen only if this build and the driver can use the GPUs: downloading gigabytes for a model that then
//! runs on the CPU would not help. A GPU that cannot be used is reported with the reason. GPUs that the user has hidden
//! from CUDA or excluded by the `device` setting are ignored.

use cfq_engine::cuda::CudaUnavailable;
use cfq_memory::GpuCapacity;
use cfq_proto::node::{Device, DeviceKind};

use crate::gpu::{self, DeviceChoice, usable_uuids};
use crate::models::curated::{CuratedModel, fitting_models, nominal_capacity};

/// Minimum compute capability of the kernels in a GPU build, times ten (`80` is 8.0); set by inference-node/cuda/build.
const MIN_COMPUTE_CAPABILITY: &str = match option_env!("CUDA_COMPUTE_CAP") {
    Some(capability) => capability,
    None => "80",
};

/// Result of the choice of a default model.
#[derive(Debug)]
pub enum DefaultModel {
    /// There is no usable GPU, or none that fits a curated model.
    NoCandidate,
    /// GPUs that fit the curated model `entry` exist but cannot be used.
    UnusedGpu {
        /// The largest curated model that would fit.
        entry: &'static CuratedModel,
        /// The GPUs that cannot be used.
        gpus: Vec<Device>,
        /// Why the GPUs cannot be used.
        reason: GpuUnusable,
    },
    /// A curated model can run on the GPUs.
    Curated {
        /// The model.
        entry: &'static CuratedModel,
        /// The GPUs that can run the model.
        gpus: Vec<Device>,
    },
}

/// Why existing GPUs cannot run models.
#[derive(Debug, thiserror::Error)]
pub enum GpuUnusable {
    /// CUDA is unavailable.
    #[error(transparent)]
    CudaUnavailable(#[from] CudaUnavailable),
    /// The compute capability of a GPU is too low for the kernels of this build. The text names the GPU, its capability
    /// and the required one.
    #[error("{0}")]
    UnsupportedCapability(String),
    /// None of the GPUs that CUDA reports can be identified with one that NVML reports.
    #[error("CUDA's GPUs cannot be matched with those that NVML reports (a MIG slice, or GPUs without UUIDs)")]
    Unmatched,
}

/// Chooses the default model for a node with the setting `device` and `sequences` concurrent sequences, from the GPUs
/// that NVML reports and that this build can use.
pub fn choose_default_model(device: DeviceChoice, sequences: u32) -> DefaultModel {
    choose(device, sequences, &gpu::inventory().devices, usable_uuids)
}

fn choose(
    device: DeviceChoice,
    sequences: u32,
    devices: &[Device],
    usable: impl FnOnce(DeviceChoice) -> Result<Vec<String>, CudaUnavailable>,
) -> DefaultModel {
    let mut gpus: Vec<Device> = devices.iter().filter(|device| device.kind == DeviceKind::Cuda).cloned().collect();
    if device == DeviceChoice::Cpu || gpus.is_empty() {
        return DefaultModel::NoCandidate;
    }
    let unused = |gpus: Vec<Device>, reason| match best(sequences, &gpus) {
        Some(entry) => DefaultModel::UnusedGpu { entry, gpus, reason },
        None => DefaultModel::NoCandidate,
    };
    let all = gpus.clone();
    match usable(device) {
        Ok(uuids) => gpus.retain(|gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuids.contains(uuid))),
        // NVML reports GPUs but CUDA none, so the user has hidden them from CUDA.
        Err(CudaUnavailable::NoGpus) => return DefaultModel::NoCandidate,
        Err(unavailable) => return unused(all, unavailable.into()),
    }
    if gpus.is_empty() {
        return unused(all, GpuUnusable::Unmatched);
    }
    let (old, gpus): (Vec<Device>, Vec<Device>) =
        gpus.into_iter().partition(|gpu| unsupported_capability(gpu).is_some());
    if let (true, Some(reason)) = (gpus.is_empty(), old.first().and_then(unsupported_capability)) {
        return unused(old, GpuUnusable::UnsupportedCapability(reason));
    }
    match best(sequences, &gpus) {
        Some(entry) => DefaultModel::Curated { entry, gpus },
        None => DefaultModel::NoCandidate,
    }
}

/// The largest curated model with an unrestricted licence that fits the GPUs, alone or together. The licence must be
/// unrestricted because the user is not asked.
fn best(sequences: u32, gpus: &[Device]) -> Option<&'static CuratedModel> {
    let capacities: Vec<GpuCapacity> = gpus.iter().map(nominal_capacity).collect();
    fitting_models(&capacities, sequences).find(|entry| entry.unrestricted_licence)
}

/// The reason why the kernels of a GPU build do not run on this GPU; `None` if they do, or if its compute capability is
/// unknown.
fn unsupported_capability(gpu: &Device) -> Option<String> {
    let minimum: u32 = MIN_COMPUTE_CAPABILITY.parse().unwrap_or(80);
    let reported = gpu.compute_capability.as_deref()?;
    let parsed = reported.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor): (u32, u32) = parsed?;
    let unsupported = major.saturating_mul(10).saturating_add(minor) < minimum;
    let required = format!("{}.{}", minimum / 10, minimum % 10);
    unsupported.then(|| {
        format!("{} has compute capability {reported}, and a build for GPUs requires {required} or newer", gpu.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu_device(name: &str, gib: u64, capability: &str) -> Device {
        let mut gpu = gpu::inventory().devices[0].clone();
        (gpu.kind, gpu.name, gpu.memory_total) = (DeviceKind::Cuda, name.to_owned(), gib << 30);
        (gpu.uuid, gpu.compute_capability) = (Some(format!("GPU-{name}")), Some(capability.to_owned()));
        // Nearly all of its memory is used by another program at present.
        gpu.memory_others = (gib << 30) - 1;
        gpu
    }

    /// UUIDs of the GPUs that CUDA reports: all except the one called "hidden".
    fn visible(_: DeviceChoice) -> Result<Vec<String>, CudaUnavailable> {
        Ok(["a", "b", "old", "tiny"].map(|name| format!("GPU-{name}")).to_vec())
    }

    /// Memory of the chosen model's minimum GPU, in GiB.
    fn chosen(gpus: &[Device]) -> Option<u64> {
        match choose(DeviceChoice::Auto, 4, gpus, visible) {
            DefaultModel::Curated { entry, .. } => Some(entry.min_gpu_gib),
            DefaultModel::NoCandidate | DefaultModel::UnusedGpu { .. } => None,
        }
    }

    #[test]
    fn model_is_chosen_by_total_memory_not_free_memory() {
        let devices = [gpu::inventory().devices[0].clone(), gpu_device("a", 12, "8.6")];
        let DefaultModel::Curated { entry, gpus } = choose(DeviceChoice::Auto, 4, &devices, visible) else {
            panic!("no model")
        };
        assert_eq!((entry.min_gpu_gib, entry.unrestricted_licence), (12, true));
        assert_eq!(gpus.iter().map(|gpu| gpu.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn gpus_count_together_unless_unsupported_or_hidden() {
        let good = gpu_device("a", 12, "8.6");
        assert_eq!(chosen(&[gpu_device("a", 16, "8.6"), gpu_device("b", 16, "8.6")]), Some(24));
        assert_eq!(chosen(&[good.clone(), gpu_device("old", 24, "7.5")]), Some(12));
        assert_eq!(chosen(&[good.clone(), gpu_device("hidden", 24, "8.6")]), Some(12));
        assert_eq!(chosen(&[good, gpu_device("tiny", 1, "8.6")]), Some(12));
    }

    #[test]
    fn nothing_is_chosen_without_a_large_enough_configured_gpu() {
        let none = |device, gpus: &[Device]| matches!(choose(device, 4, gpus, visible), DefaultModel::NoCandidate);
        assert!(none(DeviceChoice::Auto, &gpu::inventory().devices[..1]));
        assert!(none(DeviceChoice::Auto, &[gpu_device("hidden", 24, "8.6"), gpu_device("tiny", 1, "8.6")]));
        let hidden = choose(DeviceChoice::Auto, 4, &[gpu_device("a", 24, "8.6")], |_| Err(CudaUnavailable::NoGpus));
        assert!(matches!(hidden, DefaultModel::NoCandidate), "{hidden:?}");
        assert!(none(DeviceChoice::Auto, &[gpu_device("tiny", 1, "8.6")]));
        assert!(none(DeviceChoice::Cpu, &[gpu_device("a", 24, "8.6")]));
        let small = choose(DeviceChoice::Auto, 4, &[gpu_device("tiny", 1, "8.6")], |_| Err(CudaUnavailable::NotBuilt));
        assert!(matches!(small, DefaultModel::NoCandidate), "{small:?}");
    }

    #[test]
    fn unused_gpu_has_a_reason() {
        let gpus = [gpu_device("a", 12, "8.6")];
        for cause in
            [CudaUnavailable::NotBuilt, CudaUnavailable::NoLibrary { library: "cuBLAS", package: "nvidia-cublas" }]
        {
            let text = cause.to_string();
            let found = choose(DeviceChoice::Auto, 4, &gpus, |_| Err(cause));
            let DefaultModel::UnusedGpu { entry, reason, .. } = found else { panic!("{found:?}") };
            assert_eq!((entry.min_gpu_gib, reason.to_string()), (12, text));
        }
        let found = choose(DeviceChoice::Auto, 4, &gpus, |_| Ok(Vec::new()));
        let DefaultModel::UnusedGpu { reason: GpuUnusable::Unmatched, .. } = found else { panic!("{found:?}") };
        let found = choose(DeviceChoice::Auto, 4, &[gpu_device("old", 24, "7.5")], visible);
        let DefaultModel::UnusedGpu { entry, reason: GpuUnusable::UnsupportedCapability(reason), .. } = found else {
            panic!("{found:?}")
        };
        assert!(entry.min_gpu_gib == 24 && reason.contains("capability 7.5"), "{reason}");
    }

    #[test]
    fn compute_capability_below_the_kernels_is_unsupported() {
        let gpu = |capability: Option<&str>| Device {
            compute_capability: capability.map(str::to_owned),
            name: "a GPU".to_owned(),
            ..gpu::inventory().devices[0].clone()
        };
        let supported = ["8.0", "8.6", "9.0", "12.0"].map(|c| unsupported_capability(&gpu(Some(c))));
        assert_eq!(supported, [const { None }; 4]);
        assert_eq!(unsupported_capability(&gpu(None)), None);
        let old = unsupported_capability(&gpu(Some("7.5"))).unwrap();
        assert_eq!(old, "a GPU has compute capability 7.5, and a build for GPUs requires 8.0 or newer");
    }
}
