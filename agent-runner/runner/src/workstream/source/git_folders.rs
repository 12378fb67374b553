//! Finds the folders of a user's repository: the git folder of a working tree, the common folder of a linked worktree,
//! and the folders of objects. Files in a repository from an untrusted archive may point to other repositories of the
//! user; a pointer is followed only if git itself would have written it.

use std::path::{Path, PathBuf};

use super::git_files::{read_pointer, read_settings, unsafe_path};
use super::includes::{included_files, unquote};
use crate::workstream::error::{GitError, UnsafeGitPathReason};

/// Maximum number of alternates of one repository. Git nests them at most five levels deep.
const MAX_ALTERNATES: usize = 64;

/// Folders of a repository, canonical.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GitFolders {
    /// The git folder itself.
    pub(super) git_dir: PathBuf,
    /// The folder of refs, configuration and objects; the git folder, unless that belongs to a linked worktree.
    pub(super) common_dir: PathBuf,
}

impl GitFolders {
    /// Finds the git folder of `top`: a working tree, a git folder or a bare repository. `top` is canonical.
    ///
    /// # Errors
    /// [`GitError::NotARepository`], [`GitError::Unreadable`], [`GitError::ForeignGitFolder`] if a pointer leads to the
    /// git folder of another working tree, and the errors of reading the pointers.
    pub(super) fn find(top: &Path) -> Result<Self, GitError> {
        let git_dir = find_git_dir(top)?;
        std::fs::symlink_metadata(git_dir.join("HEAD")).map_err(|error| no_repository(top, &git_dir, error))?;
        let common_dir = common_dir(&git_dir)?;
        Ok(Self { git_dir, common_dir })
    }

    /// True if git recognizes these folders as a repository.
    pub(super) fn are_complete(&self) -> bool {
        let has_head = std::fs::metadata(self.git_dir.join("HEAD")).is_ok_and(|metadata| metadata.is_file());
        has_head && ["objects", "refs"].iter().all(|name| self.common_dir.join(name).is_dir())
    }

    /// Files that the configuration includes, as [`included_files`].
    ///
    /// # Errors
    /// As [`included_files`].
    pub(super) fn included_files(&self) -> Result<Vec<PathBuf>, GitError> {
        let mut files = Vec::new();
        for config in [self.common_dir.join("config"), self.git_dir.join("config.worktree")] {
            files.extend(included_files(&config)?);
        }
        Ok(files)
    }

    /// All existing folders of objects: the repository's own, then the alternates, which share objects with it.
    ///
    /// # Errors
    /// [`GitError::UnsafeGitPath`] if there are too many or a path contains bytes that are no text, and the errors of
    /// reading the lists of alternates.
    pub(super) fn object_folders(&self) -> Result<Vec<PathBuf>, GitError> {
        let mut folders = vec![self.common_dir.join("objects")];
        let mut next = 0;
        while let Some(folder) = folders.get(next).cloned() {
            next += 1;
            let path = folder.join("info/alternates");
            let list = read_settings(&path)?.unwrap_or_default();
            // libgit2 reads such a path differently.
            if list.contains(['\0', char::REPLACEMENT_CHARACTER]) {
                return Err(unsafe_path(&path, UnsafeGitPathReason::InvalidAlternate));
            }
            for line in list.split(['\r', '\n']).filter(|line| !line.is_empty() && !line.starts_with('#')) {
                // libgit2 resolves only paths that begin with a dot against the folder of objects.
                let alternate = if line.starts_with('.') { folder.join(line) } else { PathBuf::from(line) };
                let Ok(alternate) = alternate.canonicalize() else { continue };
                // Other folders would become readable for the process that opens the repository.
                if alternate.file_name() != Some("objects".as_ref()) {
                    return Err(unsafe_path(&path, UnsafeGitPathReason::InvalidAlternate));
                }
                if !folders.contains(&alternate) {
                    folders.push(alternate);
                }
                if folders.len() > MAX_ALTERNATES + 1 {
                    return Err(unsafe_path(&path, UnsafeGitPathReason::TooManyAlternates(MAX_ALTERNATES)));
                }
            }
        }
        Ok(folders)
    }
}

