//! The two kinds of sandbox, and which of them this machine offers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A kind of sandbox; the stronger one is greater. The module documentation of the crate compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxLevel {
    /// Landlock and seccomp: the program sees the machine's file system, but can open only what it is permitted.
    Landlock,
    /// Namespaces and seccomp: the program has a file system, a network and processes of its own.
    Namespaces,
}

impl SandboxLevel {
    /// All levels, the strongest first.
    pub const ALL: [Self; 2] = [Self::Namespaces, Self::Landlock];

    /// Name of the level in configuration, results and output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Landlock => "landlock",
        }
    }
}

impl fmt::Display for SandboxLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which levels work on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSupport {
    /// The strongest level that works; `None` if none does.
    pub level: Option<SandboxLevel>,
    /// The stronger levels, which do not work.
    pub missing: Vec<MissingLevel>,
}

/// A level that does not work on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingLevel {
    /// The level.
    pub level: SandboxLevel,
    /// The step that failed, with the system's error.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}
