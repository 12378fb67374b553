//! Protocols of model servers.

use cfq_proto::model::{ModelId, ModelSource};

/// Protocol of a server's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// Chat completions of OpenAI (<https://platform.openai.com/docs/api-reference/chat>).
    OpenAi,
    /// Ollama's own protocol (<https://docs.ollama.com/api>).
    Ollama,
}

/// A model as its server names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemoteModel {
    pub protocol: Protocol,
    /// The server's name for the model.
    pub name: String,
}

impl RemoteModel {
    /// The model on its server; `None` if the model is not behind a server.
    pub fn of(model: &ModelId) -> Option<Self> {
        match model.source() {
            ModelSource::OpenAi { model, .. } => Some(Self { protocol: Protocol::OpenAi, name: model }),
            ModelSource::Ollama { model, .. } => Some(Self { protocol: Protocol::Ollama, name: model }),
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } | ModelSource::Command { .. } => {
                None
            }
        }
    }

    /// Whether the server's list of models has it. Ollama lists the tag `latest` of a name without a tag.
    pub fn is_among(&self, listed: &[String]) -> bool {
        listed.iter().any(|name| *name == self.name || name.strip_suffix(":latest") == Some(&self.name))
    }
}
