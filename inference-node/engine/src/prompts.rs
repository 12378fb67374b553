//! From messages to the tokens of a prompt, by the chat template and the tokenizer of a model's file.
//!
//! The file is not trusted: its template is a program, and its tokenizer contains regular expressions. Their time is
//! limited here, but a thread cannot be killed, and its memory cannot be limited. A program that must be protected
//! passes a [`PromptTokenizer`] of its own to [`crate::EngineBuilder::prompts`], which runs a [`PromptModel`] in another
//! process.

use std::path::Path;
use std::sync::Arc;

use cfq_proto::job::{ChatMessage, ChatRole, JobFailure, PromptForm};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::backend::candle_transformers::CandleTransformersConfig;
use crate::batch::preparations::Preparations;
use crate::memory_estimate::MemoryPlan;
use crate::model::architecture::Architecture;
use crate::model::chat_template::{ChatTemplate, TemplateError};
use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::prompt_text::PromptText;
use crate::model::time_limit::TimeLimit;
use crate::model::tokenizer::{TokenizeError, Vocabulary};

pub use crate::model::chat_template::STACK_BYTES as PROMPT_STACK_BYTES;

/// What is tokenized for a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptRequest {
    /// What the messages are.
    #[serde(default, skip_serializing_if = "PromptForm::is_chat")]
    pub form: PromptForm,
    /// The conversation, rendered up to the beginning of the assistant's reply, or the text to continue.
    pub messages: Vec<ChatMessage>,
    /// A text whose tokens are drafts of the output; empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub previous: String,
}

/// The tokens of a [`PromptRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokens {
    /// Tokens of the rendered conversation.
    pub prompt: Vec<u32>,
    /// Tokens of [`PromptRequest::previous`].
    pub previous: Vec<u32>,
    /// [`Vocabulary::fingerprint`] of the vocabulary that the tokens belong to.
    pub vocabulary: i64,
}

/// Renders and tokenizes the prompts of one model. Every method may be called concurrently.
pub trait PromptTokenizer: Send + Sync {
    /// Renders and tokenizes a prompt. Must be called within a tokio runtime whose timers are enabled. The work ends
    /// soon after the future is dropped.
    ///
    /// # Errors
    /// [`JobFailure::Rejected`] if no engine can run the prompt, [`JobFailure::Engine`] if this one cannot.
    fn tokenize(&self, request: PromptRequest) -> BoxFuture<'_, Result<PromptTokens, JobFailure>>;

    /// Why the model takes no more prompts until it is loaded again; `None` while it does.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Frees what the next prompt can create again. Called when the model is unloaded, but its weights are kept.
    fn release(&self) {}
}

/// What a model's file says about the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// The architecture's name in the file.
    pub architecture: String,
    /// Longest sequence, in tokens.
    pub context: u64,
    /// Number of tokens of the vocabulary.
    pub tokens: u64,
    /// Whether the chat template accepts a system message.
    pub system_messages: bool,
    /// Whether the chat template accepts a conversation of several turns.
    pub several_turns: bool,
}

/// The tokenizer and the chat template of a model's file.
pub struct PromptModel {
    vocabulary: Arc<Vocabulary>,
    template: Arc<ChatTemplate>,
}

/// How a template is rendered: [`ChatTemplate::render`] or [`ChatTemplate::render_on_this_thread`].
type Render = fn(&ChatTemplate, &[ChatMessage], &TimeLimit) -> Result<PromptText, TemplateError>;

impl PromptModel {
    /// Reads everything in the file or folder at `path` except the weights, and renders test conversations. Must be
    /// called on a thread with a stack of [`PROMPT_STACK_BYTES`].
    ///
    /// # Errors
    /// See [`HeaderError`]. Whether the model fits into memory is not checked.
    pub fn inspect(path: &Path) -> Result<(Self, ModelFacts), HeaderError> {
        let file = ModelFile::read(path)?;
        let shape = match CandleTransformersConfig::read(&file)? {
            Some(config) => {
                MemoryPlan::of_candle_transformers(&file, &config)?;
                config.shape
            }
            None => {
                let architecture = Architecture::read(&file)?;
                MemoryPlan::of(&file, &architecture, 1)?;
                architecture.shape
            }
        };
        let vocabulary = Arc::new(Vocabulary::read_for(&file, shape.vocabulary)?);
        let template = Arc::new(ChatTemplate::parse(&file, &vocabulary)?);
        let facts = ModelFacts {
            architecture: file.architecture().to_owned(),
            context: shape.context,
            tokens: vocabulary.len() as u64,
            system_messages: accepts(&file, &template, &[ChatRole::System, ChatRole::User])?,
            several_turns: accepts(&file, &template, &[ChatRole::User, ChatRole::Assistant, ChatRole::User])?,
        };
        accepts(&file, &template, &[ChatRole::User])?;
        Ok((Self { vocabulary, template }, facts))
    }

