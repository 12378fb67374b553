//! A pseudo-terminal for a command, and a minimal terminal emulator that computes what the screen shows. An unknown
//! control sequence fails the test, so that a new one (such as hiding the cursor) is noticed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::wait;

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

    /// All rows, as they look now: those on the screen and those that have scrolled off it.
    pub fn rows(&self) -> Vec<String> {
        // The last UTF-8 character may be incomplete.
        rows(&String::from_utf8_lossy(&self.output.lock().unwrap()), usize::from(self.columns))
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
        let bytes = std::mem::take(&mut *self.output.lock().unwrap());
        (status.code(), rows(std::str::from_utf8(&bytes).unwrap(), usize::from(self.columns)))
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

fn rows(text: &str, columns: usize) -> Vec<String> {
    let mut rows: Vec<Vec<char>> = vec![Vec::new()];
    let (mut row, mut column) = (0_usize, 0_usize);
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            '\r' => column = 0,
            '\n' => row += 1,
            '\x1b' => {
                let Some('[') = characters.next() else { continue };
                let mut number = String::new();
                let verb = loop {
                    match characters.next() {
                        Some(c) if c.is_ascii_alphabetic() => break c,
                        Some(c) => number.push(c),
                        // The control sequence is still incomplete.
                        None => return finish(rows),
                    }
                };
                let n: usize = number.parse().unwrap_or_else(|_| panic!("unknown control sequence {number:?}{verb:?}"));
                match verb {
                    'A' => row = row.checked_sub(n).expect("the cursor stays below the first row"),
                    'B' => row += n,
                    'K' if n == 2 => rows[row].clear(),
                    other => panic!("unknown control sequence {n}{other:?}"),
                }
            }
            c => {
                if column == columns {
                    (row, column) = (row + 1, 0);
                }
                if rows.len() <= row {
                    rows.resize(row + 1, Vec::new());
                }
                if rows[row].len() <= column {
                    rows[row].resize(column + 1, ' ');
                }
                rows[row][column] = c;
                column += 1;
            }
        }
        if rows.len() <= row {
            rows.resize(row + 1, Vec::new());
        }
    }
    finish(rows)
}

fn finish(rows: Vec<Vec<char>>) -> Vec<String> {
    let mut rows: Vec<String> = rows.into_iter().map(|row| row.into_iter().collect::<String>()).collect();
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
        assert_eq!(rows("one\r\ntwo\r\x1b[2K\x1b[1A\r\x1b[2Kthree\r\nabcdefgh", 5), ["three", "abcde", "fgh"]);
    }
}
