//! Why a model of this node cannot be used. The variant determines whether the load is retried; its text goes to the
//! ledger, the log and the user.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_engine::HeaderError;
use cfq_proto::model::ModelId;

use crate::error_text::with_causes;
use crate::gpu::DeviceChoice;
use crate::sandbox::{FileFault, SandboxError};

/// Why a model cannot be used. `detail` is the text of the error that was found, with its causes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableReason {
    /// The configuration does not contain the endpoint of the model.
    #[error("endpoint {endpoint} is not configured: add [endpoints.{endpoint}] with its url")]
    EndpointNotConfigured { endpoint: String },
    /// The configuration of the model's endpoint or command is invalid.
    #[error("{detail}")]
    ProxyInvalid { detail: String },
    /// The model is not on this machine and may not be fetched.
    #[error("{model} is not on this node's machine; to fetch it, run `cfq models pull {model}` there")]
    NotInstalled { model: ModelId },
    /// The fetch of the model failed.
    #[error("{detail}; for details run `cfq models pull {model}`, then retry with `cfq models load {model}`")]
    FetchFailed { model: ModelId, detail: String },
    /// The model's file is missing or corrupt.
    #[error("{detail}; to retry, run `cfq models load {model}`")]
    Unreadable { model: ModelId, detail: String },
    /// The model's file is valid, but this version cannot run the model.
    #[error("{detail}; configure another model")]
    Unsupported { detail: String },
    /// The model supports only the CPU, and the configured device is a GPU.
    #[error("{detail}")]
    CpuOnly { detail: String },
    /// The configured GPU cannot be used, so no model can be loaded.
    #[error("device = \"{device}\": {detail}")]
    DeviceUnusable { device: DeviceChoice, detail: String },
    /// The engine could not be started.
    #[error("{detail}")]
    EngineNotStarted { detail: String },
    /// The child process that reads the model's file was killed or failed.
    #[error("{path} cannot be read: {detail}; configure another model, or retry with `cfq models load {model}`")]
    SandboxFailed { model: ModelId, path: PathBuf, detail: String },
    /// The load panicked.
    #[error("loading {model} failed inside the engine; see the node's log")]
    LoadPanicked { model: ModelId },
    /// Each of the last loads of the model ended the process; `loads` is their number.
    #[error(
        "loading {model} ended the node the last {loads} times, most likely because memory ran out: free some, set \
         memory_limit, or use a smaller model; to retry, run `cfq models load {model}`"
    )]
    LoadsInterrupted { model: ModelId, loads: usize },
    /// The model needs more memory than it could get even if no other model was loaded.
    #[error("{0}")]
    TooLarge(MemoryShortage),
    /// The model would fit if other models or programs freed memory.
    #[error("{shortage}. The load is retried at the first request that arrives after {} s", retry_after.as_secs().max(1))]
    OutOfMemory { shortage: MemoryShortage, retry_after: Duration },
}

impl UnusableReason {
    /// The reason for an error of the model's header. `detail` is the text of the error.
    pub fn of_header(model: &ModelId, error: &HeaderError, detail: String) -> Self {
        match error {
            HeaderError::Open { .. }
            | HeaderError::SpecialFile { .. }
            | HeaderError::NotGguf { .. }
            | HeaderError::Corrupt { .. } => Self::Unreadable { model: model.clone(), detail },
            HeaderError::Unsupported { .. } => Self::Unsupported { detail },
        }
    }

    /// The reason for an error of the child process that reads the model's file at `path`.
    pub fn of_sandbox(model: &ModelId, path: &Path, error: &SandboxError) -> Self {
        let detail = with_causes(error);
        match error {
            SandboxError::File { fault: FileFault::Unreadable, .. } => {
                Self::Unreadable { model: model.clone(), detail }
            }
            SandboxError::File { fault: FileFault::Unsupported, .. } => Self::Unsupported { detail },
            SandboxError::Start { .. } => Self::EngineNotStarted { detail },
            SandboxError::OutOfTime { .. }
            | SandboxError::Ended { .. }
            | SandboxError::Reply { .. }
            | SandboxError::Cancelled => Self::SandboxFailed { model: model.clone(), path: path.to_owned(), detail },
        }
    }

