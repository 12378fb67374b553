//! Folders with a given owner and mode.
//!
//! If cfq runs as root, some folders belong to the account of its processes, which can put links into them. So owner
//! and mode are changed only through a handle of the opened file, never by path, and a link is followed only if it
//! belongs to the current user or to root.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Component, Path, PathBuf};

use cfq_link::child::Account;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, open, openat, readlinkat, statat};

use super::{FileError, error};

/// Flags of every opened folder.
const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Flags for a folder on the way, which the current user may be allowed to traverse but not to read.
#[cfg(target_os = "linux")]
const TRAVERSE: OFlags = OFlags::PATH.union(FOLDER);
#[cfg(not(target_os = "linux"))]
const TRAVERSE: OFlags = OFlags::RDONLY.union(FOLDER);
/// Maximum number of links in a path, as in Linux.
const MAX_LINKS: usize = 40;

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
                give_content(&folder, path, current.uid(), owner, HardLinks::Refuse)?;
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

/// Creates a folder of the current user, or sets mode and group of an existing one. The group of `account` can enter it,
/// but can neither list it nor create anything in it. Without an account, only the current user can enter it.
pub fn create_entered_folder(path: &Path, account: Option<Account>) -> Result<(), FolderError> {
    let Some(account) = account else { return create_folder(path, 0o700, None) };
    let own = rustix::process::geteuid().as_raw();
    if path.is_dir() {
        let uid = open_folder(path)?.metadata().map_err(error("read", path))?.uid();
        if uid != own {
            return Err(FolderError::ForeignFolder { path: path.to_owned(), uid });
        }
    }
    create_folder(path, 0o710, Some(Account { uid: own, gid: account.gid }))
}

/// True if the folder exists, belongs to the current user, and no other user can create entries in it.
pub fn only_own_user_writes(folder: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::metadata(folder).is_ok_and(|meta| meta.uid() == own && meta.mode() & 0o022 == 0)
}

/// Opens a folder. A link in the path is followed only if it belongs to the current user or to root. Each component is
/// opened relative to the folder before it, so that no other user can exchange a component after its check.
pub(super) fn open_folder(path: &Path) -> Result<File, FolderError> {
    let failed = |source: io::Error| error("open", path)(source);
    let mut rest = components(&std::path::absolute(path).map_err(failed)?);
    let mut opened = PathBuf::from("/");
    let mut folder = File::from(open("/", TRAVERSE, Mode::empty()).map_err(|errno| failed(errno.into()))?);
    let mut links = 0;
    while let Some(name) = rest.pop() {
        let errno = match openat(&folder, &name, TRAVERSE, Mode::empty()) {
            Ok(next) => {
                folder = File::from(next);
                opened.push(&name);
                continue;
            }
            Err(errno) => errno,
        };
        links += 1;
        match own_link(&folder, &name, &opened.join(&name))? {
            Some(target) if links <= MAX_LINKS => {
                if target.is_absolute() {
                    folder = File::from(open("/", TRAVERSE, Mode::empty()).map_err(|errno| failed(errno.into()))?);
                    opened = PathBuf::from("/");
                }
                rest.extend(components(&target));
            }
            _ => return Err(failed(errno.into()).into()),
        }
    }
    let folder = openat(&folder, ".", OFlags::RDONLY | FOLDER, Mode::empty());
    Ok(File::from(folder.map_err(|errno| failed(errno.into()))?))
}

/// Components of a path, the last one first.
fn components(path: &Path) -> Vec<OsString> {
    let names = path.components().filter(|component| !matches!(component, Component::RootDir));
    names.rev().map(|component| component.as_os_str().to_owned()).collect()
}

/// Target of a link of the current user or of root; `None` if `name` is no link.
fn own_link(folder: &File, name: &OsStr, path: &Path) -> Result<Option<PathBuf>, FolderError> {
    let failed = |errno: rustix::io::Errno| error("read", path)(errno.into());
    let stat = || statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed);
    let Ok(link) = stat() else { return Ok(None) };
    if FileType::from_raw_mode(link.st_mode) != FileType::Symlink {
        return Ok(None);
    }
    let own = rustix::process::geteuid().as_raw();
    // Another user could have created a hard link to a link of root.
    if ![own, 0].contains(&link.st_uid) || link.st_nlink > 1 {
        return Err(FolderError::ForeignLink { path: path.to_owned(), uid: link.st_uid });
    }
    let target = readlinkat(folder, name, Vec::new()).map_err(failed)?;
    // Renaming a link changes its ctime, so a link that was exchanged meanwhile is noticed.
    let after = stat()?;
    let identity = |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino, stat.st_ctime, stat.st_ctime_nsec);
    if identity(&link) != identity(&after) {
        return Err(FolderError::ForeignLink { path: path.to_owned(), uid: after.st_uid });
    }
    Ok(Some(PathBuf::from(OsString::from_vec(target.into_bytes()))))
}

/// What happens to files with several hard links, whose other names may be elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HardLinks {
    Refuse,
    /// They keep their owner.
    Keep,
}

/// Gives all folders and files below `folder` that belong to `from` to `to`. Follows no link. Links, sockets and entries
/// of other users keep their owner.
pub(super) fn give_content(
    folder: &File,
    path: &Path,
    from: u32,
    to: Account,
    hard_links: HardLinks,
) -> Result<(), FolderError> {
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
            give_content(&file, &path, from, to, hard_links)?;
        } else if opened.nlink() > 1 {
            match hard_links {
                HardLinks::Refuse => return Err(FolderError::HardLink { path }),
                HardLinks::Keep => continue,
            }
        }
        fchown(&file, Some(to.uid), Some(to.gid)).map_err(error("change the owner of", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{is_root, owner};
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    const OLD: Account = Account { uid: 4_000_001, gid: 4_000_001 };
    const NEW: Account = Account { uid: 4_000_002, gid: 4_000_002 };

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
    fn link_in_the_middle_of_a_path_is_checked_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (target, link) = (root.join("a/target"), root.join("b"));
        fs::create_dir_all(target.join("data")).unwrap();
        // Own links are followed, also relative ones with `..`, and ones that end at a link.
        symlink("a/../a/target", &link).unwrap();
        symlink(link.join("data"), root.join("c")).unwrap();
        symlink(".", target.join("d")).unwrap();
        for (path, mode) in [(link.join("data"), 0o711), (root.join("c"), 0o700), (link.join("d/data"), 0o755)] {
            create_folder(&path, mode, None).unwrap();
            assert_eq!(fs::metadata(target.join("data")).unwrap().mode() & 0o777, mode, "{}", path.display());
        }
        // A circle.
        symlink("e", root.join("e")).unwrap();
        assert!(create_folder(&root.join("e"), 0o700, None).is_err());
        if !is_root("link_in_the_middle_of_a_path_is_checked_as_well/owner") {
            return;
        }
        std::os::unix::fs::lchown(&link, Some(OLD.uid), Some(OLD.gid)).unwrap();
        for path in [link.join("data"), root.join("c")] {
            let error = create_folder(&path, 0o700, Some(NEW)).unwrap_err();
            assert!(matches!(&error, FolderError::ForeignLink { path, .. } if *path == link), "{error}");
        }
        assert_eq!(owner(&target.join("data")), 0);
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
