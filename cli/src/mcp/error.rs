//! Errors of a tool call. The AI that made the call reads them, so they name the argument and the allowed values.

use cfq_proto::client::ClientError;
use rmcp::model::{CallToolResult, ContentBlock};

use crate::{connect, output};

/// Why a call failed, as text for the caller.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ToolError(pub String);

impl ToolError {
    /// The value of `argument` is invalid.
    pub fn argument(argument: &str, message: impl std::fmt::Display) -> Self {
        Self(format!("{argument}: {message}"))
    }
}

impl ToolError {
    /// `tool` cannot be called over HTTP.
    pub fn needs_files(tool: &str) -> Self {
        Self(format!("{tool} reads files of the caller's machine, so it is available from `cfq mcp`, not over HTTP"))
    }
}

impl From<ClientError> for ToolError {
    fn from(error: ClientError) -> Self {
        Self(connect::describe_error(&error))
    }
}

impl From<anyhow::Error> for ToolError {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<ClientError>() {
            Ok(client) => client.into(),
            Err(error) => Self(format!("{error:#}")),
        }
    }
}

impl From<ToolError> for CallToolResult {
    fn from(error: ToolError) -> Self {
        Self::error(vec![ContentBlock::text(output::sanitize(&error.0))])
    }
}
