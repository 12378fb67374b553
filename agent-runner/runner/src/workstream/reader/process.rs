//! The runner's side of the process that reads a repository.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::{ReadReply, ReadRequest, ReaderProgram, STOP_GRACE};
use crate::workstream::error::{GitError, io_context};
use crate::workstream::size_limits::StopCondition;

/// Interval at which the runner checks whether a running process must stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum wait for the end of a killed process, which only the kernel can delay.
const KILL_WAIT: Duration = Duration::from_secs(2);
/// Maximum size of a reply, in bytes.
const MAX_REPLY_BYTES: u64 = 1 << 20;

/// Runs the program and returns the commit in its reply.
///
/// # Errors
/// [`GitError::ReaderFailed`] with the error of the process, [`GitError::ReaderEnded`] if it ended without a reply, and
/// the errors of `stop`.
pub(super) fn run(program: &ReaderProgram, request: &ReadRequest, stop: &StopCondition) -> Result<String, GitError> {
    let repository = match request {
        ReadRequest::Head { repository } | ReadRequest::Copy { repository, .. } => repository,
    };
    let operation = || format!("start a process that reads {}", repository.display());
    let mut child = io_context(
        operation(),
        Command::new(&program.path).args(&program.args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn(),
    )?;
    let input = send(&mut child, request);
    let reply = receive(&mut child);
    let (input, reply) = match (input, reply) {
        (Ok(input), Ok(reply)) => (input, reply),
        (Err(source), _) | (_, Err(source)) => {
            end(&mut child, Duration::ZERO);
            return Err(GitError::Io { operation: operation(), source });
        }
    };
    let text = loop {
        match reply.recv_timeout(CHECK_INTERVAL) {
            Ok(text) => break text,
            Err(RecvTimeoutError::Disconnected) => break String::new(),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = stop.check(&format!("read {}", repository.display())) {
                    // The process stops by itself if it can, and then leaves no partial files.
                    drop(input);
                    end(&mut child, STOP_GRACE);
                    return Err(error);
                }
            }
        }
    };
    let ended = end(&mut child, STOP_GRACE);
    drop(input);
    interpret(&text, repository, &ended)
}

/// Writes the request; the returned pipe stays open as long as the reply is wanted.
fn send(child: &mut Child, request: &ReadRequest) -> std::io::Result<Option<ChildStdin>> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let mut input = child.stdin.take();
    if let Some(input) = &mut input {
        match input.write_all(&line) {
            // A process that ended at once is reported with its exit status.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            written => written?,
        }
    }
    Ok(input)
}

/// Receives everything that the process writes, once it closes its standard output.
fn receive(child: &mut Child) -> std::io::Result<Receiver<String>> {
    let output = child.stdout.take();
    let (sender, reply) = sync_channel(1);
    std::thread::Builder::new().name("reader".into()).spawn(move || {
        let mut bytes = Vec::new();
        let read = output.map(|output| output.take(MAX_REPLY_BYTES).read_to_end(&mut bytes));
        if let Some(Err(error)) = read {
            tracing::warn!(%error, "cannot read the reply of a process that reads a repository");
        }
        // The receiver is gone if the process had to stop.
        drop(sender.send(String::from_utf8_lossy(&bytes).into_owned()));
    })?;
    Ok(reply)
}

/// Waits up to `grace` for the end of the process, then kills it. Returns how it ended, as text.
fn end(child: &mut Child, grace: Duration) -> String {
    if let Some(ended) = wait(child, grace) {
        return ended;
    }
    if let Err(error) = child.kill() {
        tracing::warn!(pid = child.id(), %error, "cannot kill a process that reads a repository");
    }
    wait(child, KILL_WAIT).unwrap_or_else(|| "no end after SIGKILL".to_owned())
}

fn wait(child: &mut Child, within: Duration) -> Option<String> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.to_string()),
            Err(error) => return Some(error.to_string()),
            Ok(None) if start.elapsed() >= within => return None,
            Ok(None) => std::thread::sleep(CHECK_INTERVAL.min(within)),
        }
    }
}

fn interpret(text: &str, repository: &Path, ended: &str) -> Result<String, GitError> {
    match serde_json::from_str(text) {
        Ok(ReadReply::Done { commit }) => Ok(commit),
        Ok(ReadReply::Failed { reason, is_invalid_request, is_transient }) => {
            Err(GitError::ReaderFailed { reason, is_invalid_request, is_transient })
        }
        Err(_) => Err(GitError::ReaderEnded { path: repository.to_owned(), ended: ended.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ReaderProgram {
        ReaderProgram { path: "/bin/sh".into(), args: vec!["-c".into(), script.into()] }
    }

    fn head(script: &str, stop: &StopCondition) -> Result<String, GitError> {
        run(&shell(script), &ReadRequest::Head { repository: "/r".into() }, stop)
    }

    #[test]
    fn reply_and_error_of_the_process_are_returned() {
        let stop = StopCondition::default();
        let done =
            r#"read request; case "$request" in *'"repository":"/r"'*) printf '{"type":"done","commit":"c"}';; esac"#;
        assert_eq!(head(done, &stop).unwrap(), "c");
        let failed = r#"printf '{"type":"failed","reason":"no","is_invalid_request":true,"is_transient":false}'"#;
        let error = head(failed, &stop).unwrap_err();
        assert!(error.to_string() == "no" && error.is_invalid_request() && !error.is_transient(), "{error}");
        let error = head("kill -SEGV $$", &stop).unwrap_err();
        assert!(error.is_transient() && error.to_string().contains("signal: 11"), "{error}");
        assert!(head("exit 3", &stop).unwrap_err().to_string().contains("exit status: 3"));
    }

    #[test]
    fn process_that_does_not_end_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 1000 < /dev/null", pid.display());
        let (stop, _guard) = StopCondition::after(Duration::from_millis(300));
        assert!(matches!(head(&script, &stop), Err(GitError::TimeLimit { .. })));
        let pid: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        assert_eq!(cfq_link::child::ProcessIdentity::of(pid), None, "the process still runs");
    }

    #[test]
    fn closed_standard_input_stops_the_process_without_a_kill() {
        let folder = tempfile::tempdir().unwrap();
        let stopped = folder.path().join("stopped");
        let script = format!("read request; read rest; : > {}", stopped.display());
        let (stop, guard) = StopCondition::after(Duration::from_secs(3600));
        drop(guard);
        assert!(matches!(head(&script, &stop), Err(GitError::Cancelled { .. })));
        assert!(stopped.exists());
    }
}
