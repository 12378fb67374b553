//! Starts cfq in the background (`-d`).

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use cfq_deploy::Paths;
use cfq_link::stop::Signals;

use crate::exit::{self, Code};
use crate::output;

/// Maximum size of the part of the log that is searched for warnings of a start, in bytes.
const MAX_LOG_BYTES: u64 = 1 << 20;
/// Maximum size of the end of the log in an error message, in bytes.
const MAX_TAIL_BYTES: u64 = 2_000;
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// A process in the background that is starting.
pub struct Background {
    child: Child,
    log: PathBuf,
    /// Length of the log before the start, in bytes.
    log_start: u64,
}

/// How the start of a process in the background ended.
pub enum Started<T> {
    Ready(T),
    /// A signal ended the wait. The process continues to start.
    Interrupted,
}

/// A command that runs this program with the same folders and configuration.
pub fn own_command(paths: &Paths, file: Option<&Path>) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot determine the path of the cfq binary")?);
    command.arg("--data").arg(&paths.data);
    if let Some(file) = file {
        command.arg("--config").arg(std::path::absolute(file)?);
    }
    Ok(command)
}

/// Starts the command in the background, with its output in the log `name`. The folders must exist.
pub fn start(paths: &Paths, name: &str, mut command: Command) -> anyhow::Result<Background> {
    let path = paths.log(name);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let log_start = log.metadata().map_or(0, |metadata| metadata.len());
    // In a separate process group, so that Ctrl-C does not reach the background process.
    let child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start cfq in the background")?;
    Ok(Background { child, log: path, log_start })
}

impl Background {
    /// Waits until `ready` returns a value for the process id, and prints the warnings of the start. Fails if the process
    /// exits before.
    pub async fn wait<T>(
        mut self,
        signals: &mut Signals,
        ready: impl Fn(u32) -> Option<T>,
    ) -> anyhow::Result<Started<T>> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                let written = std::fs::metadata(&self.log).map_or(0, |log| log.len()).saturating_sub(self.log_start);
                let tail = cfq_link::child::log_tail(&self.log, written.min(MAX_TAIL_BYTES));
                let code = if status.code() == Some(2) { Code::Usage } else { Code::Failed };
                let message = format!("cfq did not start:\n{}", tail.trim_end());
                return Err(exit::CodedError { code, message }.into());
            }
            if let Some(value) = ready(self.child.id()) {
                for warning in logged_warnings(&self.log, self.log_start) {
                    output::print_stderr(&output::sanitize(&warning));
                }
                return Ok(Started::Ready(value));
            }
            tokio::select! {
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                _ = signals.next() => return Ok(Started::Interrupted),
            }
        }
    }
}

/// Warnings that the background process has written to its log since it was `start` bytes long.
fn logged_warnings(log: &Path, start: u64) -> Vec<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        file.seek(SeekFrom::Start(start))?;
        let mut text = Vec::new();
        file.take(MAX_LOG_BYTES).read_to_end(&mut text)?;
        Ok(text)
    };
    // The log itself keeps what cannot be read here.
    let text = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter(|line| line.starts_with("cfq: warning:")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_this_start_are_read_from_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("up.log");
        let earlier = "cfq: warning: of an earlier start\n";
        std::fs::write(&log, format!("{earlier}starting\ncfq: warning: without TLS\ncfq is ready\n")).unwrap();
        assert_eq!(logged_warnings(&log, earlier.len() as u64), ["cfq: warning: without TLS"]);
        assert_eq!(logged_warnings(&folder.path().join("none"), 0), Vec::<String>::new());
    }
}
