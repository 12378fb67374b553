//! One holder per data folder. The kernel's lock decides; the text in the file only says who it is, so that the second
//! one can be told, and so that `cfq down` finds whom to stop.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use cfq_link::child::ProcessIdentity;
use serde::{Deserialize, Serialize};

use crate::files::{self, FileError};
use crate::paths::Paths;

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error(
        "the data folder {data} is in use by {}; stop it with `cfq down`, or choose another folder with CFQ_DATA",
        who(holder.as_ref())
    )]
    Held { data: PathBuf, holder: Option<Holder> },
    #[error(transparent)]
    File(#[from] FileError),
}

fn who(holder: Option<&Holder>) -> String {
    match holder {
        Some(holder) => format!("`{}` (process {})", holder.command, holder.process.pid),
        None => "another cfq".to_owned(),
    }
}

/// Who holds a data folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub process: ProcessIdentity,
    pub command: String,
}

/// The data folder is ours until this is dropped or the process ends.
#[derive(Debug)]
pub struct DataLock {
    file: File,
}

impl DataLock {
    /// The folder must exist.
    pub fn acquire(paths: &Paths) -> Result<Self, LockError> {
        let path = paths.lock();
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(files::failed("write", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held { data: paths.data.clone(), holder: read(&mut file) });
            }
            Err(TryLockError::Error(source)) => return Err(files::failed("lock", &path)(source).into()),
        }
        if let Some(process) = ProcessIdentity::of(std::process::id()) {
            let command: Vec<String> = std::env::args().collect();
            let holder = Holder { process, command: command.join(" ") };
            let write = |file: &mut File| -> std::io::Result<()> {
                file.set_len(0)?;
                file.rewind()?;
                file.write_all(&serde_json::to_vec(&holder)?)
            };
            write(&mut file).map_err(files::failed("write", &path))?;
        }
        Ok(Self { file })
    }

    /// Who holds it now. It takes no lock, so it never disturbs somebody who is about to.
    pub fn holder(paths: &Paths) -> Option<Holder> {
        let mut file = File::open(paths.lock()).ok()?;
        read(&mut file).filter(|holder| holder.process.is_alive())
    }
}

impl Drop for DataLock {
    fn drop(&mut self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::debug!(%error, "cannot empty the lock file");
        }
        // Closing is not enough: a child that is between fork and exec has the same open file.
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "cannot unlock the lock file");
        }
    }
}

fn read(file: &mut File) -> Option<Holder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = Paths { data: folder.path().to_owned(), cache: at("c"), config: at("e") };
        let first = DataLock::acquire(&paths).unwrap();
        let as_a_fork_has_it = first.file.try_clone().unwrap();
        let said = DataLock::acquire(&paths).unwrap_err().to_string();
        assert!(said.contains(&format!("process {}", std::process::id())) && said.contains("cfq down"), "{said}");
        assert_eq!(DataLock::holder(&paths).unwrap().process.pid, std::process::id());
        drop(first);
        assert_eq!(DataLock::holder(&paths), None);
        DataLock::acquire(&paths).unwrap();
        drop(as_a_fork_has_it);
    }
}
