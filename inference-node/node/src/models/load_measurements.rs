//! Measured and predicted memory of earlier loads: one small file per model in the model folder, also for models that
//! are a user's own files.
//!
//! The prediction counts what the engine allocates; the memory of a process also depends on the allocator, the kernel's
//! page tables and what libraries keep. So each load from disk is measured, and if it used more than predicted, the
//! next prediction for the same device is raised by the difference. A file that cannot be read is reported and ignored;
//! then the prediction is only less precise.
//!
//! A load is recorded when it starts, and the record is removed when it ends, whether it succeeds or not. If a record
//! remains after a restart of the node, the process ended during the load, for example because of the kernel's OOM
//! killer.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cfq_engine::cuda::GpuAllocation;
use cfq_link::child::ProcessIdentity;
use cfq_proto::model::ModelId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::file_lock::FileLock;
use super::model_files::{file_stem, write_json};
use super::{ModelError, ModelStore, file_error};

/// Version of the format of measurements.
const MEASUREMENTS_FORMAT_VERSION: u32 = 1;

/// Measured loads of one model, by device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadMeasurements {
    format: u32,
    model: ModelId,
    /// Processes that have recorded the start of a load but not its end.
    #[serde(default)]
    loading: Vec<ProcessIdentity>,
    /// Measured loads by device ([`crate::gpu::measurement_key`]); a model on several GPUs has an entry for each.
    #[serde(default)]
    devices: BTreeMap<String, MeasuredLoad>,
}

/// Predicted and measured memory of a load on one device, in bytes. On the CPU, both numbers count all memory that the
/// load added to the process; on a GPU, only the weights, because the model's tables and KV pool are single allocations
/// of exactly the predicted size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredLoad {
    /// Predicted memory.
    pub predicted: u64,
    /// Measured memory: a moving average in which later loads weigh more.
    #[serde(alias = "took")]
    pub measured: u64,
}

impl MeasuredLoad {
    /// Creates the measurement of a load that used `bytes` bytes of a GPU. Both numbers count the weights only, see
    /// [`MeasuredLoad`].
    pub fn of_gpu_weights(allocation: &GpuAllocation, bytes: u64) -> Self {
        Self { predicted: allocation.weight_bytes, measured: allocation.measured_weight_bytes(bytes) }
    }

    /// Measured overhead, in per mille of the prediction; 0 if less than predicted was used.
    pub fn overhead_per_mille(self) -> u64 {
        let overhead = u128::from(self.measured.saturating_sub(self.predicted)) * 1000;
        u64::try_from(overhead / u128::from(self.predicted.max(1))).unwrap_or(u64::MAX)
    }
}

impl LoadMeasurements {
    fn new(model: &ModelId) -> Self {
        Self {
            format: MEASUREMENTS_FORMAT_VERSION,
            model: model.clone(),
            loading: Vec::new(),
            devices: BTreeMap::new(),
        }
    }

    /// Measurement for a device; `None` if the model has not been measured on it.
    pub fn on_device(&self, device: &str) -> Option<MeasuredLoad> {
        self.devices.get(device).copied()
    }

    /// Number of consecutive loads of the model during which the loading process ended.
    pub fn interrupted_loads(&self) -> usize {
        self.loading.iter().filter(|process| !process.is_alive()).count()
    }
}

impl ModelStore {
    /// Path of the file with the measurements of a model.
    pub fn measurements_file(&self, model: &ModelId) -> PathBuf {
        self.dir.join("measured").join(format!("{}.json", file_stem(model)))
    }

