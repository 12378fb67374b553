//! Pidfiles of running children, and processes left over from an earlier run.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ChildError, ProcessIdentity, Signal};

/// Maximum wait for a process to end after SIGKILL; only the kernel can delay it.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Content of a pidfile, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PidRecord {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) identity: ProcessIdentity,
    /// User id of the process; absent in pidfiles of cfq 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<u32>,
    pub(super) stop_signal: Signal,
    /// Inode of the pidfile's folder; a copy of the folder has another one. Set by [`write`]; absent in pidfiles of
    /// early 0.1 builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) folder: Option<u64>,
}

impl PidRecord {
    /// True if the recorded process runs, as the recorded user.
    fn is_alive(&self) -> bool {
        match self.user {
            Some(user) => self.identity.user() == Some(user),
            None => self.identity.is_alive(),
        }
    }
}

pub(super) fn write(path: &Path, record: &PidRecord) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let record = PidRecord { folder: Some(fs::metadata(folder)?.ino()), ..record.clone() };
    serde_json::to_writer(&mut file, &record)?;
    file.flush()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

fn read(path: &Path) -> io::Result<PidRecord> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Removes a pidfile only if it still names this process: a later start may have replaced it with its own pidfile.
pub(super) fn remove(path: &Path, identity: &ProcessIdentity) {
    if read(path).is_ok_and(|record| record.identity == *identity)
        && let Err(error) = fs::remove_file(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the pidfile of an ended process");
    }
}

/// A process of an earlier run that is still alive.
#[derive(Debug, Clone)]
pub struct Leftover {
    /// Name of the process in logs and errors.
    pub name: String,
    /// Process id with the start time.
    pub identity: ProcessIdentity,
    stop_signal: Signal,
    pidfile: PathBuf,
}

/// Returns the live processes that are recorded in the pidfiles (`*.pid`) of a folder, and removes all other pidfiles.
/// Pidfiles that were copied from another folder name processes of that folder, which are left alone.
///
/// # Errors
/// [`ChildError::Pidfiles`] if the folder cannot be read or a pidfile cannot be removed.
pub fn leftovers(folder: &Path) -> Result<Vec<Leftover>, ChildError> {
    let failed = |source| ChildError::Pidfiles { path: folder.to_owned(), source };
    let mut found = Vec::new();
    let inode = fs::metadata(folder).map_err(failed)?.ino();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|extension| extension != "pid") {
            continue;
        }
        let alive = match read(&path) {
            Ok(record) => {
                Some(record).filter(|record| record.folder.is_none_or(|own| own == inode)).filter(PidRecord::is_alive)
            }
            Err(error) => {
                // Pidfiles are written by rename, so only a power failure can leave a damaged pidfile, and the power
                // failure also ended the process.
                tracing::warn!(path = %path.display(), %error, "unreadable pidfile");
                None
            }
        };
        match alive {
            Some(PidRecord { name, identity, stop_signal, .. }) => {
                found.push(Leftover { name, identity, stop_signal, pidfile: path });
            }
            None => fs::remove_file(&path).map_err(failed)?,
        }
    }
    Ok(found)
}

impl Leftover {
    /// Sends the stop signal, then SIGKILL if the process has not ended after `grace`, and removes its pidfile.
    ///
    /// # Errors
    /// [`ChildError::Signal`] if a signal cannot be sent, [`ChildError::Unkillable`] if SIGKILL has no effect.
    pub async fn stop(&self, grace: Duration) -> Result<(), ChildError> {
        let failed = |source| ChildError::Signal { name: self.name.clone(), pid: self.identity.pid, source };
        tracing::info!(name = self.name, pid = self.identity.pid, "stopping a process left over from an earlier run");
        self.identity.signal(self.stop_signal).map_err(failed)?;
        // A suspended process acts on the stop signal only after SIGCONT.
        self.identity.signal(Signal::Continue).map_err(failed)?;
        if !self.identity.ended(grace).await {
            self.identity.signal(Signal::Kill).map_err(failed)?;
            if !self.identity.ended(KILL_TIMEOUT).await {
                return Err(ChildError::Unkillable { name: self.name.clone(), pid: self.identity.pid });
            }
        }
        remove(&self.pidfile, &self.identity);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Exit, ProcessSpec, spawn};
    use super::*;

    #[tokio::test]
    async fn leftover_process_is_found_and_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let (log, pidfile) = (folder.path().join("log"), folder.path().join("sleep.pid"));
        let mut spec = ProcessSpec::new("sleep", Path::new("/bin/sleep"), &log, &pidfile);
        spec.args = vec!["300".into()];
        let process = spawn(spec).unwrap();
        let copy = tempfile::tempdir().unwrap();
        fs::copy(&pidfile, copy.path().join("sleep.pid")).unwrap();
        assert!(leftovers(copy.path()).unwrap().is_empty(), "the process belongs to the folder that was copied");
        let found = leftovers(folder.path()).unwrap();
        assert_eq!(found.len(), 1);
        found[0].stop(Duration::from_secs(5)).await.unwrap();
        assert_eq!(process.ended().await, Exit::Signalled(15));
        assert!(leftovers(folder.path()).unwrap().is_empty());
    }

    #[test]
    fn reused_process_id_is_not_a_leftover() {
        let folder = tempfile::tempdir().unwrap();
        let identity = ProcessIdentity { pid: std::process::id(), started: "before".into() };
        let record = PidRecord { name: "other".into(), identity, user: None, stop_signal: Signal::Kill, folder: None };
        write(&folder.path().join("other.pid"), &record).unwrap();
        fs::write(folder.path().join("torn.pid"), "").unwrap();
        assert!(leftovers(folder.path()).unwrap().is_empty());
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            0,
            "both files are removed, and this process is alive"
        );
    }

    #[test]
    fn process_of_another_user_is_not_a_leftover() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.pid");
        let identity = ProcessIdentity::of(std::process::id()).unwrap();
        let own = rustix::process::getuid().as_raw();
        let record = |user| PidRecord {
            name: "own".into(),
            identity: identity.clone(),
            user,
            stop_signal: Signal::Kill,
            folder: None,
        };
        // `None` is a pidfile of cfq 0.1.
        for user in [Some(own), None] {
            write(&path, &record(user)).unwrap();
            assert_eq!(leftovers(folder.path()).unwrap().len(), 1, "{user:?}");
        }
        write(&path, &record(Some(own + 1))).unwrap();
        assert!(leftovers(folder.path()).unwrap().is_empty());
    }
}
