//! The list of a commit's files.

use std::path::Path;

use git2::{FileMode, ObjectType, Oid, Repository};

use super::error::{GitError, SizeLimit, parse_oid};
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};

/// Maximum length of a path that is listed, in bytes.
const MAX_PATH_BYTES: usize = 1024;

/// A file of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeFile {
    pub path: String,
    /// Id of its content.
    pub id: Oid,
    /// False for a symbolic link.
    pub is_plain: bool,
}

/// Lists the files of a commit, sorted by path. Submodules, and paths that are not UTF-8 or very long, are left out.
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
            // A name that git itself would refuse could be a path, deeper than the folders that were counted.
            let Some(name) = entry.name().ok().filter(|name| !matches!(*name, "" | "." | "..") && !name.contains('/'))
            else {
                continue;
            };
            let path = format!("{folder}{name}");
            if path.len() > MAX_PATH_BYTES {
                continue;
            }
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

/// Reads a file's text; `None` if it is no text of at most `max_bytes`.
///
/// # Errors
/// git's error if the file cannot be read, as in a partial clone.
pub(super) fn read_text(repository: &Repository, id: Oid, max_bytes: usize) -> Result<Option<String>, git2::Error> {
    let (bytes, kind) = repository.odb()?.read_header(id)?;
    if bytes > max_bytes || kind != ObjectType::Blob {
        return Ok(None);
    }
    let blob = repository.find_blob(id)?;
    Ok(cfq_edits::decode(blob.content()).ok().map(|(text, _)| text.into_owned()))
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
        assert_eq!(read_text(&repository, files[1].id, 6).unwrap().as_deref(), Some("x = 2\n"));
        assert_eq!(read_text(&repository, files[1].id, 5).unwrap(), None);
        assert!(read_text(&repository, Oid::ZERO_SHA1, 5).is_err());
        let few = list(&user.base, &SizeLimits { entries: 3, ..SizeLimits::default() });
        assert!(matches!(few, Err(GitError::TooLarge { limit: SizeLimit::Entries(3), .. })), "{few:?}");
        let deep = commit_tree(&repository, nested_tree(&repository, 30)).to_string();
        let deep = list(&deep, &SizeLimits { depth: 20, ..SizeLimits::default() });
        assert!(matches!(deep, Err(GitError::TooLarge { limit: SizeLimit::Depth(20), .. })), "{deep:?}");
    }
}
