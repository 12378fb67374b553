//! Removal of models: on request, or to free disk space for another model.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_proto::model::ModelId;

use super::{FetchSource, InstallState, InstalledModel, ModelLocation, ModelStore};
use crate::models::file_lock::FileLock;
use crate::models::hub;
use crate::models::quota::{EvictionCandidate, QuotaShortfall, plan_evictions};
use crate::models::record::ModelRecord;
use crate::models::{ModelError, PullProgress, file_error};

/// Disk space that a fetch leaves free, in bytes, because the database and the logs may be on the same disk.
const DISK_RESERVE_BYTES: u64 = 256 << 20;

impl ModelStore {
    /// Removes a fetched model, or the partial download of a model. Returns the number of bytes freed.
    ///
    /// # Errors
    /// [`ModelError::NotInstalled`], [`ModelError::InUse`], [`ModelError::FetchInProgress`], [`ModelError::LocalFile`]
    /// or [`ModelError::Io`].
    pub fn remove(&self, model: &ModelId) -> Result<u64, ModelError> {
        let location = self.location(model)?;
        let partial = hub::partial_folder(&location.folder, model);
        if self.record(model, &location)?.is_none() && !partial.exists() {
            return Err(ModelError::NotInstalled { model: model.clone() });
        }
        let Some(_pull_lock) = FileLock::try_exclusive(&location.pull_lock())? else {
            return Err(ModelError::FetchInProgress { model: model.clone() });
        };
        self.remove_locked(model, &location)
    }

    /// Same as [`Self::remove`]; the caller holds the pull lock of the folder.
    fn remove_locked(&self, model: &ModelId, location: &ModelLocation<'_>) -> Result<u64, ModelError> {
        let Some(_use_lock) = FileLock::try_exclusive_briefly(&location.use_lock())? else {
            return Err(ModelError::InUse { model: model.clone() });
        };
        let before = used_bytes(&self.dir);
        if let Some(record) = self.record(model, location)? {
            // The record is removed first: without a record, files that remain after a failure do not count as a model.
            if location.record_file().exists() {
                fs::remove_file(location.record_file()).map_err(file_error("remove", &location.record_file()))?;
            }
            match &location.source {
                FetchSource::Package(package) => {
                    let folder = self.dir.join(package.folder());
                    if folder.exists() {
                        fs::remove_dir_all(&folder).map_err(file_error("remove", &folder))?;
                    }
                }
                FetchSource::Hub { .. } => self.remove_files(&record, &self.records_in(&location.folder)?)?,
            }
        }
        let partial = hub::partial_folder(&location.folder, model);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(file_error("remove", &partial))?;
        }
        Ok(before.saturating_sub(used_bytes(&self.dir)))
    }

    /// Removes the files of the record `removed` that no record in `remaining` names, and the folders that become
    /// empty.
    pub(super) fn remove_files(
        &self,
        removed: &ModelRecord,
        remaining: &[(PathBuf, ModelRecord)],
    ) -> Result<(), ModelError> {
        let named: BTreeSet<&Path> =
            remaining.iter().flat_map(|(_, record)| &record.files).map(|file| file.path.as_path()).collect();
        for file in removed.files.iter().filter(|file| !named.contains(file.path.as_path())) {
            let path = self.dir.join(&file.path);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file_error("remove", &path)(error));
                }
                Ok(()) | Err(_) => {}
            }
            for folder in path.ancestors().skip(1).take_while(|folder| **folder != *self.dir) {
                // The folder is not empty: it contains files of other models.
                if fs::remove_dir(folder).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Frees space for `need` more bytes: evicts models as the quota requires, then checks the disk.
    pub(super) fn free_space(
        &self,
        model: &ModelId,
        location: &ModelLocation<'_>,
        need: u64,
        report: &mut dyn FnMut(PullProgress),
    ) -> Result<(), ModelError> {
        // The removal of a hard-linked file frees less than its size, so evictions are planned again until no more are
        // needed.
        while let Some(quota) = self.quota {
            let installed = self.list()?;
            let protected = |i: &InstalledModel| {
                let bound = i.model == *model || self.bound.contains(&i.model);
                i.pinned || i.in_use || bound || i.state != InstallState::Complete
            };
            let candidate = |i: &InstalledModel| EvictionCandidate {
                bytes: i.bytes,
                used_at: i.used_at.unwrap_or(0),
                protected: protected(i),
            };
            let candidates: Vec<EvictionCandidate> = installed.iter().map(candidate).collect();
            // Unfinished models count with their full size.
            let others = installed.iter().filter(|i| i.model != *model);
            let remaining = others.map(InstalledModel::remaining_bytes).fold(0, u64::saturating_add);
            let used = used_bytes(&self.dir).saturating_add(remaining);
            let exceeded = |shortfall: QuotaShortfall| {
                let model = model.clone();
                ModelError::QuotaExceeded { model, need, used, quota, missing: shortfall.bytes }
            };
            let evicted = plan_evictions(used, need, quota, &candidates).map_err(exceeded)?;
            if evicted.is_empty() {
                break;
            }
            for i in evicted {
                let other = &installed[i].model;
                let other_location = self.location(other)?;
                let bytes = if other_location.folder == location.folder {
                    self.remove_locked(other, &other_location)?
                } else {
                    self.remove(other)?
                };
                tracing::info!(model = %other, bytes, "model evicted from disk");
                report(PullProgress::Evicted { model: other.clone(), bytes });
            }
        }
        let free = free_bytes(&self.dir).map_err(file_error("read the free space of", &self.dir))?;
        if need > 0 && free < need.saturating_add(DISK_RESERVE_BYTES) {
            return Err(ModelError::DiskFull { model: model.clone(), need, free, folder: self.dir.clone() });
        }
        Ok(())
    }
}

/// Bytes of all files below a folder; hard-linked files count once.
fn used_bytes(folder: &Path) -> u64 {
    fn walk(folder: &Path, seen: &mut BTreeSet<(u64, u64)>) -> u64 {
        let Ok(entries) = fs::read_dir(folder) else { return 0 };
        entries
            .flatten()
            .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
            .map(|(path, meta)| {
                if meta.is_dir() {
                    walk(&path, seen)
                } else if seen.insert((meta.dev(), meta.ino())) {
                    meta.len()
                } else {
                    0
                }
            })
            .sum()
    }
    walk(folder, &mut BTreeSet::new())
}

/// Bytes that unprivileged users may still write on a folder's disk.
fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}
