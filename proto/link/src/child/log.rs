//! The log of a child: one file it appends to, bounded also while it runs.
//!
//! The child holds the file open for as long as it lives, so a log that has grown too large is copied aside and emptied
//! where it is; the child goes on appending at its new end. What it writes in the moment between is lost, which a log can
//! bear and a full disk cannot.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// A log larger than this is moved aside; one older log is kept, so a process has at most about twice this on disk.
const LARGEST: u64 = 16 << 20;
/// How often a running process's log is looked at.
const LOOK: Duration = Duration::from_secs(10);

/// For appending; a log that an earlier run left too large is moved aside first.
pub(super) fn open(path: &Path) -> io::Result<File> {
    if fs::metadata(path).is_ok_and(|meta| meta.len() > LARGEST) {
        fs::rename(path, older(path))?;
    }
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Keeps the log bounded until the answer is dropped.
pub(super) fn bound(path: &Path) -> io::Result<SyncSender<()>> {
    bound_at(path.to_owned(), LARGEST, LOOK)
}

fn bound_at(path: PathBuf, largest: u64, look: Duration) -> io::Result<SyncSender<()>> {
    let (held, dropped) = sync_channel(0);
    thread::Builder::new().name("log".into()).spawn(move || watch(&path, largest, look, &dropped))?;
    Ok(held)
}

fn watch(path: &Path, largest: u64, look: Duration, dropped: &Receiver<()>) {
    let mut said = false;
    while dropped.recv_timeout(look) == Err(RecvTimeoutError::Timeout) {
        if fs::metadata(path).is_ok_and(|meta| meta.len() > largest)
            && let Err(error) = empty(path)
            && !said
        {
            tracing::warn!(path = %path.display(), %error, "cannot bound this log");
            said = true;
        }
    }
}

fn empty(path: &Path) -> io::Result<()> {
    let older = older(path);
    if let Err(error) = fs::copy(path, &older) {
        // Half a copy is worth less than the room it takes.
        return fs::remove_file(&older).and(Err(error));
    }
    OpenOptions::new().write(true).open(path)?.set_len(0)
}

fn older(path: &Path) -> PathBuf {
    let mut older = path.as_os_str().to_owned();
    older.push(".1");
    PathBuf::from(older)
}

/// The end of a log, for an error message.
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
    fn a_running_log_is_emptied_and_appended_to_from_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.log");
        let mut log = open(&path).unwrap();
        let watched = bound_at(path.clone(), 1000, Duration::from_millis(5)).unwrap();
        log.write_all(&[b'a'; 1001]).unwrap();
        let start = Instant::now();
        while fs::metadata(&path).unwrap().len() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "not emptied");
            thread::yield_now();
        }
        assert_eq!(fs::read(older(&path)).unwrap(), [b'a'; 1001]);
        log.write_all(b"after").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"after", "no hole before it");
        drop(watched);
    }

    #[test]
    fn a_log_left_too_large_is_moved_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.log");
        File::create(&path).unwrap().set_len(LARGEST + 1).unwrap();
        assert_eq!(open(&path).unwrap().metadata().unwrap().len(), 0);
        assert_eq!(fs::metadata(older(&path)).unwrap().len(), LARGEST + 1);
    }
}
