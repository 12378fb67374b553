//! Durable record of a delivery: which branch of the user's repository a runner process is about to create. It is
//! written before the branch is locked, so after a crash the next process recognises a lock or a branch as cfq's own.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cfq_link::child::ProcessIdentity;
use cfq_proto::ids::TaskId;
use serde::{Deserialize, Serialize};

use super::durable;
use super::error::{GitError, io_context};

/// Time after which a record is removed, in seconds: its task ended elsewhere or was never resumed.
const MAX_RECORD_AGE_S: u64 = 90 * 24 * 3600;

/// A delivery that a process began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DeliveryRecord {
    /// Git folder of the user's repository that holds its refs.
    pub git_dir: String,
    /// Short name of the branch.
    pub branch: String,
    /// Id of the delivered commit.
    pub commit: String,
    /// The process; `None` on a system that does not show processes.
    pub process: Option<ProcessIdentity>,
    /// True once the process has created the branch.
    #[serde(default)]
    pub created: bool,
}

/// A record of an earlier call, found on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EarlierDelivery {
    pub record: DeliveryRecord,
    /// True if the process is known to have ended.
    pub process_is_dead: bool,
    /// Time at which the record was written, on the clock of its file system.
    pub written_at: SystemTime,
}

/// File that holds the delivery record of one task, in the runner's data folder.
#[derive(Debug, Clone)]
pub struct DeliveryRecordFile {
    path: PathBuf,
}

impl DeliveryRecordFile {
    /// The file of a task. Creates nothing.
    pub fn new(data_dir: &Path, task: TaskId) -> Self {
        Self { path: folder(data_dir).join(format!("{task}.json")) }
    }

    /// Returns the recorded delivery; `None` if there is none. An unreadable record counts as none: the delivery then
    /// treats every lock and branch as foreign.
    pub(super) fn read(&self) -> Result<Option<EarlierDelivery>, GitError> {
        let operation = || format!("read {}", self.path.display());
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(GitError::Io { operation: operation(), source }),
        };
        let metadata = io_context(operation(), std::fs::metadata(&self.path))?;
        let written_at = io_context(operation(), metadata.modified())?;
        match serde_json::from_slice(&bytes) {
            Ok(record) => {
                let record: DeliveryRecord = record;
                let process_is_dead = record.process.as_ref().is_some_and(|process| !process.is_alive());
                Ok(Some(EarlierDelivery { record, process_is_dead, written_at }))
            }
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "unreadable delivery record ignored");
                Ok(None)
            }
        }
    }

    /// Writes the record. It is on disk when this returns.
    pub(super) fn write(&self, record: &DeliveryRecord) -> Result<(), GitError> {
        let text = serde_json::to_vec(record).map_err(std::io::Error::from);
        let written = text.and_then(|text| durable::write_file(&self.path, &text));
        io_context(format!("write {}", self.path.display()), written)
    }

    /// Removes the record, if there is one. A record that stays is removed by [`Self::remove_old`].
    pub fn remove(&self) {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::debug!(path = %self.path.display(), %error, "cannot remove a delivery record");
            }
            Ok(()) | Err(_) => {}
        }
    }

    /// Removes the records below `data_dir` that are too old to be of use.
    pub fn remove_old(data_dir: &Path) {
        let Ok(entries) = std::fs::read_dir(folder(data_dir)) else { return };
        let now = u64::try_from(cfq_link::clock::unix_seconds()).unwrap_or(0);
        for entry in entries.flatten() {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            let written = modified.ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            if written.is_some_and(|written| written.as_secs() + MAX_RECORD_AGE_S < now) {
                Self { path: entry.path() }.remove();
            }
        }
    }
}

fn folder(data_dir: &Path) -> PathBuf {
    data_dir.join("deliveries")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_read_back_and_removed() {
        let data = tempfile::tempdir().unwrap();
        let file = DeliveryRecordFile::new(data.path(), TaskId::fresh());
        assert_eq!(file.read().unwrap(), None);
        let record = DeliveryRecord {
            git_dir: "/r/.git/".into(),
            branch: "cfq/t1".into(),
            commit: "c".into(),
            process: ProcessIdentity::of(std::process::id()),
            created: false,
        };
        file.write(&record).unwrap();
        assert_eq!(file.read().unwrap().unwrap().record, record);
        DeliveryRecordFile::remove_old(data.path());
        assert!(file.read().unwrap().is_some());
        let old = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
        std::fs::File::options().write(true).open(&file.path).unwrap().set_modified(old).unwrap();
        DeliveryRecordFile::remove_old(data.path());
        assert_eq!(file.read().unwrap(), None);
        file.remove();
    }

    #[test]
    fn unreadable_record_counts_as_none() {
        let data = tempfile::tempdir().unwrap();
        let file = DeliveryRecordFile::new(data.path(), TaskId::fresh());
        std::fs::create_dir_all(file.path.parent().unwrap()).unwrap();
        std::fs::write(&file.path, "{\"branch\"").unwrap();
        assert_eq!(file.read().unwrap(), None);
    }
}
