//! How a program in a sandbox ended.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::SandboxLevel;

/// Result of a program that was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOutcome {
    /// How it ended.
    pub end: CommandEnd,
    /// What it wrote to stdout.
    pub stdout: CapturedOutput,
    /// What it wrote to stderr.
    pub stderr: CapturedOutput,
    /// The level of the sandbox that it ran in.
    pub level: SandboxLevel,
    /// What it used.
    pub usage: CommandUsage,
    /// Whether it is certain that none of its processes is left. Always false at the level of Landlock.
    pub has_ended: bool,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandEnd {
    /// It exited with this code.
    Exited(i32),
    /// A signal ended it.
    Signalled(i32),
    /// It was killed because it exceeded a limit.
    LimitExceeded(ExceededLimit),
    /// It was killed because its caller cancelled it.
    Cancelled,
}

impl CommandEnd {
    /// True for exit code 0.
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for CommandEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signalled(signal) => write!(f, "signal {signal}"),
            Self::LimitExceeded(limit) => write!(f, "killed: {limit}"),
            Self::Cancelled => f.write_str("cancelled"),
        }
    }
}

/// The limit that a killed program exceeded. A program that a limit refuses something to, for example memory, may also
/// end by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExceededLimit {
    /// Elapsed time.
    Wall,
    /// Processor time of one process.
    Cpu,
    /// Memory of all processes.
    Memory,
    /// Number of processes and threads.
    Tasks,
    /// Size of one file.
    FileSize,
    /// Size of all files.
    Disk,
    /// Number of files.
    Files,
    /// Length of the output.
    Output,
}

impl fmt::Display for ExceededLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wall => "it ran too long",
            Self::Cpu => "a process used too much processor time",
            Self::Memory => "it used too much memory",
            Self::Tasks => "it started too many processes and threads",
            Self::FileSize => "it wrote a file that is too large",
            Self::Disk => "it wrote too much to disk",
            Self::Files => "it created too many files",
            Self::Output => "it printed too much",
        })
    }
}

/// What a program printed, up to the limit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapturedOutput {
    /// The bytes, of which a part may not be UTF-8.
    pub bytes: Vec<u8>,
    /// True if more was printed.
    pub truncated: bool,
}

/// What a program and all processes that it started used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CommandUsage {
    /// Elapsed time, without the start of the sandbox.
    pub wall: Duration,
    /// Processor time of the processes that have been waited for.
    pub cpu: Duration,
    /// Largest memory that was measured, in bytes. Zero if the program ended before the first measurement.
    pub peak_memory_bytes: u64,
}
