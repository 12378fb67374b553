//! Errors of running a program in a sandbox.

use std::io;
use std::path::PathBuf;

use crate::SandboxLevel;

/// Why a program did not run, or why its result is unknown.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The caller runs as root and names no other account.
    #[error("a program in a sandbox never runs as root: name an account for it")]
    Root,
    /// The command has mounts or a listener, and the level is not namespaces.
    #[error("folders at other paths and connections to the caller need a sandbox with namespaces")]
    NeedsNamespaces,
    /// A path of the command is not absolute.
    #[error("not an absolute path: {path}")]
    RelativePath {
        /// The path.
        path: PathBuf,
    },
    /// The launcher was not started.
    #[error("cannot start the launcher of the sandbox, {program}")]
    Launcher {
        /// Its program.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A temporary folder cannot be created.
    #[error("cannot create a temporary folder in {path}")]
    Folder {
        /// Where.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The connection to the launcher failed.
    #[error("cannot communicate with the launcher of the sandbox")]
    Connection(#[source] io::Error),
    /// The sandbox cannot be set up at this level, or a path of the command cannot be used.
    #[error("no sandbox ({level}): cannot {step}: {reason}")]
    NoSandbox {
        /// The level.
        level: SandboxLevel,
        /// The step that failed.
        step: String,
        /// The system's error.
        reason: String,
    },
    /// The program cannot be executed: it does not exist in the sandbox, for example.
    #[error("cannot execute {program} in the sandbox")]
    Program {
        /// The program.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The launcher ended without a result: it was killed, for example because the machine's memory was exhausted.
    #[error("the launcher of the sandbox ended without a result ({exit})")]
    NoResult {
        /// Its exit status.
        exit: String,
    },
}
