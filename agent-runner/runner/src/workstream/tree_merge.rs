//! Three-way merge of trees that reads and writes only the folders that one side changed.

use git2::{FileMode, MergeFileInput, Oid, Repository, Tree, TreeEntry, merge_file};

use super::error::{GitError, git_context};
use super::tree_diff::changed_paths;

/// Number of bytes in which a zero byte marks a file as binary, as in git.
const BINARY_PROBE_BYTES: usize = 8000;
/// Maximum size of a file whose lines are merged here, in bytes.
const MAX_MERGED_FILE_BYTES: usize = 16 << 20;

/// Result of merging two trees.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TreeMerge {
    Merged {
        tree: Oid,
    },
    /// Both sides changed the same lines of these paths, which are sorted.
    Conflict {
        paths: Vec<String>,
    },
}

/// An entry of a tree: id and mode; `None` if the tree has no such entry.
type Entry = Option<(Oid, i32)>;

struct Merge<'r> {
    repository: &'r Repository,
    conflicts: Vec<String>,
    needs_renames: bool,
}

/// Merges the changes from `ancestor` to `theirs` into the tree of `ours`. All three are commits. `None` if both sides
/// changed a path in a way that only a merge of all files can resolve, which follows renames.
pub(super) fn merge_trees(
    repository: &Repository,
    ancestor: Oid,
    ours: Oid,
    theirs: Oid,
) -> Result<Option<TreeMerge>, GitError> {
    let tree = |commit: Oid| {
        let commit = git_context(format!("read commit {commit}"), repository.find_commit(commit))?;
        Ok(commit.tree_id())
    };
    let (ancestor, ours, theirs) = (tree(ancestor)?, tree(ours)?, tree(theirs)?);
    let mut merge = Merge { repository, conflicts: Vec::new(), needs_renames: false };
    let merged = merge.folder("", Some(ancestor), ours, theirs)?;
    merge.conflicts.sort();
    if merge.needs_renames {
        return Ok(None);
    }
    if !merge.conflicts.is_empty() {
        return Ok(Some(TreeMerge::Conflict { paths: merge.conflicts }));
    }
    let tree = match merged {
        Some(tree) => tree,
        None => {
            let empty = repository.treebuilder(None).and_then(|builder| builder.write());
            git_context("write an empty tree", empty)?
        }
    };
    Ok(Some(TreeMerge::Merged { tree }))
}

