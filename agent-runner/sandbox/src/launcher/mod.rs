//! The launcher: sets up the sandbox, starts the program in it, enforces the limits, and replies with the result.
//!
//! With namespaces it consists of two processes. The first one creates the namespaces and waits. The second one is the
//! first process of the new process namespace: it builds the file system, starts the program and supervises it. When it
//! ends, the kernel kills all processes of the namespace. With Landlock, one process does all this.

mod disk_usage;
mod file_access;
mod file_system;
mod measure;
mod namespaces;
mod program;
mod supervise;
mod system_calls;
mod system_files;

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::SandboxLevel;
use crate::protocol::{FailedStep, LaunchReply, LaunchRequest};

/// Connection to the caller.
pub(crate) struct Connection {
    stream: UnixStream,
    /// True if the caller sent more than the request: it asks to kill the program.
    is_stopped: bool,
}

impl Connection {
    fn reply(&mut self, reply: &LaunchReply) -> io::Result<()> {
        let mut line = serde_json::to_vec(reply)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }
}

/// Serves one request on stdin. A launcher calls this before it opens any file or starts a thread.
///
/// # Errors
/// If there is no request on stdin, or the caller does not take the reply.
pub fn serve() -> io::Result<()> {
    // SAFETY: this process has opened no file but stdin, stdout and stderr, so no owner loses its descriptor.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
    }
    let stdin: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let mut reader = BufReader::new(UnixStream::from(stdin));
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line)?;
    let request: LaunchRequest = serde_json::from_slice(&line)?;
    let is_stopped = !reader.buffer().is_empty();
    let mut connection = Connection { stream: reader.into_inner(), is_stopped };
    let is_root = rustix::process::geteuid().is_root();
    let result = match request.level {
        _ if is_root => Err(FailedStep::new("run a program as root", rustix::io::Errno::PERM)),
        SandboxLevel::Namespaces => namespaces::launch(&request, &mut connection),
        SandboxLevel::Landlock => launch_with_landlock(&request, &connection).map(Some),
    };
    match result {
        Ok(Some(reply)) => connection.reply(&reply),
        // The second process has replied.
        Ok(None) => Ok(()),
        Err(step) => connection.reply(&LaunchReply::NoSandbox(step)),
    }
}

fn launch_with_landlock(request: &LaunchRequest, connection: &Connection) -> Result<LaunchReply, FailedStep> {
    let command = &request.command;
    let folders = program::Folders::create(command, false)?;
    let files = file_access::rules(command)?;
    let filters = system_calls::filters(SandboxLevel::Landlock)?;
    // Processes whose parent has ended become children of this process, so that it finds them.
    rustix::process::set_child_subreaper(rustix::process::getpid().into())
        .map_err(|error| FailedStep::new("become the parent of orphaned processes", error))?;
    file_access::limit_signals()?;
    let tasks_of_user = measure::tasks_of_user();
    let restrictions =
        program::Restrictions { filters, files: Some(files), other_tasks: tasks_of_user, ends_with_launcher: true };
    if request.probe {
        return restrictions.probe();
    }
    let program = program::prepare(command, &folders, restrictions);
    Ok(supervise::supervise(program, command, measure::Scope::Descendants, connection))
}
