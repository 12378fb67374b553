//! A pseudo-terminal for a command, and an emulator that computes what it shows.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::wait;

/// Rows of the emulated screen: more than any command here prints, so that none scrolls off it.
const MAX_ROWS: u16 = 1_000;

/// A command on its own pseudo-terminal.
pub struct Terminal {
    child: Child,
    keys: File,
    output: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
    columns: u16,
}

impl Terminal {
    /// Starts the command with this terminal as stdin, stdout, stderr and controlling terminal.
    pub fn run(mut command: Command, columns: u16) -> Self {
        let (master, slave) = pty(columns);
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        command.env("TERM", "xterm").stdin(stdio()).stdout(stdio()).stderr(stdio());
        // SAFETY: system calls only, on the child's own stdin.
        #[allow(unsafe_code)]
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The output ends for the reader only when all copies of the slave end are closed, those in `command` too.
        drop((command, slave));
        let keys = File::from(master);
        let mut from = keys.try_clone().unwrap();
        let output = Arc::new(Mutex::new(Vec::new()));
        let to = output.clone();
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Linux returns EIO after the last copy of the slave end is closed.
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                to.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        Self { child, keys, output, reader, columns }
    }

    pub fn send_keys(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// The bytes that the command has written so far, and writes later.
    pub fn output(&self) -> Arc<Mutex<Vec<u8>>> {
        self.output.clone()
    }

    /// All rows, as they look now, without empty ones at the end.
    pub fn rows(&self) -> Vec<String> {
        rows(&self.output.lock().unwrap(), self.columns)
    }

    /// Waits until a row contains the text.
    pub async fn wait_for_text(&self, what: &str, limit: Duration) {
        wait::until(&format!("{what:?} on the terminal"), limit, || async {
            let rows = self.rows();
            if rows.iter().any(|row| row.contains(what)) { Ok(()) } else { Err(rows.join("\n")) }
        })
        .await;
    }

    /// Waits until the command ends; returns its exit code and all rows, like [`Self::rows`].
    pub async fn wait_for_exit(mut self, limit: Duration) -> (Option<i32>, Vec<String>) {
        let child = Mutex::new(&mut self.child);
        let status = wait::until("the command to end", limit, || async {
            child.lock().unwrap().try_wait().unwrap().ok_or_else(|| "still running".to_owned())
        })
        .await;
        self.reader.join().unwrap();
        let bytes = self.output.lock().unwrap().clone();
        (status.code(), rows(&bytes, self.columns))
    }
}

fn pty(columns: u16) -> (OwnedFd, OwnedFd) {
    let (mut master, mut slave) = (-1, -1);
    let size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the pointers are to live values of the types asked for; the descriptors are new and have no other owner.
    #[allow(unsafe_code)]
    unsafe {
        let done = libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), &size);
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        for end in [master, slave] {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
        }
        (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
    }
}

fn rows(bytes: &[u8], columns: u16) -> Vec<String> {
    let mut emulator = vt100::Parser::new(MAX_ROWS, columns, 0);
    emulator.process(bytes);
    let mut rows: Vec<String> = emulator.screen().rows(0, columns).collect();
    while rows.last().is_some_and(|row| row.trim().is_empty()) {
        rows.pop();
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_like_a_terminal() {
        assert_eq!(rows(b"one\r\ntwo\r\x1b[2K\x1b[1A\r\x1b[2Kthree\r\nabcdefgh", 5), ["three", "abcde", "fgh"]);
    }
}
