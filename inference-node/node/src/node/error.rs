//! Why a node ends, and the text of an error with its causes.

use cfq_link::LinkError;
use cfq_proto::model::ModelId;

/// Why a node ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node cannot reach the cluster")]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this node: {reason}")]
    Refused { reason: String },
    /// The engine's memory cannot be trusted after a panic, and a new process loads the model in seconds.
    #[error("the engine of {model} stopped: {reason}; the node ends, its supervisor starts a new one")]
    Engine { model: ModelId, reason: String },
    /// The node could neither load nor unload a model.
    #[error("the model loader thread exited: {reason}; the node ends, its supervisor starts a new one")]
    Loader { reason: String },
}

/// The text of an error, followed by those of its causes that it does not contain.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("a panic without a message")
}
