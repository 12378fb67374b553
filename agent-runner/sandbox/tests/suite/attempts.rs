//! What a hostile program tries. Each attempt runs in this test program, started again in a sandbox; it prints `succeeded`,
//! or `refused` with the system's error.

#![allow(unsafe_code, reason = "attempts make system calls that no safe interface offers")]

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::{fs, thread};

use libc::{c_int, c_long};

use crate::fixture::ATTEMPT;

/// Makes the attempt that the environment names. Not a test otherwise.
#[test]
fn attempt() {
    let Ok(attempt) = std::env::var(ATTEMPT) else { return };
    let (name, argument) = attempt.split_once(' ').unwrap_or((&attempt, ""));
    match make(name, argument) {
        Ok(()) => println!("succeeded"),
        Err(error) => println!("refused {}", error.raw_os_error().unwrap_or_default()),
    }
}

fn make(name: &str, argument: &str) -> io::Result<()> {
    let process = || argument.parse::<c_long>().unwrap();
    match name {
        "read" => fs::read(argument).map(drop),
        "list" => fs::read_dir(argument).map(drop),
        "write" => fs::write(argument, "changed"),
        "append" => fs::OpenOptions::new().append(true).open(argument).map(drop),
        "remove" => fs::remove_file(argument),
        "link" => {
            std::os::unix::fs::symlink(argument, "link")?;
            fs::read("link").map(drop)
        }
        "hard-link" => fs::hard_link(argument, "hard-link"),
        "chmod" => fs::set_permissions(argument, fs::Permissions::from_mode(0o777)),
        "abstract" => UnixStream::connect_addr(&SocketAddr::from_abstract_name(argument)?).map(drop),
        "unix" => UnixStream::connect(argument).map(drop),
        "tcp" => std::net::TcpStream::connect(argument).map(drop),
        "udp" => std::net::UdpSocket::bind("0.0.0.0:0").and_then(|s| s.send_to(b"x", argument)).map(drop),
        "raw-socket" => call(libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_RAW.into(), 1, 0]),
        "datagram" => {
            std::os::unix::net::UnixDatagram::pair().and_then(|(one, _)| one.send_to(b"x", argument)).map(drop)
        }
        "multipath-tcp" => call(libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 262, 0]),
        "other-pair" => call(libc::SYS_socketpair, [libc::AF_TIPC.into(), libc::SOCK_STREAM.into(), 0, 0]),
        "exchange-of-content" => call(libc::SYS_ioctl, [0, 0xc028_660f, 0, 0]),
        "exchange-of-content-on-xfs" => call(libc::SYS_ioctl, [0, 0xc0c0_586d, 0, 0]),
        "attributes" => call(libc::SYS_ioctl, [0, 0x4008_6602, 0, 0]),
        "btrfs" => call(libc::SYS_ioctl, [0, 0x5000_940e, 0, 0]),
        "mode-of-open-file" => {
            fs::File::open(argument).and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o4777)))
        }
        "priority-of-user" => call(libc::SYS_setpriority, [libc::PRIO_USER.into(), 0, 19, 0]),
        "semaphore" => call(libc::SYS_semctl, [0, 0, libc::IPC_RMID.into(), 0]),
        "shared-memory-by-id" => call(libc::SYS_shmctl, [0, libc::IPC_RMID.into(), 0, 0]),
        "hide" => hide(),
        "packet-socket" => call(libc::SYS_socket, [libc::AF_PACKET.into(), libc::SOCK_DGRAM.into(), 0, 0]),
        "vsock" => call(libc::SYS_socket, [libc::AF_VSOCK.into(), libc::SOCK_STREAM.into(), 0, 0]),
        "netfilter" => {
            call(libc::SYS_socket, [libc::AF_NETLINK.into(), libc::SOCK_RAW.into(), libc::NETLINK_NETFILTER.into(), 0])
        }
        "signal" => call(libc::SYS_kill, [process(), libc::SIGTERM.into(), 0, 0]),
        "priority" => call(libc::SYS_setpriority, [libc::PRIO_PROCESS.into(), process(), 15, 0]),
        "limits" => limits_of(process()),
        "processors" => processors_of(process()),
        "trace" => call(libc::SYS_ptrace, [libc::PTRACE_TRACEME.into(), 0, 0, 0]),
        "attach" => call(libc::SYS_ptrace, [libc::PTRACE_SEIZE.into(), process(), 0, 0]),
        "keyring" => call(libc::SYS_keyctl, [0, -4, 1, 0]),
        "clock" => call(libc::SYS_clock_settime, [libc::CLOCK_REALTIME.into(), 0, 0, 0]),
        "device" => {
            // SAFETY: the path is a C string.
            let result = unsafe { libc::mknod(c"device".as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(8, 0)) };
            check(result.into())
        }
        "privileges" => match unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EPERM)),
        },
        "user-namespace" => call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0]),
        "clone-namespace" => clone_in_namespace(),
        "clone3" => call(libc::SYS_clone3, [0, 0, 0, 0]),
        "mount" => call(libc::SYS_mount, [0, 0, 0, 0]),
        "type-into-terminal" => {
            call(libc::SYS_ioctl, [0, c_long::try_from(libc::TIOCSTI).unwrap(), c"x".as_ptr() as c_long, 0])
        }
        "io-uring" => call(libc::SYS_io_uring_setup, [1, 0, 0, 0]),
        "memory-file" => call(libc::SYS_memfd_create, [c"x".as_ptr() as c_long, 0, 0, 0]),
        "shared-memory" => call(libc::SYS_shmget, [0, 4096, (libc::IPC_CREAT | 0o600).into(), 0]),
        "page-faults" => call(libc::SYS_userfaultfd, [1, 0, 0, 0]),
        "bpf" => call(libc::SYS_bpf, [0, 0, 0, 0]),
        "x32" => call(0x4000_0000 | libc::SYS_getpid, [0; 4]),
        "new-call" => call(1000, [0; 4]),
        "allocate" => {
            allocate(10 << 30, libc::MAP_PRIVATE)?;
            Ok(())
        }
        "allocate-shared" => allocate(10 << 30, libc::MAP_SHARED),
        "allocate-in-many" => allocate_in_many(),
        "fill" => fill(argument),
        "fill-unlinked" => fill_unlinked(),
        "create-files" => (0..100_000).try_for_each(|n| fs::File::create(format!("file{n}")).map(drop)),
        "nest-folders" => nest_folders(),
        "allocate-unseen" => allocate_unseen(),
        "threads" => start_threads(),
        "listen" => listen(),
        other => panic!("unknown attempt: {other}"),
    }
}

