//! What runs in a sandbox, and within which limits.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A program to run in a sandbox. All paths are absolute. They are the same inside and outside of the sandbox, except
/// those of `mounts`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxedCommand {
    /// The program: a path, or a name that is searched in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Its environment. The launcher adds `HOME`, `TMPDIR`, `PATH` and `LANG` if they are not in it; the caller's own
    /// environment is never passed on.
    pub env: Vec<(OsString, OsString)>,
    /// Working folder, as the program sees it.
    pub work_dir: PathBuf,
    /// Files and folders that may be read and executed, in addition to the system's programs and libraries.
    pub readable: Vec<PathBuf>,
    /// Folders below which files may be created, changed and removed.
    pub writable: Vec<PathBuf>,
    /// Folders that the program sees at another path. Needs namespaces.
    #[serde(default)]
    pub mounts: Vec<Mount>,
    /// An empty folder for temporary files and for the home folder. With namespaces it is also `/tmp`.
    pub scratch_dir: PathBuf,
    /// TCP port of the sandbox's loopback interface on which the caller accepts connections; see
    /// [`run_with_listener`](crate::SandboxLauncher::run_with_listener). Needs namespaces.
    #[serde(default)]
    pub listener_port: Option<u16>,
    /// Limits.
    pub limits: CommandLimits,
}

/// A folder that the program sees at another path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// The folder. No program of a sandbox may be able to replace it by a link.
    pub source: PathBuf,
    /// Its path inside of the sandbox. If it is inside of another mount or a writable folder, it may contain no link,
    /// and is created there if it does not exist.
    pub target: PathBuf,
    /// Whether the program's changes are kept.
    pub changes: MountChanges,
}

/// Whether a program's changes to a mounted folder are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountChanges {
    /// They are made to the folder.
    Kept,
    /// The program sees them, and the folder remains as it is (overlayfs, with the changes in the scratch folder). If
    /// the file system of the scratch folder does not support it, the folder is read-only instead.
    Discarded,
}

/// Limits of a program and all processes that it starts, together unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandLimits {
    /// Elapsed time.
    pub wall: Duration,
    /// Processor time of each process, in whole seconds.
    pub cpu: Duration,
    /// Memory, in bytes, without pages of files. Each process may also allocate at most this much, touched or not.
    pub memory_bytes: u64,
    /// Number of processes and threads.
    pub tasks: u64,
    /// Size of each file, in bytes.
    pub file_bytes: u64,
    /// Growth of all files in the writable folders and the scratch folder, in bytes. It is measured at intervals, so a
    /// program can exceed it before it is stopped.
    pub disk_bytes: u64,
    /// Growth of the number of files and folders in the writable folders and the scratch folder, measured at intervals.
    pub files: u64,
    /// Length of stdout and stderr, in bytes.
    pub output_bytes: u64,
    /// Open files of each process.
    pub open_files: u64,
}

impl Default for CommandLimits {
    /// Suits the tests of most repositories on a machine with 16 GB of memory.
    fn default() -> Self {
        Self {
            wall: Duration::from_secs(600),
            cpu: Duration::from_secs(600),
            memory_bytes: 4 << 30,
            tasks: 512,
            file_bytes: 1 << 30,
            disk_bytes: 8 << 30,
            files: 65_536,
            output_bytes: 8 << 20,
            open_files: 1024,
        }
    }
}
