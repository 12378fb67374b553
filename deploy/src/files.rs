//! Folders and small files with a given owner and mode; files are replaced atomically.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};

mod folder;
mod give;
#[cfg(test)]
mod testing;

pub use folder::{FolderError, create_entered_folder, create_folder, only_own_user_writes};
pub use give::{KeptFolder, give_file, give_folder};

/// Maximum size in bytes of a file that [`read_foreign`] reads; the files are a few hundred bytes long.
const MAX_FOREIGN_FILE_BYTES: u64 = 64 << 10;

/// A failed file system operation.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}{}", hint(source))]
pub struct FileError {
    /// A verb, for example "write".
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": it may not be written by the user cfq runs as; fix its owner or mode, or choose other folders with \
             CFQ_DATA, CFQ_CACHE and CFQ_CONFIG"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": no space is left on its file system; free some, or choose other folders with CFQ_DATA and CFQ_CACHE"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            ": a file exists where a folder is needed; move it away, or choose other folders with CFQ_DATA, CFQ_CACHE \
             and CFQ_CONFIG"
        }
        _ => "",
    }
}

/// Returns a function that adds action and path to an I/O error, for `map_err`.
pub fn error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    move |source| FileError { action, path: path.to_owned(), source }
}

/// Replaces the file atomically by one that only its owner can read. The content is on disk when this returns.
pub fn write_private(path: &Path, content: &[u8], owner: Option<Account>) -> Result<(), FileError> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(error("write", path))?;
    let write = |file: &mut tempfile::NamedTempFile| -> io::Result<()> {
        file.write_all(content)?;
        if let Some(owner) = owner {
            fchown(file.as_file(), Some(owner.uid), Some(owner.gid))?;
        }
        file.as_file().sync_all()
    };
    write(&mut file).map_err(error("write", path))?;
    file.persist(path).map_err(|e| error("write", path)(e.error))?;
    sync_folder(parent)
}

/// Like [`write_private`], but only the current user can write the file, and the account `reader` can read it.
pub fn write_for_reader(path: &Path, content: &[u8], reader: Account) -> Result<(), FileError> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(error("write", path))?;
    let write = |file: &mut tempfile::NamedTempFile| -> io::Result<()> {
        file.write_all(content)?;
        fchown(file.as_file(), None, Some(reader.gid))?;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o640))?;
        file.as_file().sync_all()
    };
    write(&mut file).map_err(error("write", path))?;
    file.persist(path).map_err(|e| error("write", path)(e.error))?;
    sync_folder(parent)
}

/// Flushes the folder's entries to disk.
pub fn sync_folder(path: &Path) -> Result<(), FileError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(error("write", path))
}

/// The file's text; `None` if the file does not exist.
pub fn read_if_exists(path: &Path) -> Result<Option<String>, FileError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(error("read", path)(e)),
    }
}

/// The text of a small file in a folder that another account writes to; `None` if the file does not exist. Fails if the
/// file is a link, since the link could lead to a file that only the current user may read.
pub fn read_foreign(path: &Path) -> Result<Option<String>, FileError> {
    // Without NONBLOCK, opening a FIFO would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(error("read", path)(errno.into())),
    };
    let metadata = file.metadata().map_err(error("read", path))?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let owner = fs::metadata(folder).map_err(error("read", folder))?.uid();
    let is_link = metadata.nlink() > 1 && metadata.uid() != owner;
    if !metadata.is_file() || is_link {
        return Err(error("read", path)(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a file of its folder's owner",
        )));
    }
    let mut text = String::new();
    file.take(MAX_FOREIGN_FILE_BYTES).read_to_string(&mut text).map_err(error("read", path))?;
    Ok(Some(text))
}

/// A random password: 24 bytes from the kernel, in hexadecimal.
pub fn random_password() -> Result<String, FileError> {
    let source = Path::new("/dev/urandom");
    let mut bytes = [0; 24];
    File::open(source).and_then(|mut file| file.read_exact(&mut bytes)).map_err(error("read", source))?;
    Ok(hex(&bytes))
}

/// The first eight hexadecimal digits of the path's SHA-256. They become part of names that must differ between the
/// data folders of one machine.
pub fn path_hash(path: &Path) -> String {
    hex(&Sha256::digest(path.as_os_str().as_encoded_bytes())[..4])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_file_replaces_a_link_instead_of_following_it() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join("secret"));
        fs::write(&victim, "before").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write_private(&path, b"secret", None).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "before");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_a_regular_file_is_read_from_a_foreign_folder() {
        let folder = tempfile::tempdir().unwrap();
        let [secret, link, hard, port] = ["secret", "link", "hard", "port"].map(|name| folder.path().join(name));
        fs::write(&port, "4222").unwrap();
        assert_eq!(read_foreign(&port).unwrap().as_deref(), Some("4222"));
        assert_eq!(read_foreign(&folder.path().join("none")).unwrap(), None);
        fs::write(&secret, "secret").unwrap();
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        read_foreign(&link).unwrap_err();
        read_foreign(folder.path()).unwrap_err();
        fs::hard_link(&secret, &hard).unwrap();
        assert_eq!(read_foreign(&hard).unwrap().as_deref(), Some("secret"), "the folder's owner owns the file");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.path(), Some(4_000_001), None).unwrap();
            read_foreign(&hard).unwrap_err();
        }
    }

    #[test]
    fn full_disk_is_reported() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            return cfq_test_skip::skip("full_disk_is_reported", "this system has no /dev/full");
        }
        let source = fs::write(full, "x").unwrap_err();
        let message = error("write", full)(source).to_string();
        assert!(message.contains("no space is left"), "{message}");
    }
}