fn check(result: c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn call(number: c_long, [a, b, c, d]: [c_long; 4]) -> io::Result<()> {
    // SAFETY: the callers pass numbers, null pointers and C strings.
    check(unsafe { libc::syscall(number, a, b, c, d, 0 as c_long, 0 as c_long) })
}

fn limits_of(process: c_long) -> io::Result<()> {
    let limits = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    call(libc::SYS_prlimit64, [process, libc::RLIMIT_CORE.into(), &raw const limits as c_long, 0])
}

fn processors_of(process: c_long) -> io::Result<()> {
    let set = [1u64; 16];
    call(libc::SYS_sched_setaffinity, [process, size_of_val(&set) as c_long, set.as_ptr() as c_long, 0])
}

fn clone_in_namespace() -> io::Result<()> {
    // SAFETY: as fork(2): without a stack the child continues on a copy of this one, and ends at once.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_NEWUSER | libc::SIGCHLD, 0, 0, 0, 0) };
    if child == 0 {
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) }
    }
    check(child)
}

/// Allocates and touches memory.
fn allocate(bytes: usize, kind: c_int) -> io::Result<()> {
    const STEP: usize = 16 << 20;
    for _ in 0..bytes / STEP {
        // SAFETY: a new mapping, which is written within its length.
        unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let memory = libc::mmap(std::ptr::null_mut(), STEP, protection, kind | libc::MAP_ANONYMOUS, -1, 0);
            if memory == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            memory.cast::<u8>().write_bytes(1, STEP);
        }
    }
    Ok(())
}

/// Allocates memory in several processes, of which each stays below the limit.
fn allocate_in_many() -> io::Result<()> {
    for _ in 0..8 {
        // SAFETY: the child only allocates and waits.
        if unsafe { libc::fork() } == 0 {
            drop(allocate(96 << 20, libc::MAP_PRIVATE));
            thread::sleep(std::time::Duration::from_secs(60));
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) }
        }
    }
    thread::sleep(std::time::Duration::from_secs(60));
    Ok(())
}

/// Writes files of 1 MiB to a folder.
fn fill(folder: &str) -> io::Result<()> {
    let block = vec![1; 1 << 20];
    (0..10_000).try_for_each(|n| fs::write(format!("{folder}/block{n}"), &block))
}

/// Writes files of 1 MiB that have no name.
fn fill_unlinked() -> io::Result<()> {
    let block = vec![1; 1 << 20];
    let mut files = Vec::new();
    for n in 0..500 {
        let mut file = fs::File::create("unlinked")?;
        fs::remove_file("unlinked")?;
        io::Write::write_all(&mut file, &block)?;
        files.push((n, file));
    }
    thread::sleep(std::time::Duration::from_secs(60));
    Ok(())
}

fn nest_folders() -> io::Result<()> {
    loop {
        fs::create_dir("deeper")?;
        std::env::set_current_dir("deeper")?;
    }
}

/// Waits with a name that is not UTF-8, not ended by the end of its parent, and leaves a second process behind.
fn hide() -> io::Result<()> {
    // SAFETY: the name is a C string; the child only waits.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"\xff".as_ptr());
        libc::prctl(libc::PR_SET_PDEATHSIG, 0);
        if libc::fork() == 0 {
            libc::setsid();
        }
    }
    thread::sleep(std::time::Duration::from_secs(600));
    Ok(())
}

/// Allocates memory in a process whose name is not UTF-8 and whose first thread has ended.
fn allocate_unseen() -> io::Result<()> {
    // SAFETY: the child only allocates and waits, in a second thread.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: the name is a C string.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"\xff".as_ptr()) };
        drop(thread::spawn(|| {
            drop(allocate(2 << 30, libc::MAP_SHARED));
            thread::sleep(std::time::Duration::from_secs(60));
        }));
        // SAFETY: ends this thread only.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    thread::sleep(std::time::Duration::from_secs(60));
    Ok(())
}

fn start_threads() -> io::Result<()> {
    let sleep = || thread::sleep(std::time::Duration::from_secs(60));
    (0..1000).try_for_each(|_| thread::Builder::new().stack_size(64 << 10).spawn(sleep).map(drop))
}

/// Connects to a server of its own.
fn listen() -> io::Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    std::net::TcpStream::connect(listener.local_addr()?).map(drop)
}
