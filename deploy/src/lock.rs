//! The lock of a data folder, which only one process at a time can hold. Only the kernel's file lock determines who
//! holds it. The text in the file merely names the holder, so that a second process can report it and `cfq down` finds
//! the process to stop.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use cfq_link::child::ProcessIdentity;
use cfq_proto::join_token::JoinToken;
use serde::{Deserialize, Serialize};

use crate::files::{self, FileError};
use crate::paths::Paths;

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error(
        "the data folder {data} is in use by {}; stop it with `cfq down`, or choose another folder with CFQ_DATA",
        describe(holder.as_ref())
    )]
    Held { data: PathBuf, holder: Option<LockHolder> },
    #[error(transparent)]
    File(#[from] FileError),
}

fn describe(holder: Option<&LockHolder>) -> String {
    match holder {
        Some(holder) => format!("`{}` (process {})", holder.command, holder.process.pid),
        None => "another cfq process".to_owned(),
    }
}

/// The process that holds a data folder, as the lock file names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    pub process: ProcessIdentity,
    /// Command line of the process.
    pub command: String,
    /// Inode of the lock file; a copy of the file has another one. Absent in files of early 0.1 builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
}

impl LockHolder {
    /// Whether the process runs this command of cfq.
    pub fn runs(&self, command: &str) -> bool {
        let mut words = self.command.split(' ').skip(1);
        while let Some(word) = words.next() {
            match word {
                // Options with a value.
                "--data" | "--config" => drop(words.next()),
                word if word == command => return true,
                _ => {}
            }
        }
        false
    }
}

/// The lock of a data folder, held until this value is dropped or the process exits.
#[derive(Debug)]
pub struct DataLock {
    file: File,
}

impl DataLock {
    /// Takes the lock; fails with [`LockError::Held`] if another process holds it. The data folder must exist.
    pub fn acquire(paths: &Paths) -> Result<Self, LockError> {
        let path = paths.lock();
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(files::error("write", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held { data: paths.data.clone(), holder: read(&mut file) });
            }
            Err(TryLockError::Error(source)) => return Err(files::error("lock", &path)(source).into()),
        }
        if let Some(process) = ProcessIdentity::of(std::process::id()) {
            // Without the join token: any later command may print this.
            let command: Vec<String> = std::env::args().filter(|arg| arg.parse::<JoinToken>().is_err()).collect();
            let inode = file.metadata().ok().map(|metadata| metadata.ino());
            let holder = LockHolder { process, command: command.join(" "), inode };
            let write = |file: &mut File| -> std::io::Result<()> {
                file.set_len(0)?;
                file.rewind()?;
                file.write_all(&serde_json::to_vec(&holder)?)
            };
            write(&mut file).map_err(files::error("write", &path))?;
        }
        Ok(Self { file })
    }

    /// Returns the current holder of the lock. Does not take the lock, so it never interferes with a process that is
    /// about to acquire it. A copy of the folder has no holder, although the copied file names one.
    ///
    /// # Errors
    /// A [`FileError`] if the lock file exists, but cannot be read.
    pub fn holder(paths: &Paths) -> Result<Option<LockHolder>, FileError> {
        let path = paths.lock();
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(files::error("read", &path)(error)),
        };
        let inode = file.metadata().map_err(files::error("read", &path))?.ino();
        let is_own = |holder: &LockHolder| holder.inode.is_none_or(|own| own == inode);
        Ok(read(&mut file).filter(|holder| is_own(holder) && holder.process.is_alive()))
    }
}

impl Drop for DataLock {
    fn drop(&mut self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::debug!(%error, "cannot empty the lock file");
        }
        // Closing the file is not enough: a child between fork and exec shares the open file, and with it the lock.
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "cannot unlock the lock file");
        }
    }
}

fn read(file: &mut File) -> Option<LockHolder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_acquire_reports_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = Paths { data: folder.path().to_owned(), cache: at("c"), config: at("e") };
        let first = DataLock::acquire(&paths).unwrap();
        let copy_in_a_fork = first.file.try_clone().unwrap();
        let message = DataLock::acquire(&paths).unwrap_err().to_string();
        let process = format!("process {}", std::process::id());
        assert!(message.contains(&process) && message.contains("cfq down"), "{message}");
        assert_eq!(DataLock::holder(&paths).unwrap().unwrap().process.pid, std::process::id());
        let copied = Paths { data: at("copy"), cache: at("c"), config: at("e") };
        std::fs::create_dir(&copied.data).unwrap();
        std::fs::copy(paths.lock(), copied.lock()).unwrap();
        assert_eq!(DataLock::holder(&copied).unwrap(), None, "the process holds another folder");
        drop(first);
        assert_eq!(DataLock::holder(&paths).unwrap(), None);
        DataLock::acquire(&paths).unwrap();
        drop(copy_in_a_fork);
    }
}