impl Merge<'_> {
    /// Merges one folder; `path` is empty, or ends with a slash. Returns its tree, or `None` if it is empty.
    fn folder(&mut self, path: &str, ancestor: Option<Oid>, ours: Oid, theirs: Oid) -> Result<Option<Oid>, GitError> {
        let repository = self.repository;
        let read = |id: Oid| git_context(format!("read the tree {id}"), repository.find_tree(id));
        let (before, ours_tree, theirs_tree) = (ancestor.map(read).transpose()?, read(ours)?, read(theirs)?);
        let mut changed: Vec<Vec<u8>> = Vec::new();
        for entry in &theirs_tree {
            if before.as_ref().and_then(|tree| find(tree, entry.name_bytes())) != of(&entry) {
                changed.push(entry.name_bytes().to_vec());
            }
        }
        for entry in before.iter().flat_map(Tree::iter) {
            if theirs_tree.get_name_bytes(entry.name_bytes()).is_none() {
                changed.push(entry.name_bytes().to_vec());
            }
        }
        let operation = || format!("merge the folder {path:?}");
        let mut builder = None;
        for name in changed {
            let old = before.as_ref().and_then(|tree| find(tree, &name));
            let (our, their) = (find(&ours_tree, &name), find(&theirs_tree, &name));
            let merged = self.entry(&format!("{path}{}", String::from_utf8_lossy(&name)), old, our, their)?;
            if merged == our {
                continue;
            }
            let builder = match &mut builder {
                Some(builder) => builder,
                None => builder.insert(git_context(operation(), repository.treebuilder(Some(&ours_tree)))?),
            };
            let changed = match merged {
                Some((id, mode)) => builder.insert(&name, id, mode).map(drop),
                None => builder.remove(&name),
            };
            git_context(operation(), changed)?;
        }
        match builder {
            None => Ok(Some(ours)),
            Some(builder) if builder.is_empty() => Ok(None),
            Some(builder) => git_context(operation(), builder.write()).map(Some),
        }
    }

    /// Merges one entry. Without a resolution, the path is noted and our side is returned.
    fn entry(&mut self, path: &str, old: Entry, our: Entry, their: Entry) -> Result<Entry, GitError> {
        if our == old {
            return Ok(their);
        }
        if our == their || their == old {
            if our == their && self.removes_a_file(old, our)? {
                // One of the sides may have renamed it.
                self.needs_renames = true;
            }
            return Ok(our);
        }
        if let (Some((ours, mode)), Some((theirs, _))) = (our.filter(is_folder), their.filter(is_folder)) {
            let before = old.filter(is_folder).map(|(id, _)| id);
            let merged = self.folder(&format!("{path}/"), before, ours, theirs)?;
            return Ok(merged.map(|id| (id, mode)));
        }
        let (Some(old), Some((ours, mode)), Some(their)) = (old, our, their) else {
            self.needs_renames = true;
            return Ok(our);
        };
        if !is_file(old.1) || !is_file(mode) || their.1 != mode || old.1 != mode {
            self.needs_renames = true;
            return Ok(our);
        }
        self.file(path, [old.0, ours, their.0]).map(|merged| merged.map_or(our, |id| Some((id, mode))))
    }

    /// Whether a file exists in the old entry, or below it, and not in the new one.
    fn removes_a_file(&self, old: Entry, new: Entry) -> Result<bool, GitError> {
        let folder = |entry: Entry| entry.filter(is_folder).map(|(id, _)| self.repository.find_tree(id)).transpose();
        let read = |entry: Entry| git_context("read a tree", folder(entry));
        match (read(old)?, read(new)?) {
            (Some(old), Some(new)) => {
                Ok(changed_paths(self.repository, &old, &new)?.iter().any(|changed| changed.new.is_none()))
            }
            _ => Ok(old.is_some() && new.is_none()),
        }
    }

    /// Merges the lines of a file that both sides changed: ancestor, ours, theirs.
    fn file(&mut self, path: &str, ids: [Oid; 3]) -> Result<Option<Oid>, GitError> {
        let operation = || format!("merge {path}");
        let mut blobs = Vec::with_capacity(ids.len());
        for id in ids {
            let blob = git_context(operation(), self.repository.find_blob(id))?;
            let content = blob.content();
            if content.len() > MAX_MERGED_FILE_BYTES || content.iter().take(BINARY_PROBE_BYTES).any(|byte| *byte == 0) {
                self.needs_renames = true;
                return Ok(None);
            }
            blobs.push(blob);
        }
        let inputs = blobs.iter().map(|blob| {
            let mut input = MergeFileInput::new();
            input.content(blob.content());
            input
        });
        let [old, ours, theirs] = &inputs.collect::<Vec<_>>()[..] else { return Ok(None) };
        let merged = git_context(operation(), merge_file(old, ours, theirs, None))?;
        if !merged.is_automergeable() {
            self.conflicts.push(path.to_owned());
            return Ok(None);
        }
        git_context(operation(), self.repository.blob(merged.content())).map(Some)
    }
}

fn of(entry: &TreeEntry<'_>) -> Entry {
    Some((entry.id(), entry.filemode_raw()))
}

fn find(tree: &Tree<'_>, name: &[u8]) -> Entry {
    tree.get_name_bytes(name).and_then(|entry| of(&entry))
}

fn is_folder(entry: &(Oid, i32)) -> bool {
    entry.1 == i32::from(FileMode::Tree)
}

fn is_file(mode: i32) -> bool {
    mode == i32::from(FileMode::Blob) || mode == i32::from(FileMode::BlobExecutable)
}
