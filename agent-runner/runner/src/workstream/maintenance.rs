//! Maintenance of the mirrors: packs loose objects, joins small packs, and removes the branches of old tasks. Without
//! it, every lookup of an object would become slower with each task, and the mirror would grow without bound.
//!
//! Any process may be killed at any point without a loss: a new pack is on disk under its final name before what it
//! replaces is removed, and what is left over is removed by the next maintenance. Tasks may read and write objects
//! meanwhile, because an object is at any time in at least one place. Only the removal waits until no merge is planned.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cfq_link::failpoint;
use git2::{Oid, Repository};

use super::durable::{enable_fsync, sync_all};
use super::error::{GitError, git_context, io_context};
use super::mirror::lock_file;
use super::pack_index::objects_of_index;

/// Number of loose objects from which they are packed.
const MIN_LOOSE_OBJECTS: usize = 2_000;
/// Number of small packs from which they are joined.
const MAX_SMALL_PACKS: usize = 20;
/// Size below which a pack is small, in bytes. The packs of large repositories are not packed again.
const SMALL_PACK_BYTES: u64 = 64 << 20;
/// Size from which a loose object stays loose, in bytes: packing compares it with others, in memory.
const MAX_PACKED_OBJECT_BYTES: u64 = 16 << 20;
/// Settings of the mirror that bound the memory of packing, in bytes: the objects that are compared with each other at a
/// time, and the cached differences. libgit2 also takes the second as the size from which an object is not compared.
const PACK_SETTINGS: [(&str, i64); 2] = [("pack.windowMemory", 32 << 20), ("pack.deltaCacheSize", 16 << 20)];
/// Age from which a task's branch is removed. If the task goes on, its branch is created again from the records.
const BRANCH_RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);
/// Folder in which a new pack is written before it gets its final name.
const NEW_PACKS: &str = "cfq-new-packs";

/// Bounds that maintenance keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaintenanceLimits {
    /// Number of loose objects from which they are packed.
    pub loose_objects: usize,
    /// Number of small packs from which they are joined.
    pub small_packs: usize,
    /// Age from which a task's branch is removed.
    pub branch_age: Duration,
}

impl Default for MaintenanceLimits {
    fn default() -> Self {
        Self { loose_objects: MIN_LOOSE_OBJECTS, small_packs: MAX_SMALL_PACKS, branch_age: BRANCH_RETENTION }
    }
}

/// What maintenance did in one mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Maintained {
    /// Number of loose objects that were packed.
    pub packed_objects: usize,
    /// Number of packs that were joined into one.
    pub joined_packs: usize,
    /// Number of branches that were removed.
    pub removed_branches: usize,
}

/// Maintains all mirrors below `data_dir`, one after the other. A mirror that another process maintains, or that fails,
/// is skipped.
pub fn maintain_mirrors(data_dir: &Path, limits: &MaintenanceLimits) {
    let Ok(mirrors) = std::fs::read_dir(data_dir.join("mirrors")) else { return };
    for mirror in mirrors.flatten() {
        match maintain(&mirror.path(), limits) {
            Ok(Maintained { packed_objects: 0, joined_packs: 0, removed_branches: 0 }) => {}
            Ok(done) => tracing::debug!(mirror = %mirror.path().display(), ?done, "mirror maintained"),
            Err(error) => {
                let error = error.with_causes();
                tracing::warn!(mirror = %mirror.path().display(), error, "cannot maintain a mirror, trying again later");
            }
        }
    }
}

/// Maintains one mirror. Does nothing while another process maintains it.
///
/// # Errors
/// A [`GitError`] if the mirror cannot be read or written; nothing is lost then.
pub fn maintain(mirror: &Path, limits: &MaintenanceLimits) -> Result<Maintained, GitError> {
    enable_fsync();
    let lock = lock_file(mirror, "cfq-maintenance.lock")?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Maintained::default()),
        Err(TryLockError::Error(error)) => return io_context("lock a mirror for maintenance", Err(error)),
    }
    let new_packs = mirror.join("objects").join(NEW_PACKS);
    if new_packs.exists() {
        io_context(format!("remove {}", new_packs.display()), std::fs::remove_dir_all(&new_packs))?;
    }
    let removed_branches = remove_old_branches(mirror, limits.branch_age)?;
    let packed_objects = pack_loose_objects(mirror, limits.loose_objects)?;
    let joined_packs = join_small_packs(mirror, limits.small_packs)?;
    Ok(Maintained { packed_objects, joined_packs, removed_branches })
}