fn find_git_dir(top: &Path) -> Result<PathBuf, GitError> {
    let entry = top.join(".git");
    let Ok(metadata) = std::fs::symlink_metadata(&entry) else { return Ok(top.to_owned()) };
    if metadata.is_dir() {
        return Ok(entry);
    }
    let target = match metadata.is_symlink() {
        true => entry.clone(),
        false => {
            let text = read_pointer(&entry)?.unwrap_or_default();
            let not_a_repository = || GitError::NotARepository { path: top.to_owned() };
            top.join(text.trim_end().strip_prefix("gitdir:").ok_or_else(not_a_repository)?.trim_start())
        }
    };
    let git_dir = target.canonicalize().map_err(|error| no_repository(top, &target, error))?;
    if !git_dir.is_dir() {
        return Err(GitError::NotARepository { path: top.to_owned() });
    }
    // Without the right to read the folder, its settings would seem to be missing.
    std::fs::symlink_metadata(git_dir.join("HEAD")).map_err(|error| no_repository(top, &git_dir, error))?;
    match points_back(&git_dir, top)? {
        true => Ok(git_dir),
        false => Err(GitError::ForeignGitFolder { path: entry, target: git_dir }),
    }
}

/// The error if `git_dir`, the git folder of `top`, cannot be looked at.
fn no_repository(top: &Path, git_dir: &Path, source: std::io::Error) -> GitError {
    match source.kind() {
        std::io::ErrorKind::PermissionDenied => GitError::Unreadable { path: git_dir.to_owned(), source },
        _ => GitError::NotARepository { path: top.to_owned() },
    }
}

/// True if the git folder names `top` as its working tree: that of a linked worktree in the file `gitdir`, that of a
/// submodule in its configuration.
fn points_back(git_dir: &Path, top: &Path) -> Result<bool, GitError> {
    let is_top = |path: &str| git_dir.join(path).canonicalize().is_ok_and(|path| path == top);
    if let Some(pointer) = read_pointer(&git_dir.join("gitdir"))? {
        let file = Path::new(pointer.trim_end());
        return Ok(file.ends_with(".git") && file.parent().and_then(Path::to_str).is_some_and(is_top));
    }
    for name in ["config.worktree", "config"] {
        let config = read_settings(&git_dir.join(name))?.unwrap_or_default();
        if let Some(worktree) = core_worktree(&config) {
            return Ok(is_top(&worktree));
        }
    }
    Ok(false)
}

/// The folder named by the file `commondir` of a linked worktree's git folder; else the git folder.
fn common_dir(git_dir: &Path) -> Result<PathBuf, GitError> {
    let path = git_dir.join("commondir");
    let Some(pointer) = read_pointer(&path)? else { return Ok(git_dir.to_owned()) };
    let target = git_dir.join(pointer.trim_end());
    let target = target.canonicalize().map_err(|error| no_repository(git_dir, &target, error))?;
    match git_dir.parent() == Some(target.join("worktrees").as_path()) {
        true => Ok(target),
        false => Err(GitError::ForeignGitFolder { path, target }),
    }
}

/// Value of `core.worktree` in the text of a git configuration, as git writes it.
fn core_worktree(config: &str) -> Option<String> {
    let mut in_core = false;
    let mut found = None;
    for line in config.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            in_core = section.trim_end().eq_ignore_ascii_case("core]");
        } else if let Some((key, value)) = line.split_once('=').filter(|_| in_core)
            && key.trim().eq_ignore_ascii_case("worktree")
        {
            found = Some(unquote(value.trim()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_worktree_is_read_as_git_writes_it() {
        let config = "[core]\n\tbare = false\n\tworktree = ../../../sub\n[remote \"worktree\"]\n\tworktree = x\n";
        assert_eq!(core_worktree(config).unwrap(), "../../../sub");
        assert_eq!(core_worktree("[core]\n\tworktree = \"/a \\\"b\\\"; c\" # d\n").unwrap(), "/a \"b\"; c");
        assert_eq!(core_worktree("[remote \"x\"]\n\tworktree = x\n"), None);
    }
}
