//! Memory, number and end of the processes that a program started, read from `/proc`.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Signal, WaitOptions, wait};

use super::disk_usage::BLOCK_BYTES;

/// Rounds after which the end of processes is no longer waited for: a process that the kernel cannot end.
const MAX_KILL_ROUNDS: u32 = 500;

/// Which processes belong to a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// All of the process namespace except its first one, which is this process.
    Namespace,
    /// All descendants of this process, which has forbidden itself to signal other processes
    /// (`file_access::limit_signals`).
    Descendants,
}

/// What the processes of a program use now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Measured {
    /// Memory in bytes, without pages of files. Memory that processes share may count several times.
    pub(super) memory_bytes: u64,
    /// Processes and threads.
    pub(super) tasks: u64,
}

/// The part of `/proc/PID/status` that is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Status {
    parent: u32,
    tasks: u64,
    memory_bytes: u64,
    uid: u32,
}

impl Scope {
    pub(super) fn measure(self) -> Measured {
        self.statuses().fold(Measured::default(), |sum, (_, status)| Measured {
            memory_bytes: sum.memory_bytes + status.memory_bytes,
            tasks: sum.tasks + status.tasks,
        })
    }

    /// Memory in bytes, in which memory that processes share counts once. Slower than [`Scope::measure`].
    pub(super) fn exact_memory_bytes(self) -> u64 {
        let bytes = self.statuses().map(|(process, status)| {
            let path = folder(process).join("smaps_rollup");
            read_lossy(&path).and_then(|text| proportional_bytes(&text)).unwrap_or(status.memory_bytes)
        });
        bytes.sum()
    }

    /// Size of the files that processes have open and that have no name any more, in bytes.
    pub(super) fn unlinked_bytes(self) -> u64 {
        let descriptors = self.statuses().filter_map(|(process, _)| fs::read_dir(folder(process).join("fd")).ok());
        let files = descriptors.flatten().flatten().filter_map(|entry| fs::metadata(entry.path()).ok());
        let unlinked = files.filter(|file| file.is_file() && file.nlink() == 0);
        let sizes: HashMap<(u64, u64), u64> =
            unlinked.map(|file| ((file.dev(), file.ino()), file.blocks() * BLOCK_BYTES)).collect();
        sizes.into_values().sum()
    }

    /// Kills all processes and waits until they have ended.
    pub(super) fn kill_all(self) {
        for _ in 0..MAX_KILL_ROUNDS {
            // A stopped process starts no other one, so none escapes between the two signals.
            for signal in [Signal::STOP, Signal::KILL] {
                self.signal_all(signal);
            }
            if Self::reap() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    pub(super) fn signal_all(self, signal: Signal) {
        // In another namespace, the signal would reach all processes of the user.
        if self == Self::Namespace && std::process::id() != 1 {
            return;
        }
        // The kernel signals all processes of the namespace but its first one; or all processes that Landlock permits this
        // one to signal, which are the program's.
        // SAFETY: the call only sends a signal.
        #[allow(unsafe_code)]
        unsafe {
            libc::kill(-1, signal.as_raw());
        }
    }

    /// Waits for the children that have ended. True if there are no others.
    fn reap() -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    fn statuses(self) -> impl Iterator<Item = (u32, Status)> {
        let own = std::process::id();
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let all = all.filter(move |process| *process != own);
        let all: HashMap<u32, Status> = all.filter_map(|process| Some((process, status_of(process)?))).collect();
        let of_scope = match self {
            Self::Namespace => all,
            Self::Descendants => descendants(own, &all),
        };
        of_scope.into_iter()
    }
}

/// Number of processes and threads of this user, as the kernel counts them for its limit.
pub(super) fn tasks_of_user() -> u64 {
    let uid = rustix::process::getuid().as_raw();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    all.filter_map(status_of).filter(|status| status.uid == uid).map(|status| status.tasks).sum()
}

fn folder(process: u32) -> PathBuf {
    Path::new("/proc").join(process.to_string())
}

fn status_of(process: u32) -> Option<Status> {
    let folder = folder(process);
    let status = parse_status(&read_lossy(&folder.join("status"))?)?;
    if status.memory_bytes > 0 {
        return Some(status);
    }
    // If the first thread of a process has ended, only the files of the others show its memory.
    let threads = fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
    let memory = threads.filter_map(|thread| parse_status(&read_lossy(&thread.path().join("status"))?));
    let memory_bytes = memory.map(|thread| thread.memory_bytes).max().unwrap_or_default();
    Some(Status { memory_bytes, ..status })
}

/// Reads a file of `/proc`. A process chooses its name, which need not be UTF-8.
fn read_lossy(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(path).ok()?).into_owned())
}

fn parse_status(text: &str) -> Option<Status> {
    let mut status = Status::default();
    for (name, value) in text.lines().filter_map(|line| line.split_once(':')) {
        let number = || value.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
        match name {
            "PPid" => status.parent = u32::try_from(number()?).ok()?,
            "Uid" => status.uid = u32::try_from(number()?).ok()?,
            "Threads" => status.tasks = number()?,
            "RssAnon" | "RssShmem" | "VmSwap" | "VmPTE" => status.memory_bytes += number()? << 10,
            _ => {}
        }
    }
    // A process that has ended and is not waited for still counts for the kernel's limit.
    status.tasks = status.tasks.max(1);
    Some(status)
}

/// Anonymous and shared memory of `smaps_rollup`, of which a process counts its part, in bytes.
fn proportional_bytes(text: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let values = lines.filter(|(name, _)| matches!(*name, "Pss_Anon" | "Pss_Shmem" | "SwapPss"));
    let kib: Vec<u64> =
        values.map(|(_, value)| value.trim().strip_suffix("kB")?.trim().parse().ok()).collect::<Option<_>>()?;
    (!kib.is_empty()).then(|| kib.iter().sum::<u64>() << 10)
}

fn descendants(root: u32, all: &HashMap<u32, Status>) -> HashMap<u32, Status> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for (process, status) in all {
        children.entry(status.parent).or_default().push(*process);
    }
    let mut found = HashMap::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            found.extend(all.get(&child).map(|status| (child, *status)));
            next.push(child);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_proportional_memory_are_parsed() {
        let text = "Name:\ta b\nPPid:\t7\nUid:\t1000\t1000\t1000\t1000\nThreads:\t3\nRssAnon:\t 100 kB\nRssFile:\t 9 kB\nRssShmem:\t 20 kB\n";
        assert_eq!(parse_status(text), Some(Status { parent: 7, tasks: 3, memory_bytes: 120 << 10, uid: 1000 }));
        let text = "0-1 ---p 0 00:00 0 [rollup]\nPss:  50 kB\nPss_Anon:  10 kB\nPss_File:  30 kB\nPss_Shmem:  10 kB\n";
        assert_eq!(proportional_bytes(text), Some(20 << 10));
        assert_eq!(proportional_bytes("Pss: 50 kB\n"), None, "a kernel without these lines");
    }

    #[test]
    fn descendants_are_found_over_several_generations() {
        let with_parent = |parent| Status { parent, ..Status::default() };
        let all = [(2, 1), (3, 2), (4, 3), (5, 1), (6, 5)].map(|(process, parent)| (process, with_parent(parent)));
        let mut found: Vec<u32> = descendants(2, &all.into_iter().collect()).into_keys().collect();
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}
