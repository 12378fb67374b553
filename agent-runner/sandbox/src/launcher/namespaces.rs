//! Namespaces for users, processes, mounts, network, System V IPC, host name and cgroups.
//!
//! The user namespace gives the launcher the capabilities that it needs to set up the others. The program loses them
//! when it is executed, because its user id is not zero there.

use std::fs;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, waitpid};

use super::{Connection, file_system, measure, program, supervise, system_calls};
use crate::SandboxLevel;
use crate::protocol::{FailedStep, LISTENER, LaunchReply, LaunchRequest};

/// User and group of the program inside of the sandbox.
pub(super) const USER: u32 = 1000;
/// Host name inside of the sandbox.
const HOST_NAME: &[u8] = b"sandbox";

const NAMESPACES: libc::c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Runs the request in new namespaces. Returns `None` if the second process has replied.
pub(super) fn launch(request: &LaunchRequest, connection: &mut Connection) -> Result<Option<LaunchReply>, FailedStep> {
    end_with_parent()?;
    create_namespaces()?;
    let step = |error| FailedStep::new("start the first process of the sandbox", error);
    let (mut of_first, mut of_second) = UnixStream::pair().map_err(step)?;
    // SAFETY: this process has one thread, so the child may use everything that the parent could.
    #[allow(unsafe_code)]
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(step(io::Error::last_os_error())),
        0 => {
            drop(of_first);
            let code = i32::from(serve_as_first_process(request, connection, &mut of_second).is_err());
            std::process::exit(code)
        }
        child => {
            drop(of_second);
            // The second process waits until it ends with this one.
            let started = of_first.read_exact(&mut [0]).and_then(|()| of_first.write_all(b"\n"));
            started.map_err(step)?;
            let child = Pid::from_raw(child).ok_or_else(|| step(io::ErrorKind::InvalidData.into()))?;
            while matches!(waitpid(Some(child), WaitOptions::empty()), Err(rustix::io::Errno::INTR)) {}
            Ok(None)
        }
    }
}

fn end_with_parent() -> Result<(), FailedStep> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| FailedStep::new("end the sandbox with its caller", error))
}

fn create_namespaces() -> Result<(), FailedStep> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // SAFETY: this process has one thread and opened no file that depends on a namespace.
    #[allow(unsafe_code)]
    if unsafe { libc::unshare(NAMESPACES) } == -1 {
        return Err(FailedStep::new("create namespaces", io::Error::last_os_error()));
    }
    let map = |path: &str, text: String| {
        fs::write(path, text).map_err(|error| FailedStep::new(format!("write {path}"), error))
    };
    // Without it, the kernel refuses the map of groups.
    map("/proc/self/setgroups", "deny".to_owned())?;
    map("/proc/self/uid_map", format!("{USER} {uid} 1"))?;
    map("/proc/self/gid_map", format!("{USER} {gid} 1"))
}

fn serve_as_first_process(
    request: &LaunchRequest,
    connection: &mut Connection,
    first: &mut UnixStream,
) -> io::Result<()> {
    let reply = match end_with_parent() {
        Ok(()) => {
            // The answer arrives only if the first process was alive after this process had set its parent-death
            // signal.
            first.write_all(b"\n")?;
            first.read_exact(&mut [0])?;
            run(request, connection)
        }
        Err(step) => Err(step),
    };
    connection.reply(&reply.unwrap_or_else(LaunchReply::NoSandbox))
}

fn run(request: &LaunchRequest, connection: &Connection) -> Result<LaunchReply, FailedStep> {
    let command = &request.command;
    let folders = program::Folders::create(command, true)?;
    // Also this process: its end ends all others.
    program::end_first();
    // Other processes of the sandbox have the same user id: they may neither trace this one nor read its memory.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(|error| FailedStep::new("protect the launcher from the program", error))?;
    rustix::system::sethostname(HOST_NAME).map_err(|error| FailedStep::new("set the host name", error))?;
    start_loopback()?;
    if let Some(port) = command.listener_port {
        listen(port, connection)?;
    }
    file_system::build(command, &folders)?;
    let filters = system_calls::filters(SandboxLevel::Namespaces)?;
    let restrictions = program::Restrictions { filters, files: None, other_tasks: 0, ends_with_launcher: false };
    if request.probe {
        return restrictions.probe();
    }
    let program = program::prepare(command, &folders, restrictions);
    Ok(supervise::supervise(program, command, measure::Scope::Namespace, connection))
}

/// Listens on a port of the loopback interface, and gives the socket to the caller.
fn listen(port: u16, connection: &Connection) -> Result<(), FailedStep> {
    let step = |error| FailedStep::new(format!("listen on port {port} of the sandbox"), error);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(step)?;
    let sockets = [listener.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
    let bytes = [IoSlice::new(&[LISTENER])];
    let sent = sendmsg(&connection.stream, &bytes, &mut ancillary, SendFlags::empty());
    sent.map(drop).map_err(|error| step(error.into()))
}

/// Starts the loopback interface, so that tests may talk to servers of their own.
fn start_loopback() -> Result<(), FailedStep> {
    let step = |error| FailedStep::new("start the loopback interface", error);
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
        .map_err(|error| step(io::Error::from(error)))?;
    // SAFETY: the structure is valid if it is zero; the kernel reads the name and the flags.
    #[allow(unsafe_code)]
    let result = unsafe {
        let mut interface: libc::ifreq = std::mem::zeroed();
        for (to, from) in interface.ifr_name.iter_mut().zip(b"lo") {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        interface.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&socket), libc::SIOCSIFFLAGS, &raw const interface)
    };
    if result == -1 { Err(step(io::Error::last_os_error())) } else { Ok(()) }
}
