//! Folders and small files with a given owner and mode; files are replaced atomically.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, fchown};
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use sha2::{Digest, Sha256};

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

/// Creates the folder, or sets mode and owner of an existing one. Missing parents are created; existing ones are not
/// changed.
pub fn create_folder(path: &Path, mode: u32, owner: Option<Account>) -> Result<(), FileError> {
    if !path.is_dir() {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(error("create", parent))?;
        }
        match fs::DirBuilder::new().mode(mode).create(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            created => created.map_err(error("create", path))?,
        }
    }
    let current = fs::metadata(path).map_err(error("read", path))?;
    if let Some(owner) = owner
        && (current.uid(), current.gid()) != (owner.uid, owner.gid)
    {
        chown(path, Some(owner.uid), Some(owner.gid)).map_err(error("change the owner of", path))?;
    }
    if current.mode() & 0o7777 != mode {
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(error("change the mode of", path))?;
    }
    Ok(())
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
    fn file_in_place_of_a_folder_is_reported_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let message = create_folder(&path, 0o700, None).unwrap_err().to_string();
        assert!(message.contains("file exists where a folder is needed") && message.contains("/file"), "{message}");
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
