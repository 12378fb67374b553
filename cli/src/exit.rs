//! Exit codes, and errors that carry one. Documented in docs/cli.md; scripts rely on them.

use std::process::ExitCode;

use cfq_proto::client::ClientError;
use cfq_proto::task::TaskState;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Done = 0,
    Usage = 2,
    NeedsHuman = 3,
    Failed = 4,
    Unreachable = 5,
    Interrupted = 130,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        ExitCode::from(code as u8)
    }
}

/// How a task's state is told to a shell.
pub fn of_state(state: TaskState) -> Code {
    match state {
        TaskState::Merged
        | TaskState::Accepted
        | TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running => Code::Done,
        TaskState::Escalated | TaskState::WaitingOnHuman | TaskState::Paused => Code::NeedsHuman,
        TaskState::Failed | TaskState::Cancelled => Code::Failed,
    }
}

/// An error whose exit code is not the one of its cause.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Coded {
    pub code: Code,
    pub message: String,
}

/// A usage error: bad input of the person at the keyboard.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Coded { code: Code::Usage, message: message.into() }.into()
}

pub fn unreachable(message: impl Into<String>) -> anyhow::Error {
    Coded { code: Code::Unreachable, message: message.into() }.into()
}

pub fn failed(message: impl Into<String>) -> anyhow::Error {
    Coded { code: Code::Failed, message: message.into() }.into()
}

pub fn of_error(error: &anyhow::Error) -> Code {
    if let Some(coded) = error.downcast_ref::<Coded>() {
        return coded.code;
    }
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Unreachable { .. } | ClientError::Strange { .. }) => Code::Unreachable,
        // 400, 404, 409, 413: what was asked is wrong; the rest is the server's trouble.
        Some(ClientError::Refused { status, .. })
            if (400..500).contains(status) && !matches!(status, 401 | 403 | 429) =>
        {
            Code::Usage
        }
        Some(ClientError::Refused { status: 401 | 403, .. }) => Code::Usage,
        Some(ClientError::Refused { .. }) => Code::Unreachable,
        None => Code::Failed,
    }
}
