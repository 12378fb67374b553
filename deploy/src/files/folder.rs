//! Folders with a given owner and mode.
//!
//! If cfq runs as root, some folders belong to the account of Postgres and NATS, which can put links into them. So owner
//! and mode are changed only through a handle of the opened file, never by path, and a link is followed only if it
//! belongs to the current user or to root.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, open, openat, statat};

use super::{FileError, error};

/// A folder that cannot be created or used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{path} is a link of another user (user id {uid}), which cfq does not follow; remove it, then start cfq again"
    )]
    ForeignLink { path: PathBuf, uid: u32 },
    #[error(
        "{path} belongs to another user (user id {uid}); run cfq as that user, give the folder to cfq's user with \
         `chown`, or choose other folders with CFQ_DATA, CFQ_CACHE and CFQ_CONFIG"
    )]
    ForeignFolder { path: PathBuf, uid: u32 },
    #[error(
        "{path} is a hard link: the same file has another name elsewhere, so cfq does not change its owner; replace it \
         by a copy, or remove it"
    )]
    HardLink { path: PathBuf },
}

/// Creates the folder, or sets mode and owner of an existing one. Missing parents are created; existing ones are not
/// changed.
///
/// If the folder belongs to an account that `owner` replaces, its content is given to `owner` as well.
pub fn create_folder(path: &Path, mode: u32, owner: Option<Account>) -> Result<(), FolderError> {
    if !path.is_dir() {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(error("create", parent))?;
        }
        match fs::DirBuilder::new().mode(mode).create(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(error("create", path))?,
        }
    }
    let folder = open_folder(path)?;
    let current = folder.metadata().map_err(error("read", path))?;
    let own = rustix::process::geteuid();
    match owner {
        Some(owner) => {
            if ![own.as_raw(), owner.uid].contains(&current.uid()) {
                if !path.parent().is_some_and(only_own_user_writes) {
                    return Err(FolderError::ForeignFolder { path: path.to_owned(), uid: current.uid() });
                }
                tracing::warn!(path = %path.display(), from = current.uid(), to = owner.uid, "changing the owner");
                give_content(&folder, path, current.uid(), owner)?;
            }
            if (current.uid(), current.gid()) != (owner.uid, owner.gid) {
                // The folder itself comes last, so that an interrupted change of its content is repeated.
                fchown(&folder, Some(owner.uid), Some(owner.gid)).map_err(error("change the owner of", path))?;
            }
        }
        // Root must not write secrets to a folder of another user. Any other user lacks the permission to do so.
        None if own.is_root() && current.uid() != own.as_raw() => {
            return Err(FolderError::ForeignFolder { path: path.to_owned(), uid: current.uid() });
        }
        None => {}
    }
    if current.mode() & 0o7777 != mode {
        folder.set_permissions(Permissions::from_mode(mode)).map_err(error("change the mode of", path))?;
    }
    Ok(())
}

/// True if the folder exists, belongs to the current user, and no other user can create entries in it.
pub fn only_own_user_writes(folder: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::metadata(folder).is_ok_and(|meta| meta.uid() == own && meta.mode() & 0o022 == 0)
}

/// Opens a folder. A link at the end of the path is followed only if it belongs to the current user or to root.
fn open_folder(path: &Path) -> Result<File, FolderError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = match open(path, flags, Mode::empty()) {
        Ok(folder) => return Ok(File::from(folder)),
        Err(errno) => fs::symlink_metadata(path)
            .ok()
            .filter(|meta| meta.is_symlink())
            .ok_or_else(|| error("open", path)(errno.into()))?,
    };
    let own = rustix::process::geteuid().as_raw();
    // Another user could have created a hard link to a link of root.
    if ![own, 0].contains(&link.uid()) || link.nlink() > 1 {
        return Err(FolderError::ForeignLink { path: path.to_owned(), uid: link.uid() });
    }
    let real = path.canonicalize().map_err(error("open", path))?;
    Ok(File::from(open(&real, flags, Mode::empty()).map_err(|errno| error("open", &real)(errno.into()))?))
}

