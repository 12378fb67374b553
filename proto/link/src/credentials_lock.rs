//! Ownership of an id: the lock on the file with its credentials, and the wait for the lease of an earlier process.
//!
//! The kernel releases the lock when its process ends, however it ends. So a process that holds the lock proves that no
//! earlier process with this file is alive. A copy of the file is another file with another lock and proves nothing: its
//! process has to wait until the lease of the earlier process ends.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use cfq_proto::timing::Timing;

use crate::clock;
use crate::link_error::LinkError;
use crate::session::NatsConfig;

/// The lock on a credentials file, held until it is dropped.
#[derive(Debug)]
pub struct CredentialsLock {
    _file: File,
    id: String,
}

impl CredentialsLock {
    /// Locks the credentials file for this process. `None` if there is no such file, or if its file system does not
    /// support locks.
    ///
    /// # Errors
    /// [`LinkError::CredentialsTaken`] if another process holds the lock, [`LinkError::Seed`] if the file cannot be read.
    pub fn acquire(nats: &NatsConfig) -> Result<Option<Self>, LinkError> {
        let Some(path) = &nats.seed_file else { return Ok(None) };
        let seed = |source| LinkError::Seed { path: path.clone(), source };
        let file = File::open(path).map_err(seed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LinkError::CredentialsTaken { path: path.clone() }),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(path = %path.display(), %error, "the credentials file cannot be locked");
                return Ok(None);
            }
        }
        let metadata = file.metadata().map_err(seed)?;
        // The inode is not reused while a process has the file open, and device numbers are unique until the machine is
        // restarted.
        let id = |boot| format!("{boot}:{}:{}", metadata.dev(), metadata.ino());
        Ok(clock::machine_boot().map(|boot| Self { id: id(boot), _file: file }))
    }

    /// Identifies the lock: no other file has the same id, on this machine or on another one.
    pub fn id(&self) -> &str {
        &self.id
    }
}

/// Wait of a process whose id may still be in use, until the lease of the process that used it last ends.
#[derive(Debug, Default)]
pub struct LeaseWait {
    until: Option<Instant>,
}

impl LeaseWait {
    /// Waits before the next registration, after one that was refused for `reason` because the lease ends only in
    /// `lease_ms`. False if the lease was renewed since the first call: its process is alive.
    pub async fn wait(&mut self, lease_ms: u64, reason: &str, timing: &Timing) -> bool {
        let now = Instant::now();
        let until = *self.until.get_or_insert_with(|| {
            tracing::warn!(
                reason,
                seconds = lease_ms as f64 / 1000.0,
                "the id is in use; waiting until the lease of the process that used it last has ended"
            );
            // The reply may be late by the time of a heartbeat.
            now + Duration::from_millis(lease_ms) + timing.heartbeat()
        });
        if now >= until {
            return false;
        }
        tokio::time::sleep(timing.heartbeat().min(until - now)).await;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(path: &std::path::Path) -> NatsConfig {
        NatsConfig { url: "nats://127.0.0.1:1".into(), ca_file: None, seed_file: Some(path.to_owned()) }
    }

    #[test]
    fn file_is_locked_once_and_its_copy_has_another_lock() {
        let folder = tempfile::tempdir().unwrap();
        let (file, copy) = (folder.path().join("node-n1.seed"), folder.path().join("copy.seed"));
        std::fs::write(&file, "seed").unwrap();
        std::fs::copy(&file, &copy).unwrap();
        let first = CredentialsLock::acquire(&config(&file)).unwrap().unwrap();
        let refused = CredentialsLock::acquire(&config(&file)).unwrap_err();
        assert!(matches!(refused, LinkError::CredentialsTaken { .. }), "{refused}");
        let of_copy = CredentialsLock::acquire(&config(&copy)).unwrap().unwrap();
        assert_ne!(first.id(), of_copy.id());
        let id = first.id().to_owned();
        drop(first);
        assert_eq!(CredentialsLock::acquire(&config(&file)).unwrap().unwrap().id(), id);
    }

    #[tokio::test]
    async fn lease_that_is_renewed_ends_the_wait() {
        let timing = Timing { heartbeat_ms: 20, ..Timing::default() };
        let (mut wait, mut waits) = (LeaseWait::default(), 0);
        while wait.wait(60, "in use", &timing).await {
            waits += 1;
        }
        assert!(waits >= 1);
    }
}
