//! Copies a commit with its history from the user's repository into the mirror.
//!
//! The walk over the history is cfq's own: libgit2's walk recurses into nested folders on the stack, reads objects of any
//! size, and cannot be stopped.

use std::collections::{HashSet, VecDeque};
use std::io::Write;

use git2::{Indexer, ObjectType, Odb, OdbLookupFlags, Oid, PackBuilder, Repository};

use super::error::{GitError, SizeLimit, git_context, io_context};
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};

/// Size from which a file is copied by itself, in bytes: in a pack it would be compared with other files, which takes
/// several times its size in memory.
const MAX_PACKED_FILE_BYTES: u64 = 16 << 20;
/// Number of objects after which the walk checks whether it must stop.
const OBJECTS_PER_CHECK: usize = 1024;

/// Copy of a commit from one repository to another.
pub(super) struct ObjectCopy<'a> {
    pub source: &'a Repository,
    pub mirror: &'a Repository,
    pub limits: &'a SizeLimits,
    pub stop: &'a StopCondition,
}

/// Objects to copy, found so far.
struct Found<'r> {
    pack: PackBuilder<'r>,
    visited: HashSet<Oid>,
    large_files: Vec<Oid>,
}

impl ObjectCopy<'_> {
    /// Copies all objects that `commit` reaches and that the mirror lacks. libgit2's local transport is not used, because
    /// it fetches only commits that a ref of the source still reaches.
    pub fn run(&self, commit: Oid) -> Result<(), GitError> {
        let operation = || self.operation(commit);
        let objects = ObjectReader::new(self.source, self.limits)?;
        let source_odb = git_context(operation(), self.source.odb())?;
        let mirror_odb = git_context(operation(), self.mirror.odb())?;
        let pack = git_context(operation(), self.source.packbuilder())?;
        let mut found = Found { pack, visited: HashSet::new(), large_files: Vec::new() };
        let mut open = VecDeque::from([commit]);
        while let Some(id) = open.pop_front() {
            // The mirror never has a commit without its history: packs are complete, and cfq's own commits have parents
            // in the mirror.
            if found.visited.contains(&id) || mirror_odb.exists_ext(id, OdbLookupFlags::NO_REFRESH) {
                continue;
            }
            let commit = objects.commit(id)?;
            self.add(&mut found, id, None)?;
            self.add_tree(&mut found, &objects, &mirror_odb, commit.tree_id())?;
            open.extend(commit.parent_ids());
        }
        for id in found.large_files {
            self.stop.check(&operation())?;
            let file = git_context(operation(), source_odb.read(id))?;
            git_context(operation(), mirror_odb.write(ObjectType::Blob, file.data()))?;
        }
        if found.pack.object_count() == 0 {
            return Ok(());
        }
        self.write_pack(found.pack, &mirror_odb, &operation())
    }

    fn operation(&self, commit: Oid) -> String {
        format!("copy {commit} from {}", self.source.path().display())
    }

    /// Adds one object to the pack, unless it was added before.
    fn add(&self, found: &mut Found<'_>, id: Oid, name: Option<&str>) -> Result<(), GitError> {
        if !found.visited.insert(id) {
            return Ok(());
        }
        if found.visited.len() > self.limits.objects {
            let limit = SizeLimit::Objects(self.limits.objects);
            return Err(GitError::TooLarge { path: self.source.path().to_owned(), limit });
        }
        if found.visited.len().is_multiple_of(OBJECTS_PER_CHECK) {
            self.stop.check("list the repository's history")?;
        }
        git_context(format!("add {id} to a pack"), found.pack.insert_object(id, name))
    }

    /// Adds a tree and everything below it that the mirror lacks.
    fn add_tree(
        &self,
        found: &mut Found<'_>,
        objects: &ObjectReader<'_>,
        mirror_odb: &Odb<'_>,
        root: Oid,
    ) -> Result<(), GitError> {
        let mut open = vec![(root, String::new(), 0)];
        while let Some((id, name, depth)) = open.pop() {
            // The same is true of trees: cfq's own ones are written after their files.
            if found.visited.contains(&id) || mirror_odb.exists_ext(id, OdbLookupFlags::NO_REFRESH) {
                continue;
            }
            if depth > self.limits.depth {
                let limit = SizeLimit::Depth(self.limits.depth);
                return Err(GitError::TooLarge { path: self.source.path().to_owned(), limit });
            }
            self.add(found, id, Some(&name))?;
            for entry in &objects.tree(id)? {
                // The name only influences which files are compared with each other.
                let name = String::from_utf8_lossy(entry.name_bytes());
                match entry.kind() {
                    Some(ObjectType::Tree) => open.push((entry.id(), name.into_owned(), depth + 1)),
                    Some(ObjectType::Blob) if found.visited.contains(&entry.id()) => {}
                    Some(ObjectType::Blob) => {
                        let bytes = objects.file_bytes(entry.id())?;
                        if bytes > MAX_PACKED_FILE_BYTES {
                            found.visited.insert(entry.id());
                            found.large_files.push(entry.id());
                        } else {
                            self.add(found, entry.id(), Some(&name))?;
                        }
                    }
                    // A submodule's commit is not in this repository.
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn write_pack(&self, mut pack: PackBuilder<'_>, mirror_odb: &Odb<'_>, operation: &str) -> Result<(), GitError> {
        let stop = self.stop.clone();
        let proceed = move || stop.check("").is_ok();
        let while_comparing = proceed.clone();
        git_context(operation, pack.set_progress_callback(move |_, _, _| while_comparing()))?;
        let folder = self.mirror.path().join("objects/pack");
        let mut writer = git_context(operation, Indexer::new(Some(mirror_odb), &folder, 0, false))?;
        let mut written = Ok(());
        let packed = pack.foreach(|chunk| {
            written = writer.write_all(chunk);
            written.is_ok() && proceed()
        });
        self.stop.check(operation)?;
        io_context(operation, written)?;
        git_context(operation, packed)?;
        git_context(operation, writer.commit()).map(drop)
    }
}
