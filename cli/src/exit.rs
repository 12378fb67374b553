//! Exit codes, and errors that carry one. docs/reference/exit-codes.md documents them; scripts rely on them.

use std::process::ExitCode;

use cfq_proto::client::ClientError;
use cfq_proto::task::TaskState;
use schemars::JsonSchema;
use serde::Serialize;

/// Exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Done = 0,
    Usage = 2,
    NeedsHuman = 3,
    Failed = 4,
    Unreachable = 5,
    TimedOut = 6,
    Interrupted = 130,
}

impl Code {
    /// The code to report of two tasks: a failure before a task that needs a human.
    pub fn worse(self, other: Self) -> Self {
        if self == Self::Failed || other == Self::Done { self } else { other }
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        ExitCode::from(code as u8)
    }
}

/// The exit code that reports a task's state.
pub fn of_state(state: TaskState) -> Code {
    match state {
        TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed
        | TaskState::Queued
        | TaskState::Ready
        | TaskState::Running => Code::Done,
        TaskState::Blocked | TaskState::Escalated | TaskState::WaitingOnHuman | TaskState::Paused => Code::NeedsHuman,
        TaskState::Failed | TaskState::Cancelled => Code::Failed,
    }
}

/// An error with an explicit exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct CodedError {
    pub code: Code,
    pub message: String,
}

/// What a command prints to stderr with `--json` if it fails.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ErrorOutput {
    pub error: ErrorDetail,
}

/// An error, and the exit code of the command.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ErrorDetail {
    /// What is wrong, and the next step.
    pub message: String,
    pub exit_code: u8,
}

/// An error in the user's input.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    CodedError { code: Code::Usage, message: message.into() }.into()
}

/// An error because no server responds.
pub fn unreachable(message: impl Into<String>) -> anyhow::Error {
    CodedError { code: Code::Unreachable, message: message.into() }.into()
}

/// An error for any failure that neither [`usage`] nor [`unreachable()`] describes.
pub fn failed(message: impl Into<String>) -> anyhow::Error {
    CodedError { code: Code::Failed, message: message.into() }.into()
}

/// The exit code of an error.
pub fn of_error(error: &anyhow::Error) -> Code {
    if let Some(coded) = error.downcast_ref::<CodedError>() {
        return coded.code;
    }
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::TokenFile { .. }) => Code::Usage,
        Some(ClientError::Unreachable { .. } | ClientError::UnexpectedResponse { .. }) => Code::Unreachable,
        // 400, 404, 409, 413: the request is wrong. Other codes are problems of the server.
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
