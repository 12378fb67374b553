//! The runner's side of a process that opens a repository.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use super::RepositoryProgram;
use super::messages::{CONTINUE, Message, Order, Request};
use crate::workstream::error::{GitError, io_context};
use crate::workstream::size_limits::StopCondition;

/// Variables of the process. libgit2 reads the git configuration below the first two, and opens repositories of the user
/// in the third; the others are needed to start a program that is linked to libraries in other folders, and for logs.
const ENVIRONMENT: [&str; 8] = [
    "HOME",
    "XDG_CONFIG_HOME",
    "SUDO_UID",
    "TZ",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "LLVM_PROFILE_FILE",
    "CFQ_LOG",
];
/// Interval at which the runner checks whether a running process must stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Time in which the process ends by itself after its standard input was closed, before it is killed.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(5);
/// Part of the time limit that the process has to end by itself: with both, the operation ends before the task's lease
/// is lost.
const GRACE_DIVISOR: u32 = 16;
/// Maximum wait for the end of a killed process, which only the kernel can delay.
const KILL_WAIT: Duration = Duration::from_secs(2);
/// Maximum size of all messages of a process, in bytes.
const MAX_REPLY_BYTES: u64 = 8 << 20;
/// Number of lines that the runner sends to a process: the request, and the message to continue.
const MAX_LINES: usize = 2;

/// Runs the program and returns its reply. `on_step` acts on the messages after which the process waits.
///
/// # Errors
/// [`GitError::AccessFailed`] with the error of the process, [`GitError::AccessEnded`] if it ended without a reply,
/// [`GitError::AccessTimeLimit`], and the errors of `stop` and `on_step`.
pub(super) fn run(
    program: &RepositoryProgram,
    request: &Request,
    stop: &StopCondition,
    mut on_step: impl FnMut(u32, Message) -> Result<(), GitError>,
) -> Result<Message, GitError> {
    let path = request.path();
    let operation = || format!("start a process that opens {}", path.display());
    let mut child = io_context(
        operation(),
        Command::new(&program.path)
            .args(&program.args)
            .env_clear()
            .envs(ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn(),
    )?;
    let opened = send(&mut child, request, stop).and_then(|input| Ok((input, receive(&mut child)?)));
    let (input, messages) = match opened {
        Ok(opened) => opened,
        Err(source) => {
            end(&mut child, Duration::ZERO);
            return Err(GitError::Io { operation: operation(), source });
        }
    };
    let stopped = loop {
        let message = match messages.recv_timeout(CHECK_INTERVAL) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => match stop.check(&format!("read {}", path.display())) {
                Ok(()) => continue,
                Err(GitError::TimeLimit { operation, seconds }) => {
                    break request.time_limit(seconds).unwrap_or(GitError::TimeLimit { operation, seconds });
                }
                Err(error) => break error,
            },
            Err(RecvTimeoutError::Disconnected) => {
                let ended = end(&mut child, STOP_GRACE);
                return Err(GitError::AccessEnded { path: path.to_owned(), ended });
            }
        };
        if let Message::Started { has_landlock, has_seccomp } = message {
            warn_about_missing_limits(has_landlock, has_seccomp);
            continue;
        }
        if !message.is_step() {
            end(&mut child, STOP_GRACE);
            return reply(message);
        }
        if let Err(error) = on_step(child.id(), message) {
            break error;
        }
        // A process that has ended closes its standard output, too.
        drop(input.send(CONTINUE.into()));
    };
    // The process stops by itself if it can, and then leaves no partial files.
    drop(input);
    end(&mut child, stop.limit().map_or(STOP_GRACE, |limit| STOP_GRACE.min(limit / GRACE_DIVISOR)));
    Err(stopped)
}

/// Logs once which limits the kernel does not offer.
fn warn_about_missing_limits(has_landlock: bool, has_seccomp: bool) {
    static WARNED: Once = Once::new();
    let missing: Vec<_> = [("Landlock", has_landlock), ("seccomp", has_seccomp)]
        .into_iter()
        .filter_map(|(name, exists)| (!exists).then_some(name))
        .collect();
    if cfg!(target_os = "linux") && !missing.is_empty() {
        let missing = missing.join(" and ");
        WARNED.call_once(|| {
            tracing::warn!(missing, "this kernel does not offer all limits of processes that open repositories");
        });
    }
}

/// Writes the request, then what is sent to the returned channel. The process's standard input stays open as long as the
/// channel does.
fn send(child: &mut Child, request: &Request, stop: &StopCondition) -> std::io::Result<SyncSender<Vec<u8>>> {
    let within_ms = stop.limit().map(|limit| limit.as_millis().try_into().unwrap_or(u64::MAX));
    let mut line = serde_json::to_vec(&Order { within_ms, request: request.clone() })?;
    line.push(b'\n');
    let (sender, lines) = sync_channel::<Vec<u8>>(MAX_LINES);
    drop(sender.send(line));
    let input = child.stdin.take();
    // A thread, because a process that does not read must not block the runner.
    std::thread::Builder::new().name("repository-request".into()).spawn(move || {
        let Some(mut input) = input else { return };
        for line in lines {
            // A process that ended is reported with its exit status.
            if input.write_all(&line).is_err() {
                return;
            }
        }
    })?;
    Ok(sender)
}

/// Receives the messages of the process, until one is invalid or the process closes its standard output.
fn receive(child: &mut Child) -> std::io::Result<Receiver<Message>> {
    let output = child.stdout.take();
    let (sender, messages) = sync_channel(1);
    std::thread::Builder::new().name("repository-reply".into()).spawn(move || {
        let Some(output) = output else { return };
        for line in BufReader::new(output.take(MAX_REPLY_BYTES)).lines() {
            let message = line.and_then(|line| serde_json::from_str(&line).map_err(Into::into));
            match message {
                // The receiver is gone if the process had to stop.
                Ok(message) => drop(sender.send(message)),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the reply of a process that opens a repository");
                    return;
                }
            }
        }
    })?;
    Ok(messages)
}

/// Waits up to `grace` for the end of the process, then kills it. Returns how it ended, as text.
fn end(child: &mut Child, grace: Duration) -> String {
    if let Some(ended) = wait(child, grace) {
        return ended;
    }
    if let Err(error) = child.kill() {
        tracing::warn!(pid = child.id(), %error, "cannot kill a process that opens a repository");
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

/// The reply, or the error in it.
fn reply(message: Message) -> Result<Message, GitError> {
    match message {
        Message::Failed { reason, kind, is_invalid_request, is_transient } => {
            Err(GitError::AccessFailed { reason, kind, is_invalid_request, is_transient })
        }
        message => Ok(message),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::workstream::RepositoryAccess;

    fn shell(script: &str) -> RepositoryProgram {
        RepositoryProgram { path: "/bin/sh".into(), args: vec!["-c".into(), script.into()] }
    }

    fn head(script: &str, stop: &StopCondition) -> Result<String, GitError> {
        RepositoryAccess::new(shell(script)).head(Path::new("/r"), stop)
    }

    #[test]
    fn reply_and_error_of_the_process_are_returned() {
        let stop = StopCondition::default();
        let done =
            r#"read request; case "$request" in *'"repository":"/r"'*) printf '{"type":"done","commit":"c"}';; esac"#;
        assert_eq!(head(done, &stop).unwrap(), "c");
        let failed =
            r#"printf '{"type":"failed","reason":"no","kind":"other","is_invalid_request":true,"is_transient":false}'"#;
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
