//! The list of a commit's files.

use std::path::Path;

use git2::{FileMode, ObjectType, Oid, Repository};

use super::error::{GitError, SizeLimit, parse_oid};
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};

/// A file of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeFile {
    pub path: String,
    /// Id of its content.
    pub id: Oid,
    /// False for a symbolic link.
    pub is_plain: bool,
}

/// Lists the files of a commit, sorted by path. Paths that are not UTF-8, and submodules, are left out.
///
/// # Errors
/// [`GitError::TooLarge`] if there are more entries or levels of folders than `limits` allow, the errors of `stop`, and
/// [`GitError::Git`] if an object is missing.
pub(super) fn tree_files(
    repository: &Repository,
    commit: &str,
    limits: &SizeLimits,
    stop: &StopCondition,
) -> Result<Vec<TreeFile>, GitError> {
    let too_large = |limit| GitError::TooLarge { path: repository.path().to_owned(), limit };
    let objects = ObjectReader::new(repository, limits)?;
    let root = objects.commit(parse_oid(commit)?)?.tree_id();
    let mut files = Vec::new();
    let mut entries = 0_u64;
    let mut open = vec![(String::new(), root, 0_usize)];
    while let Some((folder, id, depth)) = open.pop() {
        stop.check("list the files of the repository")?;
        if depth > limits.depth {
            return Err(too_large(SizeLimit::Depth(limits.depth)));
        }
        let tree = objects.tree(id)?;
        entries += tree.len() as u64;
        if entries > limits.entries {
            return Err(too_large(SizeLimit::Entries(limits.entries)));
        }
        for entry in &tree {
            let Ok(name) = entry.name() else { continue };
            let path = format!("{folder}{name}");
            match entry.kind() {
                Some(ObjectType::Tree) => open.push((format!("{path}/"), entry.id(), depth + 1)),
                Some(ObjectType::Blob) => {
                    let is_plain = entry.filemode() != i32::from(FileMode::Link);
                    files.push(TreeFile { path, id: entry.id(), is_plain });
                }
                _ => {}
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Reads a file's text, if it is one of at most `max_bytes`.
pub(super) fn read_text(repository: &Repository, id: Oid, max_bytes: usize) -> Option<String> {
    let (bytes, kind) = repository.odb().ok()?.read_header(id).ok()?;
    if bytes > max_bytes || kind != ObjectType::Blob {
        return None;
    }
    let blob = repository.find_blob(id).ok()?;
    Some(cfq_edits::decode(blob.content()).ok()?.0.into_owned())
}

/// Path of the folder that all worktrees of a repository share.
pub(super) fn shared_folder(repository: &Repository) -> &Path {
    repository.commondir()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, commit_tree, nested_tree};

    #[test]
    fn files_are_sorted_and_limited() {
        let user = UserRepo::new(&[("b.py", "x = 1\n"), ("a/c.py", "x = 2\n"), ("a.py", "x = 3\n")]);
        let repository = user.repo();
        let list =
            |commit: &str, limits: &SizeLimits| tree_files(&repository, commit, limits, &StopCondition::default());
        let files = list(&user.base, &SizeLimits::default()).unwrap();
        let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["a.py", "a/c.py", "b.py"]);
        assert_eq!(read_text(&repository, files[1].id, 6).as_deref(), Some("x = 2\n"));
        assert_eq!(read_text(&repository, files[1].id, 5), None);
        let few = list(&user.base, &SizeLimits { entries: 3, ..SizeLimits::default() });
        assert!(matches!(few, Err(GitError::TooLarge { limit: SizeLimit::Entries(3), .. })), "{few:?}");
        let deep = commit_tree(&repository, nested_tree(&repository, 30)).to_string();
        let deep = list(&deep, &SizeLimits { depth: 20, ..SizeLimits::default() });
        assert!(matches!(deep, Err(GitError::TooLarge { limit: SizeLimit::Depth(20), .. })), "{deep:?}");
    }
}
