//! Messages between a caller and the launcher, over the Unix socket that is the launcher's stdin. The caller sends one
//! request and the launcher one reply, each a line of JSON. Before the reply, the launcher sends the byte [`LISTENER`]
//! with a listening socket, if the command has one. Any byte after the request, or the end of the connection, asks the
//! launcher to kill the program.

use std::io;

use serde::{Deserialize, Serialize};

use crate::{CommandEnd, CommandUsage, SandboxLevel, SandboxedCommand};

/// Comes with a listening socket. No JSON begins with it.
pub(crate) const LISTENER: u8 = b'L';

/// Starts a sandbox.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LaunchRequest {
    pub(crate) level: SandboxLevel,
    pub(crate) command: SandboxedCommand,
    /// Sets up the sandbox, but does not start the program.
    pub(crate) probe: bool,
}

/// The result.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaunchReply {
    /// The sandbox works. The reply to a probe.
    Works,
    /// The sandbox could not be set up.
    NoSandbox(FailedStep),
    /// The sandbox works, but the program was not started.
    NotStarted {
        /// Number of the system's error.
        errno: i32,
    },
    /// The program ended.
    Ended { end: CommandEnd, usage: CommandUsage },
}

/// A step of the launcher that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedStep {
    /// What the launcher tried, after "cannot".
    pub(crate) step: String,
    /// The system's error.
    pub(crate) error: String,
    /// Its number, if it has one.
    pub(crate) errno: Option<i32>,
}

impl FailedStep {
    pub(crate) fn new(step: impl Into<String>, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        Self { step: step.into(), error: error.to_string(), errno: error.raw_os_error() }
    }
}
