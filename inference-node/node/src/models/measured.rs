//! What loads of a model really took, beside what was predicted: a small file of its own in the model folder, for models
//! that are a user's own files too.
//!
//! The prediction counts what the engine allocates; what a process holds also depends on the allocator, the kernel's page
//! tables and what a library keeps for itself. So each load from the disk is measured, and the next prediction for the same
//! device is raised by what it was short. A file that cannot be read is said, and counts as none: it only costs precision.
//!
//! A load is noted before it begins and struck out when it ends, well or not. What stays noted over starts of the node is a
//! model whose load ends the process, as the kernel does when memory runs out.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cfq_link::child::ProcessIdentity;
use cfq_proto::model::ModelId;
use serde::{Deserialize, Serialize};

use super::record::{self, Lock};
use super::{ModelError, Store, file_error};

const FORMAT: u32 = 1;

/// Of one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    format: u32,
    model: ModelId,
    /// Who began a load that has not ended.
    #[serde(default)]
    loading: Vec<ProcessIdentity>,
    /// By what [`crate::gpu::kept_as`] calls the device; a model over several cards has an entry for each.
    #[serde(default)]
    devices: BTreeMap<String, Took>,
}

/// Bytes of a load without what only serving takes: on the CPU of all that is in memory then, on a card of the weights on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Took {
    pub predicted: u64,
    /// The mean of the last ones, the later the more.
    pub took: u64,
}

impl Took {
    /// How many thousandths it took more than was predicted; less is no reason to predict less.
    pub fn thousandths(self) -> u64 {
        let more = u128::from(self.took.saturating_sub(self.predicted)) * 1000 / u128::from(self.predicted.max(1));
        u64::try_from(more).unwrap_or(u64::MAX)
    }
}

impl Measured {
    fn new(model: &ModelId) -> Self {
        Self { format: FORMAT, model: model.clone(), loading: Vec::new(), devices: BTreeMap::new() }
    }

    pub fn on(&self, device: &str) -> Option<Took> {
        self.devices.get(device).copied()
    }

    /// Loads in a row that ended with their process.
    pub fn unended(&self) -> usize {
        self.loading.iter().filter(|process| !process.is_alive()).count()
    }
}

impl Store {
    pub fn measured_file(&self, model: &ModelId) -> PathBuf {
        self.dir.join("measured").join(format!("{}.json", record::stem(model)))
    }

    /// `None` if nothing was measured yet.
    pub fn measured(&self, model: &ModelId) -> Result<Option<Measured>, ModelError> {
        let path = self.measured_file(model);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(file_error("read", &path)(error)),
        };
        let unreadable = |why: String| ModelError::Measured { path: path.clone(), why };
        let measured: Measured = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if measured.format != FORMAT || measured.model != *model {
            return Err(unreadable("it is of another format, or another model's".to_owned()));
        }
        Ok(Some(measured))
    }

    /// A load begins in this process.
    pub fn load_begins(&self, model: &ModelId) -> Result<(), ModelError> {
        self.note(model, |measured| measured.loading.extend(ProcessIdentity::of(std::process::id())))
    }

    /// It ended, whether it came to something or not, and took so much on each device where that was measured.
    pub fn load_ends(&self, model: &ModelId, took: &[(String, Took)]) -> Result<(), ModelError> {
        self.note(model, |measured| {
            // Others may be loading it too.
            measured.loading.retain(|process| process.pid != std::process::id() && process.is_alive());
            for (device, now) in took {
                let mean = match measured.on(device).filter(|old| old.predicted == now.predicted) {
                    Some(old) => Took { took: old.took / 2 + now.took / 2, ..*now },
                    None => *now,
                };
                measured.devices.insert(device.clone(), mean);
            }
        })
    }

    /// What cannot be read is begun anew.
    fn note(&self, model: &ModelId, change: impl FnOnce(&mut Measured)) -> Result<(), ModelError> {
        let path = self.measured_file(model);
        let folder = path.parent().unwrap_or(Path::new("/"));
        let _alone = Lock::alone(&folder.join(".lock"))?;
        let mut measured = self.measured(model).ok().flatten().unwrap_or_else(|| Measured::new(model));
        change(&mut measured);
        record::write_json(&path, &measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{Hub, HubConfig};

    fn store(dir: &Path) -> Store {
        let hub = Hub::new(&HubConfig::default(), |_| None);
        Store { dir: dir.to_owned(), quota: None, bound: Vec::new(), hub }
    }

    #[test]
    fn what_a_load_took_is_kept_as_a_mean_and_only_more_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        assert_eq!(store.measured(&model).unwrap(), None);
        let took = |device: &str, predicted, took| (device.to_owned(), Took { predicted, took });
        store.load_ends(&model, &[took("cpu", 1000, 1200)]).unwrap();
        store.load_ends(&model, &[took("cpu", 1000, 1100)]).unwrap();
        let kept = store.measured(&model).unwrap().unwrap();
        assert_eq!((kept.on("cpu").unwrap().took, kept.on("cpu").unwrap().thousandths()), (1150, 150));
        assert_eq!(kept.on("cuda:0"), None);
        // Another prediction, as by a newer version: what was measured against the old one is over.
        store.load_ends(&model, &[took("cpu", 2000, 1900)]).unwrap();
        assert_eq!(store.measured(&model).unwrap().unwrap().on("cpu").unwrap().thousandths(), 0);
        store.load_ends(&model, &[took("GPU-ab00", 100, 150), took("cuda:1", 300, 300)]).unwrap();
        let kept = store.measured(&model).unwrap().unwrap();
        let more = ["cpu", "GPU-ab00", "cuda:1"].map(|device| kept.on(device).unwrap().thousandths());
        assert_eq!(more, [0, 500, 0]);
    }

    #[test]
    fn a_load_that_never_ended_is_remembered_until_one_does() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        let unended = || store.measured(&model).unwrap().unwrap().unended();
        store.load_begins(&model).unwrap();
        assert_eq!(unended(), 0, "it goes on");
        let gone = ProcessIdentity { pid: std::process::id(), started: "before".to_owned() };
        store.note(&model, |measured| measured.loading = vec![gone.clone(), gone]).unwrap();
        store.load_begins(&model).unwrap();
        assert_eq!(unended(), 2);
        store.load_ends(&model, &[]).unwrap();
        assert_eq!(unended(), 0);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_and_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), "path:/m/a.gguf".parse().unwrap());
        let path = store.measured_file(&model);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        for text in ["", "{", r#"{"format":9,"model":"path:/m/a.gguf"}"#, r#"{"format":1,"model":"path:/m/b.gguf"}"#] {
            fs::write(&path, text).unwrap();
            let said = store.measured(&model).unwrap_err().to_string();
            assert!(said.contains(path.to_str().unwrap()) && said.contains("not used"), "{said}");
        }
        store.load_ends(&model, &[]).unwrap();
        assert_eq!(store.measured(&model).unwrap().unwrap().unended(), 0);
    }
}