/// Packs all loose objects if there are at least `minimum`, and returns their number.
fn pack_loose_objects(mirror: &Path, minimum: usize) -> Result<usize, GitError> {
    let mut loose = loose_objects(mirror)?;
    if loose.len() < minimum.max(1) {
        return Ok(0);
    }
    keep_small(mirror, &mut loose)?;
    if loose.len() < minimum.max(1) {
        return Ok(0);
    }
    write_pack(mirror, loose.iter().map(|(id, _)| *id))?;
    failpoint::hit("runner.maintenance.packed");
    let _no_merge = merge_lock(mirror)?;
    for (n, (_, path)) in loose.iter().enumerate() {
        if n == loose.len() / 2 {
            failpoint::hit("runner.maintenance.removing");
        }
        remove(path)?;
    }
    Ok(loose.len())
}

/// Joins all small packs if there are more than `maximum`, and returns their number.
fn join_small_packs(mirror: &Path, maximum: usize) -> Result<usize, GitError> {
    let packs = small_packs(mirror)?;
    if packs.len() <= maximum.max(1) {
        return Ok(0);
    }
    let mut objects = BTreeSet::new();
    for pack in &packs {
        let index = pack.with_extension("idx");
        objects.extend(io_context(format!("read {}", index.display()), objects_of_index(&index))?);
    }
    let joined = write_pack(mirror, objects.into_iter())?;
    failpoint::hit("runner.maintenance.joined");
    let _no_merge = merge_lock(mirror)?;
    for pack in packs.iter().filter(|pack| **pack != joined) {
        // Readers look for the index first: without it, the pack does not exist for them.
        remove(&pack.with_extension("idx"))?;
        failpoint::hit("runner.maintenance.removing_packs");
        remove(pack)?;
    }
    Ok(packs.len())
}

/// Waits until no merge is planned in the mirror, and prevents one while the file is open.
fn merge_lock(mirror: &Path) -> Result<File, GitError> {
    let lock = lock_file(mirror, "cfq-merge.lock")?;
    io_context("lock a mirror", lock.lock())?;
    Ok(lock)
}

/// Writes a pack with these objects and returns its path; it is on disk then.
fn write_pack(mirror: &Path, objects: impl Iterator<Item = Oid>) -> Result<PathBuf, GitError> {
    let operation = || format!("pack objects of {}", mirror.display());
    let repository = git_context(operation(), Repository::open_bare(mirror))?;
    let mut config = git_context(operation(), repository.config())?;
    for (name, bytes) in PACK_SETTINGS {
        if config.get_i64(name).ok() != Some(bytes) {
            git_context(operation(), config.set_i64(name, bytes))?;
        }
    }
    let mut pack = git_context(operation(), repository.packbuilder())?;
    pack.set_threads(1);
    for id in objects {
        git_context(operation(), pack.insert_object(id, None))?;
    }
    let (new, packs) = (mirror.join("objects").join(NEW_PACKS), mirror.join("objects/pack"));
    io_context(operation(), std::fs::create_dir_all(&new))?;
    git_context(operation(), pack.write(&new, 0o444))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in io_context(operation(), std::fs::read_dir(&new))? {
        files.push(io_context(operation(), entry)?.path());
    }
    // The pack before its index: readers look for the index.
    files.sort_by_key(|path| path.extension().is_some_and(|extension| extension == "idx"));
    sync_all(files.iter().cloned())?;
    failpoint::hit("runner.maintenance.written");
    let mut written = packs.clone();
    for file in files {
        let name = packs.join(file.file_name().unwrap_or_default());
        io_context(operation(), std::fs::rename(&file, &name))?;
        sync_all([packs.clone()])?;
        written = name.with_extension("pack");
        failpoint::hit("runner.maintenance.renaming");
    }
    io_context(operation(), std::fs::remove_dir(&new))?;
    Ok(written)
}