/// Gives all folders and files below `folder` that belong to `from` to `to`. Follows no link, and refuses files with
/// several hard links. Links, sockets and entries of other users keep their owner.
fn give_content(folder: &File, path: &Path, from: u32, to: Account) -> Result<(), FolderError> {
    let failed = |path: &Path, errno: rustix::io::Errno| error("change the owner of", path)(errno.into());
    for entry in Dir::read_from(folder).map_err(|errno| failed(path, errno))? {
        let entry = entry.map_err(|errno| failed(path, errno))?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let path = path.join(name.to_string_lossy().as_ref());
        let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| failed(&path, errno))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::Directory | FileType::RegularFile) || stat.st_uid != from {
            continue;
        }
        // Without NONBLOCK, opening a FIFO that has replaced the file would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(folder, name, flags, Mode::empty()).map_err(|errno| failed(&path, errno))?);
        // The entry may have been replaced since, so only the opened file counts.
        let opened = file.metadata().map_err(error("read", &path))?;
        if opened.uid() != from {
            continue;
        }
        if opened.is_dir() {
            give_content(&file, &path, from, to)?;
        } else if opened.nlink() > 1 {
            return Err(FolderError::HardLink { path });
        }
        fchown(&file, Some(to.uid), Some(to.gid)).map_err(error("change the owner of", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    const OLD: Account = Account { uid: 4_000_001, gid: 4_000_001 };
    const NEW: Account = Account { uid: 4_000_002, gid: 4_000_002 };

    fn owner(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().uid()
    }

    /// True if this test runs as root; otherwise reports the test as skipped.
    fn is_root(test: &str) -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            cfq_test_skip::skip(test, "only root can change the owner of a file");
        }
        root
    }

    #[test]
    fn file_in_place_of_a_folder_is_reported_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let message = create_folder(&path, 0o700, None).unwrap_err().to_string();
        assert!(message.contains("file exists where a folder is needed") && message.contains("/file"), "{message}");
    }

    #[test]
    fn link_of_the_current_user_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::create_dir(&target).unwrap();
        symlink(&target, &link).unwrap();
        create_folder(&link, 0o711, None).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o711);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn link_of_another_user_is_not_followed() {
        if !is_root("link_of_another_user_is_not_followed") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::create_dir(&target).unwrap();
        let mode = fs::metadata(&target).unwrap().mode();
        symlink(&target, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(OLD.uid), Some(OLD.gid)).unwrap();
        let error = create_folder(&link, 0o711, Some(NEW)).unwrap_err();
        assert!(matches!(error, FolderError::ForeignLink { uid, .. } if uid == OLD.uid), "{error}");
        // Another name of a link of root could be in a folder of any user.
        fs::remove_file(&link).unwrap();
        symlink(&target, folder.path().join("root's")).unwrap();
        fs::hard_link(folder.path().join("root's"), &link).unwrap();
        let error = create_folder(&link, 0o711, Some(NEW)).unwrap_err();
        assert!(matches!(error, FolderError::ForeignLink { .. }), "{error}");
        assert_eq!((owner(&target), fs::metadata(&target).unwrap().mode()), (0, mode));
    }

    #[test]
    fn root_does_not_use_a_folder_of_another_user() {
        if !is_root("root_does_not_use_a_folder_of_another_user") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        fs::create_dir(&path).unwrap();
        chown(&path, Some(OLD.uid), Some(OLD.gid)).unwrap();
        let message = create_folder(&path, 0o700, None).unwrap_err().to_string();
        assert!(message.contains("belongs to another user") && message.contains("4000001"), "{message}");
        // In a folder that other users can write to, that user may have created it.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let error = create_folder(&path, 0o700, Some(NEW)).unwrap_err();
        assert!(matches!(error, FolderError::ForeignFolder { .. }), "{error}");
        assert_eq!(owner(&path), OLD.uid);
    }

    #[test]
    fn content_of_the_previous_account_is_given_to_the_new_one() {
        if !is_root("content_of_the_previous_account_is_given_to_the_new_one") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (path, outside) = (folder.path().join("data"), folder.path().join("outside"));
        fs::create_dir_all(path.join("base/1")).unwrap();
        fs::create_dir(&outside).unwrap();
        for file in [path.join("base/1/table"), outside.join("file"), path.join("root's")] {
            fs::write(file, "").unwrap();
        }
        symlink(&outside, path.join("link")).unwrap();
        // A second name of a file of root, which the previous account may have created.
        fs::hard_link(outside.join("file"), path.join("hard")).unwrap();
        for old in [path.join("base/1/table"), path.join("base/1"), path.join("base"), path.clone()] {
            chown(old, Some(OLD.uid), Some(OLD.gid)).unwrap();
        }
        create_folder(&path, 0o700, Some(NEW)).unwrap();
        for new in ["", "base", "base/1", "base/1/table"] {
            assert_eq!(owner(&path.join(new)), NEW.uid, "{new}");
        }
        for kept in [path.join("root's"), path.join("link"), outside.clone(), outside.join("file")] {
            assert_eq!(owner(&kept), 0, "{}", kept.display());
        }

        // A file of the previous account that also has a name elsewhere.
        let stack = fs::File::create(outside.join("other")).unwrap();
        fchown(&stack, Some(NEW.uid), Some(NEW.gid)).unwrap();
        fs::hard_link(outside.join("other"), path.join("hard2")).unwrap();
        let error = create_folder(&path, 0o700, Some(OLD)).unwrap_err();
        assert!(matches!(&error, FolderError::HardLink { path } if path.ends_with("hard2")), "{error}");
        assert_eq!(owner(&outside.join("other")), NEW.uid);
        assert_eq!(owner(&path), NEW.uid, "the change is repeated by the next start");
    }
}
