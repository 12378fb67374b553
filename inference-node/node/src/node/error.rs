//! Why a node exits, and the formatting of an error with its causes.

use cfq_engine::EngineFailure;
use cfq_link::LinkError;
use cfq_proto::model::ModelId;

pub use crate::error_text::with_causes;

/// Why a node exited.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node cannot reach the cluster")]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this node: {reason}")]
    Refused { reason: String },
    /// The scheduler waits for nodes to pull their work orders, which this build does not do.
    #[error("the scheduler's cfq is older than this node's {version}: install {version} there, then restart both", version = env!("CARGO_PKG_VERSION"))]
    OlderScheduler,
    /// An engine is broken. The node exits because memory may be corrupt after a panic, and a new process loads the
    /// model in seconds.
    #[error("the engine of {model} failed: {failure}; the node exits, and its supervisor starts a new one")]
    Engine { model: ModelId, failure: ModelFault },
    /// The loader thread exited. The node exits because it could no longer load or unload a model.
    #[error("the model loader failed: {failure}; the node exits, and its supervisor starts a new one")]
    Loader { failure: LoaderFailure },
}

impl Error {
    /// Whether the node's id or version is refused, or its credentials are in use: a restart does not help.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused { .. } | Self::OlderScheduler | Self::Link(LinkError::CredentialsTaken { .. }) => true,
            Self::Link(_) | Self::Engine { .. } | Self::Loader { .. } => false,
        }
    }
}

/// Failure of one model after which the process has to restart.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelFault {
    /// The admission of a job panicked before the engine received the prompt, for example because no thread or no
    /// memory was available.
    #[error("the admission of a job panicked: {message}")]
    AdmissionPanicked { message: String },
    /// The engine failed.
    #[error("{0}")]
    Engine(EngineFailure),
}

/// Why the loader thread exited.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoaderFailure {
    /// The thread could not be created.
    #[error("its thread cannot be created: {detail}")]
    NoThread { detail: String },
    /// The thread's runtime could not be created.
    #[error("its async runtime cannot be created: {detail}")]
    NoRuntime { detail: String },
    /// The thread panicked outside a load.
    #[error("{message}")]
    Panicked { message: String },
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("a panic without a message")
}
