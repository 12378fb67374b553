//! What goes: by hand, or to make room for another.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_proto::model::ModelId;

use super::{Installed, Place, Source, State, Store};
use crate::models::hub;
use crate::models::quota::{self, Candidate};
use crate::models::record::{Lock, Record};
use crate::models::{ModelError, Step, file_error};

/// Left free on the disk: the database and the logs may live there too.
const RESERVE: u64 = 256 << 20;

impl Store {
    /// Removes a fetched model, or what there is of it; returns the bytes freed.
    pub fn remove(&self, model: &ModelId) -> Result<u64, ModelError> {
        let place = self.place(model)?;
        let partial = hub::partial_folder(&place.folder, model);
        if self.record(model, &place)?.is_none() && !partial.exists() {
            return Err(ModelError::Absent { model: model.clone() });
        }
        let Some(_alone) = Lock::try_alone(&place.pull_lock())? else {
            return Err(ModelError::BeingFetched { model: model.clone() });
        };
        self.remove_alone(model, &place)
    }

    /// The same, for a holder of the folder's lock.
    fn remove_alone(&self, model: &ModelId, place: &Place<'_>) -> Result<u64, ModelError> {
        let Some(_unused) = Lock::try_alone_a_while(&place.use_lock())? else {
            return Err(ModelError::InUse { model: model.clone() });
        };
        let before = used(&self.dir);
        if let Some(record) = self.record(model, place)? {
            // The record first: without it nobody takes what is left for a model.
            if place.record().exists() {
                fs::remove_file(place.record()).map_err(file_error("remove", &place.record()))?;
            }
            match &place.source {
                Source::Package(package) => {
                    let folder = self.dir.join(package.folder());
                    if folder.exists() {
                        fs::remove_dir_all(&folder).map_err(file_error("remove", &folder))?;
                    }
                }
                Source::Hub { .. } => self.remove_files(&record, &self.records_of(&place.folder)?)?,
            }
        }
        let partial = hub::partial_folder(&place.folder, model);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(file_error("remove", &partial))?;
        }
        Ok(before.saturating_sub(used(&self.dir)))
    }

    /// Files that no record of the repository names, and the folders they leave empty.
    pub(super) fn remove_files(&self, gone: &Record, left: &[(PathBuf, Record)]) -> Result<(), ModelError> {
        let named: BTreeSet<&Path> =
            left.iter().flat_map(|(_, record)| &record.files).map(|file| file.path.as_path()).collect();
        for file in gone.files.iter().filter(|file| !named.contains(file.path.as_path())) {
            let path = self.dir.join(&file.path);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file_error("remove", &path)(error));
                }
                Ok(()) | Err(_) => {}
            }
            for folder in path.ancestors().skip(1).take_while(|folder| **folder != *self.dir) {
                // Not empty: others still need it.
                if fs::remove_dir(folder).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Room for so many bytes more, by the quota and on the disk.
    pub(super) fn make_room(
        &self,
        model: &ModelId,
        place: &Place<'_>,
        need: u64,
        report: &mut dyn FnMut(Step),
    ) -> Result<(), ModelError> {
        // Files with two names free less than they are long: look again until nothing more has to go.
        while let Some(quota) = self.quota {
            let here = self.list()?;
            let kept = |i: &Installed| {
                let wanted = i.model == *model || self.bound.contains(&i.model);
                i.pinned || i.in_use || wanted || i.state != State::Ready
            };
            let candidate =
                |i: &Installed| Candidate { bytes: i.bytes, used_at: i.used_at.unwrap_or(0), kept: kept(i) };
            let candidates: Vec<Candidate> = here.iter().map(candidate).collect();
            // Others that are being fetched count with what they will be.
            let coming: u64 = here.iter().filter(|i| i.model != *model).map(Installed::to_come).sum();
            let used = used(&self.dir) + coming;
            let short = |short: quota::Short| {
                let model = model.clone();
                ModelError::Quota { model, need, used, quota, short: short.by }
            };
            let plan = quota::plan(used, need, quota, &candidates).map_err(short)?;
            if plan.is_empty() {
                break;
            }
            for i in plan {
                let other = &here[i].model;
                let its = self.place(other)?;
                let bytes =
                    if its.folder == place.folder { self.remove_alone(other, &its)? } else { self.remove(other)? };
                tracing::info!(model = %other, bytes, "removed to make room");
                report(Step::Removed { model: other.clone(), bytes });
            }
        }
        let have = free(&self.dir).map_err(file_error("look at", &self.dir))?;
        if need > 0 && have < need.saturating_add(RESERVE) {
            return Err(ModelError::NoSpace { model: model.clone(), need, have, folder: self.dir.clone() });
        }
        Ok(())
    }
}

/// Bytes of all files below, each counted once however many names it has.
fn used(folder: &Path) -> u64 {
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

/// Bytes that may still be written below, for users without privileges.
fn free(folder: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}
