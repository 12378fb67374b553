//! Folders and small files with the right owner and mode, written whole or not at all.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, fchown};
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use sha2::{Digest, Sha256};

/// Something a file system refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}{}", hint(source))]
pub struct FileError {
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": it may not be written by the user cfq runs as; mend its owner, or choose other folders with CFQ_DATA, \
             CFQ_CACHE and CFQ_CONFIG"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": no space is left there; free some, or choose other folders with CFQ_DATA and CFQ_CACHE"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            ": a file stands where a folder is needed; move it away, or choose other folders with CFQ_DATA, CFQ_CACHE and \
             CFQ_CONFIG"
        }
        _ => "",
    }
}

/// For `map_err`.
pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    move |source| FileError { action, path: path.to_owned(), source }
}

/// Makes the folder, or gives the one there this mode and owner; parents are made as needed and otherwise left alone.
pub fn folder(path: &Path, mode: u32, owner: Option<Account>) -> Result<(), FileError> {
    if !path.is_dir() {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed("create", parent))?;
        }
        match fs::DirBuilder::new().mode(mode).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            made => made.map_err(failed("create", path))?,
        }
    }
    let now = fs::metadata(path).map_err(failed("read", path))?;
    if let Some(owner) = owner
        && (now.uid(), now.gid()) != (owner.uid, owner.gid)
    {
        chown(path, Some(owner.uid), Some(owner.gid)).map_err(failed("change the owner of", path))?;
    }
    if now.mode() & 0o7777 != mode {
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed("change the mode of", path))?;
    }
    Ok(())
}

/// Replaces the file by one that only its owner can read. It is on disk when this returns.
pub fn write_private(path: &Path, content: &[u8], owner: Option<Account>) -> Result<(), FileError> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(failed("write", path))?;
    let write = |file: &mut tempfile::NamedTempFile| -> io::Result<()> {
        file.write_all(content)?;
        if let Some(owner) = owner {
            fchown(file.as_file(), Some(owner.uid), Some(owner.gid))?;
        }
        file.as_file().sync_all()
    };
    write(&mut file).map_err(failed("write", path))?;
    file.persist(path).map_err(|error| failed("write", path)(error.error))?;
    sync_folder(parent)
}

pub fn sync_folder(path: &Path) -> Result<(), FileError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("write", path))
}

/// `None` if there is no such file.
pub fn read_if_there(path: &Path) -> Result<Option<String>, FileError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", path)(error)),
    }
}

/// A password nobody chose: 24 bytes from the kernel in hexadecimal.
pub fn random_password() -> Result<String, FileError> {
    let source = Path::new("/dev/urandom");
    let mut bytes = [0; 24];
    File::open(source).and_then(|mut file| file.read_exact(&mut bytes)).map_err(failed("read", source))?;
    Ok(hex(&bytes))
}

/// Eight characters that tell this folder from any other on the machine.
pub fn short_name(path: &Path) -> String {
    hex(&Sha256::digest(path.as_os_str().as_encoded_bytes())[..4])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_file_is_private_and_replaces_a_link_instead_of_following_it() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join("secret"));
        fs::write(&victim, "before").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write_private(&path, b"secret", None).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "before");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_in_the_way_is_said_with_its_path() {
        let folder_ = tempfile::tempdir().unwrap();
        let path = folder_.path().join("file");
        fs::write(&path, "").unwrap();
        let said = folder(&path, 0o700, None).unwrap_err().to_string();
        assert!(said.contains("file stands where a folder is needed") && said.contains("/file"), "{said}");
    }

    #[test]
    fn a_full_disk_is_said() {
        let full = Path::new("/dev/full");
        if full.exists() {
            let source = fs::write(full, "x").unwrap_err();
            let said = failed("write", full)(source).to_string();
            assert!(said.contains("no space is left"), "{said}");
        }
    }
}