    /// True if the load is retried only at a request by a user, and not for jobs.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => false,
            Self::EndpointNotConfigured { .. }
            | Self::ProxyInvalid { .. }
            | Self::NotInstalled { .. }
            | Self::FetchFailed { .. }
            | Self::Unreadable { .. }
            | Self::Unsupported { .. }
            | Self::CpuOnly { .. }
            | Self::DeviceUnusable { .. }
            | Self::EngineNotStarted { .. }
            | Self::SandboxFailed { .. }
            | Self::LoadPanicked { .. }
            | Self::LoadsInterrupted { .. }
            | Self::TooLarge(_) => true,
        }
    }
}

/// Memory that a model lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryShortage {
    /// The memory that the model needs, term by term, and the available memory, as text.
    pub detail: String,
    /// Pinned models because of which nothing more can be evicted.
    pub pinned: Vec<ModelId>,
}

impl MemoryShortage {
    /// A shortage that does not depend on pinned models.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), pinned: Vec::new() }
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)?;
        if self.pinned.is_empty() {
            return Ok(());
        }
        let pinned: Vec<&str> = self.pinned.iter().map(ModelId::as_str).collect();
        write!(f, "; nothing more can be evicted, since these are pinned: {}", pinned.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_displays_its_cause_and_its_hint() {
        let model: ModelId = "hf:o/r:m.gguf".parse().unwrap();
        let detail = || "it is broken".to_owned();
        let shortage = |pinned: &[&str]| MemoryShortage {
            detail: "it needs 2 GiB".to_owned(),
            pinned: pinned.iter().map(|model| model.parse().unwrap()).collect(),
        };
        let reasons = [
            (
                UnusableReason::EndpointNotConfigured { endpoint: "box".to_owned() },
                "endpoint box is not configured: add [endpoints.box] with its url",
            ),
            (UnusableReason::ProxyInvalid { detail: detail() }, "it is broken"),
            (
                UnusableReason::NotInstalled { model: model.clone() },
                "hf:o/r:m.gguf is not on this node's machine; to fetch it, run `cfq models pull hf:o/r:m.gguf` there",
            ),
            (
                UnusableReason::FetchFailed { model: model.clone(), detail: detail() },
                "it is broken; for details run `cfq models pull hf:o/r:m.gguf`, then retry with \
                 `cfq models load hf:o/r:m.gguf`",
            ),
            (
                UnusableReason::Unreadable { model: model.clone(), detail: detail() },
                "it is broken; to retry, run `cfq models load hf:o/r:m.gguf`",
            ),
            (UnusableReason::Unsupported { detail: detail() }, "it is broken; configure another model"),
            (UnusableReason::CpuOnly { detail: detail() }, "it is broken"),
            (
                UnusableReason::DeviceUnusable { device: DeviceChoice::Cuda(1), detail: detail() },
                "device = \"cuda:1\": it is broken",
            ),
            (UnusableReason::EngineNotStarted { detail: detail() }, "it is broken"),
            (
                UnusableReason::SandboxFailed { model: model.clone(), path: "/m.gguf".into(), detail: detail() },
                "/m.gguf cannot be read: it is broken; configure another model, or retry with \
                 `cfq models load hf:o/r:m.gguf`",
            ),
            (
                UnusableReason::LoadPanicked { model: model.clone() },
                "loading hf:o/r:m.gguf failed inside the engine; see the node's log",
            ),
            (
                UnusableReason::LoadsInterrupted { model, loads: 2 },
                "loading hf:o/r:m.gguf ended the node the last 2 times, most likely because memory ran out: free \
                 some, set memory_limit, or use a smaller model; to retry, run `cfq models load hf:o/r:m.gguf`",
            ),
            (
                UnusableReason::TooLarge(shortage(&["path:/a", "path:/b"])),
                "it needs 2 GiB; nothing more can be evicted, since these are pinned: path:/a, path:/b",
            ),
            (
                UnusableReason::OutOfMemory { shortage: shortage(&[]), retry_after: Duration::from_millis(12_300) },
                "it needs 2 GiB. The load is retried at the first request that arrives after 12 s",
            ),
        ];
        for (reason, text) in reasons {
            assert_eq!(reason.to_string(), text);
        }
    }
}
