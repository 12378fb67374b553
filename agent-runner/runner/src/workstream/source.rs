//! Opens the user's repository, or reports why it cannot be used.

use std::path::{Path, PathBuf};

use git2::{ErrorCode, Oid, Repository, RepositoryOpenFlags};

use self::git_files::FileCheck;
use self::git_folders::GitFolders;
use self::includes::included_files;
use self::owners::Owners;
use super::durable::enable_fsync;
use super::error::GitError;
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};

mod git_files;
mod git_folders;
mod includes;
mod owners;

/// Opens exactly `path` (a working tree's top folder, its `.git`, or a bare repository), not a repository in a
/// parent folder.
///
/// # Errors
/// A [`GitError`] for a path that does not exist or cannot be read, is not a repository, belongs to another user, or
/// contains files that cfq does not use.
pub fn open_source_repository(path: &Path) -> Result<Repository, GitError> {
    open_source_within(path, &SizeLimits::default(), &StopCondition::default())
}

/// Like [`open_source_repository`], with limits on the size of the repository and on the time.
///
/// # Errors
/// As [`open_source_repository`], and the errors of the limits.
pub(super) fn open_source_within(
    path: &Path,
    limits: &SizeLimits,
    stop: &StopCondition,
) -> Result<Repository, GitError> {
    enable_fsync();
    let owned = || path.to_path_buf();
    match std::fs::metadata(path) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(GitError::PathNotFound { path: owned() });
        }
        Err(source) => return Err(GitError::Unreadable { path: owned(), source }),
    }
    // libgit2 reports "not found" also for a folder that it may not read.
    if let Err(source) = std::fs::read_dir(path) {
        return Err(GitError::Unreadable { path: owned(), source });
    }
    let git_dir = checked_git_dir(path, limits, stop)?;
    let no_ceiling: [&Path; 0] = [];
    // Exactly the checked folder: without these flags, libgit2 may choose another one.
    let flags = RepositoryOpenFlags::NO_SEARCH | RepositoryOpenFlags::NO_DOTGIT;
    match Repository::open_ext(git_dir, flags, no_ceiling) {
        Ok(repository) => Ok(repository),
        Err(error) => Err(match error.code() {
            ErrorCode::NotFound => GitError::NotARepository { path: owned() },
            ErrorCode::Owner => GitError::WrongOwner { path: owned() },
            _ => GitError::Git { operation: format!("open {}", path.display()), source: error },
        }),
    }
}

/// Opens the repository that contains `dir`: that of the nearest folder, up from `dir`, that is one.
///
/// # Errors
/// [`GitError::NotARepository`] if there is none, and the errors of [`open_source_repository`].
pub fn find_source_repository(dir: &Path) -> Result<Repository, GitError> {
    for folder in dir.ancestors() {
        match open_source_repository(folder) {
            Err(GitError::NotARepository { .. } | GitError::Unreadable { .. }) => {}
            found => return found,
        }
    }
    Err(GitError::NotARepository { path: dir.to_path_buf() })
}

/// True if the search continues in the parent folder: `folder` is no repository, or cannot be read itself. An unreadable
/// `.git` folder ends the search, because it belongs to the repository that is searched.
fn is_no_repository(error: &GitError, folder: &Path) -> bool {
    match error {
        GitError::NotARepository { .. } => true,
        GitError::Unreadable { path, .. } => path == folder,
        _ => false,
    }
}

/// Paths that libgit2 opens in a repository; canonical, except of files that a configuration names.
pub(super) struct SourcePaths {
    pub top: PathBuf,
    /// The folder of refs and objects.
    pub common_dir: PathBuf,
    /// Files and folders that are read.
    pub read: Vec<PathBuf>,
    /// True if git recognizes the folders as a repository.
    is_complete: bool,
}

/// Finds the paths of the repository at `path`. Files below them are not checked.
///
/// # Errors
/// [`GitError::PathNotFound`], [`GitError::NotARepository`], and other errors of finding the folders.
pub(super) fn source_paths(path: &Path) -> Result<SourcePaths, GitError> {
    let top = path.canonicalize().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => GitError::PathNotFound { path: path.to_owned() },
        _ => GitError::Unreadable { path: path.to_owned(), source },
    })?;
    if let Err(source) = std::fs::read_dir(path) {
        return Err(GitError::Unreadable { path: path.to_owned(), source });
    }
    let folders = GitFolders::find(&top)?;
    let is_complete = folders.are_complete();
    let mut read = folders.included_files()?;
    for objects in folders.object_folders()? {
        read.extend(linked_paths(&objects));
        read.push(objects);
    }
    // The pointer of a linked worktree or submodule; a `.git` folder is the git folder itself.
    read.push(top.join(".git"));
    read.extend([folders.git_dir, folders.common_dir.clone()]);
    Ok(SourcePaths { top, common_dir: folders.common_dir, read, is_complete })
}

