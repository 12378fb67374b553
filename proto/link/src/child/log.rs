//! Log file of a child. The child appends to it, and its size is limited even while the child runs.
//!
//! The child keeps the file open, so a log that has grown too large is copied to `<log>.1` and truncated in place; the
//! child continues to append at the new end. Output that the child writes between the copy and the truncation is lost,
//! which is better than a full disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// Size in bytes above which a log is rotated. One older log is kept, so the logs of one process use at most about
/// twice this size on disk.
const MAX_LOG_BYTES: u64 = 16 << 20;
/// Interval at which the size of a running process's log is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Opens a log file for appending; a file of an earlier run that is too large is first renamed to `<log>.1`.
pub(super) fn open(path: &Path) -> io::Result<File> {
    if fs::metadata(path).is_ok_and(|meta| meta.len() > MAX_LOG_BYTES) {
        fs::rename(path, rotated(path))?;
    }
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Limits the size of a log until the returned guard is dropped.
pub(super) fn limit_size(path: &Path) -> io::Result<SyncSender<()>> {
    limit_size_to(path.to_owned(), MAX_LOG_BYTES, CHECK_INTERVAL)
}

fn limit_size_to(path: PathBuf, max_bytes: u64, interval: Duration) -> io::Result<SyncSender<()>> {
    let (guard, dropped) = sync_channel(0);
    thread::Builder::new().name("log".into()).spawn(move || watch(&path, max_bytes, interval, &dropped))?;
    Ok(guard)
}

fn watch(path: &Path, max_bytes: u64, interval: Duration, dropped: &Receiver<()>) {
    let mut warned = false;
    while dropped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        if fs::metadata(path).is_ok_and(|meta| meta.len() > max_bytes)
            && let Err(error) = copy_and_truncate(path)
            && !warned
        {
            tracing::warn!(path = %path.display(), %error, "cannot limit the size of this log");
            warned = true;
        }
    }
}

fn copy_and_truncate(path: &Path) -> io::Result<()> {
    let copy = rotated(path);
    if let Err(error) = fs::copy(path, &copy) {
        // The partial copy is removed to free its disk space.
        return fs::remove_file(&copy).and(Err(error));
    }
    OpenOptions::new().write(true).open(path)?.set_len(0)
}

/// Path of the one older log that is kept, `<log>.1`.
fn rotated(path: &Path) -> PathBuf {
    let mut rotated = path.as_os_str().to_owned();
    rotated.push(".1");
    PathBuf::from(rotated)
}

/// Returns the last `bytes` of a log, for an error message; empty if it cannot be read.
pub fn log_tail(path: &Path, bytes: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(bytes)))?;
        let mut tail = Vec::new();
        file.take(bytes).read_to_end(&mut tail)?;
        Ok(tail)
    };
    read().map(|tail| String::from_utf8_lossy(&tail).trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Instant;

    #[test]
    fn log_of_a_running_process_is_copied_and_truncated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.log");
        let mut log = open(&path).unwrap();
        let guard = limit_size_to(path.clone(), 1000, Duration::from_millis(5)).unwrap();
        log.write_all(&[b'a'; 1001]).unwrap();
        let start = Instant::now();
        while fs::metadata(&path).unwrap().len() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "not truncated");
            thread::yield_now();
        }
        assert_eq!(fs::read(rotated(&path)).unwrap(), [b'a'; 1001]);
        log.write_all(b"after").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"after", "no gap before it");
        drop(guard);
    }

    #[test]
    fn too_large_log_of_an_earlier_run_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.log");
        File::create(&path).unwrap().set_len(MAX_LOG_BYTES + 1).unwrap();
        assert_eq!(open(&path).unwrap().metadata().unwrap().len(), 0);
        assert_eq!(fs::metadata(rotated(&path)).unwrap().len(), MAX_LOG_BYTES + 1);
    }
}