    /// Reads the measurements of a model; `None` if there are none yet.
    ///
    /// # Errors
    /// [`ModelError::UnreadableMeasurements`] or [`ModelError::Io`].
    pub fn load_measurements(&self, model: &ModelId) -> Result<Option<LoadMeasurements>, ModelError> {
        let path = self.measurements_file(model);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(file_error("read", &path)(error)),
        };
        let unreadable = |reason: String| ModelError::UnreadableMeasurements { path: path.clone(), reason };
        let measurements: LoadMeasurements =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if measurements.format != MEASUREMENTS_FORMAT_VERSION || measurements.model != *model {
            return Err(unreadable("it has another format or belongs to another model".to_owned()));
        }
        Ok(Some(measurements))
    }

    /// Records that a load begins in this process.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn record_load_start(&self, model: &ModelId) -> Result<(), ModelError> {
        self.change_measurements(model, |measurements| {
            measurements.loading.extend(ProcessIdentity::of(std::process::id()));
        })
    }

    /// Records that this process stops cleanly during a load, so that a later process does not take it for a crash.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn record_load_stop(&self, model: &ModelId) -> Result<(), ModelError> {
        self.change_measurements(model, |measurements| {
            measurements.loading.retain(|process| process.pid != std::process::id() || !process.is_alive());
        })
    }

    /// Records that a load ended, successful or not, with the memory measured on each device.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn record_load_end(&self, model: &ModelId, loads: &[(String, MeasuredLoad)]) -> Result<(), ModelError> {
        self.change_measurements(model, |measurements| {
            // Records of other live processes stay, since they may be loading the model too.
            measurements.loading.retain(|process| process.pid != std::process::id() && process.is_alive());
            for (device, now) in loads {
                let mean = match measurements.on_device(device).filter(|old| old.predicted == now.predicted) {
                    Some(old) => MeasuredLoad { measured: old.measured / 2 + now.measured / 2, ..*now },
                    None => *now,
                };
                measurements.devices.insert(device.clone(), mean);
            }
        })
    }

    /// Changes the measurements of a model. An unreadable file is replaced.
    fn change_measurements(
        &self,
        model: &ModelId,
        change: impl FnOnce(&mut LoadMeasurements),
    ) -> Result<(), ModelError> {
        let path = self.measurements_file(model);
        let folder = path.parent().unwrap_or(Path::new("/"));
        let _lock = FileLock::exclusive(&folder.join(".lock"))?;
        let current = self.load_measurements(model).ok().flatten();
        let mut measurements = current.unwrap_or_else(|| LoadMeasurements::new(model));
        change(&mut measurements);
        write_json(&path, &measurements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{Hub, HubConfig};

    fn store(dir: &Path) -> ModelStore {
        let hub = Hub::new(&HubConfig::default(), |_| None);
        ModelStore { dir: dir.to_owned(), quota: None, bound: Vec::new(), hub }
    }

    #[test]
    fn measured_loads_are_averaged_and_only_overhead_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        assert_eq!(store.load_measurements(&model).unwrap(), None);
        let load = |device: &str, predicted, measured| (device.to_owned(), MeasuredLoad { predicted, measured });
        store.record_load_end(&model, &[load("cpu", 1000, 1200)]).unwrap();
        store.record_load_end(&model, &[load("cpu", 1000, 1100)]).unwrap();
        let stored = store.load_measurements(&model).unwrap().unwrap();
        let cpu = stored.on_device("cpu").unwrap();
        assert_eq!((cpu.measured, cpu.overhead_per_mille()), (1150, 150));
        assert_eq!(stored.on_device("cuda:0"), None);
        // If the prediction differs, for example because of a newer version, the average starts again.
        store.record_load_end(&model, &[load("cpu", 2000, 1900)]).unwrap();
        let stored = store.load_measurements(&model).unwrap().unwrap();
        assert_eq!(stored.on_device("cpu").unwrap().overhead_per_mille(), 0);
        store.record_load_end(&model, &[load("GPU-ab00", 100, 150), load("cuda:1", 300, 300)]).unwrap();
        let stored = store.load_measurements(&model).unwrap().unwrap();
        let overhead =
            ["cpu", "GPU-ab00", "cuda:1"].map(|device| stored.on_device(device).unwrap().overhead_per_mille());
        assert_eq!(overhead, [0, 500, 0]);
    }

    #[test]
    fn interrupted_loads_are_counted_until_one_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        let interrupted = || store.load_measurements(&model).unwrap().unwrap().interrupted_loads();
        store.record_load_start(&model).unwrap();
        assert_eq!(interrupted(), 0, "this process still runs");
        let ended = ProcessIdentity { pid: std::process::id(), started: "before".to_owned() };
        store.change_measurements(&model, |m| m.loading = vec![ended.clone(), ended]).unwrap();
        store.record_load_start(&model).unwrap();
        assert_eq!(interrupted(), 2);
        store.record_load_end(&model, &[]).unwrap();
        assert_eq!(interrupted(), 0);
    }

    #[test]
    fn clean_stop_during_a_load_is_no_interrupted_load() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        let crashed = ProcessIdentity { pid: std::process::id(), started: "before".to_owned() };
        store.change_measurements(&model, |m| m.loading = vec![crashed.clone()]).unwrap();
        store.record_load_start(&model).unwrap();
        store.record_load_stop(&model).unwrap();
        assert_eq!(store.load_measurements(&model).unwrap().unwrap().loading, [crashed], "only this process's record");
    }

    #[test]
    fn unreadable_file_is_reported_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        let path = store.measurements_file(&model);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        for text in ["", "{", r#"{"format":9,"model":"path:/m/a.gguf"}"#, r#"{"format":1,"model":"path:/m/b.gguf"}"#] {
            fs::write(&path, text).unwrap();
            let error = store.load_measurements(&model).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("not used"), "{error}");
        }
        store.record_load_end(&model, &[]).unwrap();
        assert_eq!(store.load_measurements(&model).unwrap().unwrap().interrupted_loads(), 0);
    }

    #[test]
    fn measurements_of_0_1_still_load() {
        let text = r#"{"format":1,"model":"path:/m/a.gguf","devices":{"cpu":{"predicted":1000,"took":1200}}}"#;
        let stored: LoadMeasurements = serde_json::from_str(text).unwrap();
        assert_eq!(stored.on_device("cpu"), Some(MeasuredLoad { predicted: 1000, measured: 1200 }));
    }
}