/// Finds the paths of the repository that contains `dir`, as [`find_source_repository`] does, which may be restricted to
/// these paths and therefore continues where a folder cannot be read.
///
/// # Errors
/// As [`source_paths`].
pub(super) fn find_source_paths(dir: &Path) -> Result<SourcePaths, GitError> {
    for folder in dir.ancestors() {
        match source_paths(folder) {
            Err(error) if is_no_repository(&error, folder) => {}
            Ok(SourcePaths { is_complete: false, .. }) => {}
            found => return found,
        }
    }
    Err(GitError::NotARepository { path: dir.to_path_buf() })
}

/// Targets of the links in a folder of objects and in its folders of packs; other programs share packs in this way.
fn linked_paths(objects: &Path) -> Vec<PathBuf> {
    let entries = [objects.to_owned(), objects.join("pack"), objects.join("info")].map(std::fs::read_dir);
    let entries = entries.into_iter().flatten().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_symlink()).collect()
}

/// Files of git's configuration outside of repositories, with the files that they include.
pub(super) fn git_settings_files() -> Vec<PathBuf> {
    let home = std::env::home_dir();
    let user_settings = std::env::var_os("XDG_CONFIG_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let user_settings = user_settings.or_else(|| home.as_ref().map(|home| home.join(".config")));
    let files = [
        Some(PathBuf::from("/etc/gitconfig")),
        user_settings.map(|folder| folder.join("git/config")),
        home.map(|home| home.join(".gitconfig")),
    ];
    // A file that libgit2 cannot read is reported when a repository is opened.
    let with_included = |file: PathBuf| included_files(&file).unwrap_or_default().into_iter().chain([file]);
    files.into_iter().flatten().flat_map(with_included).collect()
}

/// The files with the user's own patterns of ignored files and attributes; gitignore(5), gitattributes(5).
pub(super) fn user_ignore_files() -> Vec<PathBuf> {
    let config = git2::Config::open_default();
    let named = |name: &str| config.as_ref().ok().and_then(|config| config.get_path(name).ok());
    let folder = std::env::var_os("XDG_CONFIG_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let folder = folder.or_else(|| std::env::home_dir().map(|home| home.join(".config")));
    let defaults = ["ignore", "attributes"].map(|name| Some(folder.as_ref()?.join("git").join(name)));
    let named = ["core.excludesfile", "core.attributesfile"].map(named);
    defaults.into_iter().chain(named).flatten().collect()
}

/// Returns the git folder of a repository, after a check of all files that libgit2 will open.
fn checked_git_dir(path: &Path, limits: &SizeLimits, stop: &StopCondition) -> Result<PathBuf, GitError> {
    let unreadable = |source| GitError::Unreadable { path: path.to_path_buf(), source };
    let top = path.canonicalize().map_err(unreadable)?;
    let folders = GitFolders::find(&top)?;
    let owners = Owners::of(&top.metadata().map_err(unreadable)?);
    let inside = vec![folders.git_dir.clone(), folders.common_dir.clone()];
    let mut check = FileCheck { owners: &owners, limits, stop, inside: inside.clone(), seen: 0 };
    for (n, folder) in inside.iter().enumerate() {
        owners.check(folder)?;
        if n == 0 || inside[0] != *folder {
            check.check_git_folder(folder)?;
        }
    }
    if !folders.are_complete() {
        return Err(GitError::NotARepository { path: path.to_path_buf() });
    }
    for file in folders.included_files()? {
        check.check_included(&file)?;
    }
    for objects in folders.object_folders()? {
        check.check_objects(&objects)?;
    }
    Ok(folders.git_dir)
}

/// Returns the commit id of HEAD, which may be a branch or detached.
///
/// # Errors
/// [`GitError::NoCommits`] if the repository has no commit, and the errors of [`open_source_repository`].
pub fn head_commit(path: &Path) -> Result<String, GitError> {
    head_of(&open_source_repository(path)?, path)
}

/// As [`head_commit`], of an open repository; `path` is the one that errors name.
pub(super) fn head_of(repository: &Repository, path: &Path) -> Result<String, GitError> {
    match repository.head() {
        Ok(head) => {
            let limits = SizeLimits::default();
            let id = head.target().unwrap_or(Oid::ZERO_SHA1);
            Ok(ObjectReader::new(repository, &limits)?.commit(id)?.id().to_string())
        }
        Err(error) => match error.code() {
            ErrorCode::UnbornBranch | ErrorCode::NotFound => Err(GitError::NoCommits { path: path.to_path_buf() }),
            _ => Err(GitError::Git { operation: format!("read HEAD of {}", path.display()), source: error }),
        },
    }
}

#[cfg(test)]
mod tests;