    pub(crate) fn new(vocabulary: Arc<Vocabulary>, template: Arc<ChatTemplate>) -> Self {
        Self { vocabulary, template }
    }

    /// Renders and tokenizes a prompt. Must be called on a thread with a stack of [`PROMPT_STACK_BYTES`].
    ///
    /// # Errors
    /// See [`PromptTokenizer::tokenize`].
    pub fn tokenize(&self, request: &PromptRequest, limit: &TimeLimit) -> Result<PromptTokens, JobFailure> {
        self.tokenize_with(ChatTemplate::render_on_this_thread, request, limit)
    }

    fn tokenize_with(
        &self,
        render: Render,
        request: &PromptRequest,
        limit: &TimeLimit,
    ) -> Result<PromptTokens, JobFailure> {
        let prompt = match request.form {
            PromptForm::Chat => {
                let text = render(&self.template, &request.messages, limit).map_err(template_failure)?;
                self.vocabulary.encode_prompt(&text, limit)
            }
            PromptForm::Text => {
                let text: String = request.messages.iter().map(|message| message.content.as_str()).collect();
                self.vocabulary.encode_plain(&text, limit)
            }
        };
        let prompt = prompt.map_err(tokenize_failure)?;
        let previous = match request.previous.is_empty() {
            true => Vec::new(),
            false => self.vocabulary.encode_content(&request.previous, limit).map_err(tokenize_failure)?,
        };
        Ok(PromptTokens { prompt, previous, vocabulary: self.vocabulary.fingerprint() })
    }
}

/// Whether the template accepts a short conversation with these roles. A rejection can depend on the messages, so it is
/// not an error.
fn accepts(file: &ModelFile, template: &ChatTemplate, roles: &[ChatRole]) -> Result<bool, HeaderError> {
    let messages: Vec<_> = roles.iter().map(|role| ChatMessage { role: *role, content: "x".to_owned() }).collect();
    let rendered = template.render_on_this_thread(&messages, &TimeLimit::none());
    match rendered {
        Err(error @ TemplateError::OutOfFuel) => Err(file.unsupported(format!("it cannot render a message: {error}"))),
        other => Ok(other.is_ok()),
    }
}

/// Renders and tokenizes prompts on threads of this process.
pub(crate) struct InProcess {
    model: Arc<PromptModel>,
    preparations: Preparations,
}

impl InProcess {
    pub(crate) fn new(model: PromptModel) -> Self {
        Self { model: Arc::new(model), preparations: Preparations::default() }
    }
}

impl PromptTokenizer for InProcess {
    fn tokenize(&self, request: PromptRequest) -> BoxFuture<'_, Result<PromptTokens, JobFailure>> {
        let model = self.model.clone();
        let tokenize = move |limit: &TimeLimit| model.tokenize_with(ChatTemplate::render, &request, limit);
        self.preparations.run(tokenize).map(|tokens| tokens.and_then(|tokens| tokens)).boxed()
    }
}

fn template_failure(error: TemplateError) -> JobFailure {
    let reason = error.to_string();
    match error {
        TemplateError::Rejected { .. } | TemplateError::OutOfFuel | TemplateError::NoFreeCharacters => {
            JobFailure::Rejected { reason }
        }
        TemplateError::Thread { .. } | TemplateError::Stopped(_) => JobFailure::Engine { reason },
    }
}

fn tokenize_failure(error: TokenizeError) -> JobFailure {
    let reason = error.to_string();
    match error {
        TokenizeError::Failed { .. } => JobFailure::Rejected { reason },
        TokenizeError::Stopped(_) => JobFailure::Engine { reason },
    }
}
