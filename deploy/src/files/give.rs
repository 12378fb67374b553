//! Files and folders of root that another account gets, because a process with that account uses them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use rustix::fs::{Mode, OFlags};

use super::folder::{FolderError, HardLinks, create_folder, give_content, open_folder};
use super::{FileError, error};

/// Why a folder keeps its owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeptFolder {
    #[error("{path} also contains {entry}")]
    OtherContent { path: PathBuf, entry: String },
    #[error("{path} belongs to another user (user id {uid})")]
    OtherOwner { path: PathBuf, uid: u32 },
}

/// Gives a file in a folder that only root writes to `owner`. The file may belong to root or to an earlier account.
pub fn give_file(path: &Path, owner: Account) -> Result<(), FileError> {
    // Without NONBLOCK, opening a FIFO would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| error("open", path)(errno.into()))?;
    let file = File::from(opened);
    let metadata = file.metadata().map_err(error("read", path))?;
    if (metadata.uid(), metadata.gid()) == (owner.uid, owner.gid) {
        return Ok(());
    }
    if !metadata.is_file() || metadata.nlink() > 1 {
        let reason = io::Error::new(io::ErrorKind::InvalidInput, "it is not a file, or has another name elsewhere");
        return Err(error("change the owner of", path)(reason));
    }
    fchown(&file, Some(owner.uid), Some(owner.gid)).map_err(error("change the owner of", path))
}

/// Creates a folder of `owner` that everybody may read, or gives an existing one of root to `owner`, with everything in
/// it that belongs to root. Files with several hard links keep their owner, because root may have created the other
/// name.
///
/// Returns why the folder keeps its owner: it belongs to a third user, or contains an entry that `is_expected` refuses,
/// so it may serve other purposes.
pub fn give_folder(
    path: &Path,
    owner: Account,
    is_expected: impl Fn(&OsStr) -> bool,
) -> Result<Option<KeptFolder>, FolderError> {
    if !path.exists() {
        create_folder(path, 0o755, Some(owner))?;
        return Ok(None);
    }
    let folder = open_folder(path)?;
    let metadata = folder.metadata().map_err(error("read", path))?;
    let own = rustix::process::geteuid().as_raw();
    if ![own, owner.uid].contains(&metadata.uid()) {
        return Ok(Some(KeptFolder::OtherOwner { path: path.to_owned(), uid: metadata.uid() }));
    }
    if metadata.uid() == own {
        for entry in fs::read_dir(path).map_err(error("read", path))? {
            let name = entry.map_err(error("read", path))?.file_name();
            if !is_expected(&name) {
                let entry = name.to_string_lossy().into_owned();
                return Ok(Some(KeptFolder::OtherContent { path: path.to_owned(), entry }));
            }
        }
    }
    // Also in a folder that was given before: an earlier version, run as root, may have written to it since.
    give_content(&folder, path, own, owner, HardLinks::Keep)?;
    fchown(&folder, Some(owner.uid), Some(owner.gid)).map_err(error("change the owner of", path))?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{is_root, owner};
    use super::*;
    use std::os::unix::fs::symlink;

    const ACCOUNT: Account = Account { uid: 4_000_001, gid: 4_000_001 };

    #[test]
    fn key_is_given_but_a_link_or_a_file_with_two_names_is_not() {
        if !is_root("key_is_given_but_a_link_or_a_file_with_two_names_is_not") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [key, link, hard] = ["key", "link", "hard"].map(|name| folder.path().join(name));
        fs::write(&key, "").unwrap();
        symlink(&key, &link).unwrap();
        give_file(&link, ACCOUNT).unwrap_err();
        fs::hard_link(&key, &hard).unwrap();
        give_file(&key, ACCOUNT).unwrap_err();
        assert_eq!(owner(&key), 0);
        fs::remove_file(&hard).unwrap();
        give_file(&key, ACCOUNT).unwrap();
        assert_eq!(owner(&key), ACCOUNT.uid);
    }

    #[test]
    fn folder_with_other_content_or_of_another_user_is_kept() {
        if !is_root("folder_with_other_content_or_of_another_user_is_kept") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let models = folder.path().join("models");
        let give = || give_folder(&models, ACCOUNT, |name| name == "hf").unwrap();
        assert_eq!((give(), owner(&models)), (None, ACCOUNT.uid), "it is created");
        std::os::unix::fs::chown(&models, Some(0), Some(0)).unwrap();
        fs::create_dir(models.join("hf")).unwrap();
        fs::write(models.join("hf/file"), "").unwrap();
        fs::write(models.join("notes"), "").unwrap();
        let kept = give().unwrap().to_string();
        assert!(kept.contains("also contains notes"), "{kept}");
        assert_eq!((owner(&models), owner(&models.join("hf"))), (0, 0));
        fs::remove_file(models.join("notes")).unwrap();
        assert_eq!(give(), None);
        assert_eq!([".", "hf", "hf/file"].map(|name| owner(&models.join(name))), [ACCOUNT.uid; 3]);
        std::os::unix::fs::chown(&models, Some(ACCOUNT.uid + 1), None).unwrap();
        assert!(matches!(give(), Some(KeptFolder::OtherOwner { .. })));
    }
}