/// Removes very large objects from the list. A file of a few kilobytes can contain one, because it is compressed.
fn keep_small(mirror: &Path, loose: &mut Vec<(Oid, PathBuf)>) -> Result<(), GitError> {
    let operation = || format!("read the objects of {}", mirror.display());
    let repository = git_context(operation(), Repository::open_bare(mirror))?;
    let objects = git_context(operation(), repository.odb())?;
    // An object that cannot be read is reported when it is packed.
    loose.retain(|(id, _)| objects.read_header(*id).map_or(0, |(bytes, _)| bytes as u64) < MAX_PACKED_OBJECT_BYTES);
    Ok(())
}

/// Ids and paths of the loose objects, except those in very large files.
fn loose_objects(mirror: &Path) -> Result<Vec<(Oid, PathBuf)>, GitError> {
    let objects = mirror.join("objects");
    let operation = || format!("read {}", objects.display());
    let mut found = Vec::new();
    for folder in io_context(operation(), std::fs::read_dir(&objects))? {
        let folder = io_context(operation(), folder)?;
        let prefix = folder.file_name().to_string_lossy().into_owned();
        if prefix.len() != 2 {
            continue;
        }
        for object in io_context(operation(), std::fs::read_dir(folder.path()))? {
            let object = io_context(operation(), object)?;
            // Temporary files of writers have other names.
            let Ok(id) = Oid::from_str(&format!("{prefix}{}", object.file_name().to_string_lossy())) else { continue };
            if object.metadata().is_ok_and(|metadata| metadata.len() < MAX_PACKED_OBJECT_BYTES) {
                found.push((id, object.path()));
            }
        }
    }
    Ok(found)
}

/// Paths of the packs that are small and complete.
fn small_packs(mirror: &Path) -> Result<Vec<PathBuf>, GitError> {
    let folder = mirror.join("objects/pack");
    let operation = || format!("read {}", folder.display());
    let mut found = Vec::new();
    for entry in io_context(operation(), std::fs::read_dir(&folder))? {
        let path = io_context(operation(), entry)?.path();
        let is_pack = path.extension().is_some_and(|extension| extension == "pack");
        if !is_pack {
            continue;
        }
        if !path.with_extension("idx").exists() {
            remove_incomplete(mirror, &path)?;
        } else if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() < SMALL_PACK_BYTES) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Removes a pack without an index: a maintenance was killed before it named the index, or after it removed it. A copy
/// of a base also names the pack before its index, so this waits for the end of a copy.
fn remove_incomplete(mirror: &Path, pack: &Path) -> Result<(), GitError> {
    let lock = lock_file(mirror, "cfq-fetch.lock")?;
    if lock.try_lock().is_ok() && !pack.with_extension("idx").exists() {
        remove(pack)?;
    }
    Ok(())
}

/// Removes the branches of tasks that have not moved for `age`, and returns their number.
fn remove_old_branches(mirror: &Path, age: Duration) -> Result<usize, GitError> {
    let heads = mirror.join("refs/heads");
    let Ok(workers) = std::fs::read_dir(&heads) else { return Ok(0) };
    let mut removed = 0;
    for worker in workers.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("worker-")) {
        let Ok(branches) = std::fs::read_dir(worker.path()) else { continue };
        for branch in branches.flatten().map(|entry| entry.path()) {
            if branch.extension().is_none() && is_older_than(&branch, age) {
                remove(&branch)?;
                removed += 1;
            }
        }
    }
    Ok(removed)
}

fn is_older_than(path: &Path, age: Duration) -> bool {
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    let modified = modified.ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    let now = u64::try_from(cfq_link::clock::unix_seconds()).unwrap_or(0);
    modified.is_some_and(|modified| modified.as_secs().saturating_add(age.as_secs()) <= now)
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<(), GitError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(GitError::Io { operation: format!("remove {}", path.display()), source: error })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
