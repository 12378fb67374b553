//! Sends signals to processes that a test started, and finds their children.

use cfq_link::child::ProcessIdentity;

/// Sends a signal. A process that has already ended is not an error.
pub fn send(pid: u32, signal: i32) {
    // SAFETY: a plain system call on a process this harness started.
    #[allow(unsafe_code)]
    let sent = unsafe { libc::kill(pid as i32, signal) };
    let error = std::io::Error::last_os_error();
    assert!(sent == 0 || error.raw_os_error() == Some(libc::ESRCH), "signal {signal} to {pid}: {error}");
}

/// The running children of a process.
pub fn children_of(pid: u32) -> Vec<ProcessIdentity> {
    let parent = |stat: &str| stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse::<u32>().ok();
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok())
        .filter(|child| std::fs::read_to_string(format!("/proc/{child}/stat")).is_ok_and(|s| parent(&s) == Some(pid)))
        .filter_map(ProcessIdentity::of)
        .collect()
}
