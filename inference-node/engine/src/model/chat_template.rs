//! The model's own chat template, a Jinja template that turns messages into the prompt's text.
//!
//! Templates are written for Python's Jinja2 with the settings of Hugging Face transformers: `trim_blocks` and
//! `lstrip_blocks` are on, Python's string and list methods exist, and `raise_exception` ends rendering with the
//! template's own error. A template comes with the model's file and is not trusted: fuel limits its time and memory.
//!
//! The rendered text knows which of its characters come from the messages (see [`origin`]).

mod container_text;
mod origin;
mod python_methods;

use std::sync::Arc;

use cfq_proto::job::ChatMessage;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};

use crate::model::control_names::ControlNames;
use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::prompt_text::PromptText;
use crate::model::safetensors::ModelFolder;
use crate::model::time_limit::{Stopped, TimeLimit};
use crate::model::tokenizer::Vocabulary;

/// Fuel of one rendering. An instruction costs one unit, and so do 64 bytes of text that the template creates or
/// processes: this is far beyond any real conversation, takes less than a second, and creates at most 128 MiB.
const TEMPLATE_FUEL: u64 = 2 << 20;
/// Maximum size of a template. Real ones have up to some ten thousand bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Maximum length of the reason that a template gives to `raise_exception`, in characters.
const MAX_REASON_CHARS: usize = 1000;
/// Stack of the thread that renders, in bytes. Dropping a list that is nested as deep as the fuel allows takes this much
/// stack; the system provides only the part that is used.
pub const STACK_BYTES: usize = 256 << 20;

/// A parsed chat template, with the names of the BOS and EOS tokens that it may insert.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    control_names: Arc<ControlNames>,
}

/// Rendering failed.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template raised an exception or is faulty for these messages.
    #[error("the model's chat template rejects these messages: {reason}")]
    Rejected {
        /// The reason that the template or the template engine gives.
        reason: String,
    },
    /// The template exceeds the limits of time and memory.
    #[error(
        "the model's chat template needs more time or memory than a chat template may take; \
         shorten the messages, or use another model"
    )]
    OutOfFuel,
    /// The messages use all private-use characters of Unicode.
    #[error("the messages contain all private-use characters of Unicode")]
    NoFreeCharacters,
    /// No thread could be started.
    #[error("cannot start a thread for the chat template: {reason}")]
    Thread {
        /// The system's error.
        reason: String,
    },
    /// The time limit ended, or the caller no longer waits for the prompt.
    #[error("the chat template was not rendered: {0}")]
    Stopped(#[from] Stopped),
}

impl ChatTemplate {
    /// Reads and parses the template of `file`, and renders a message with it.
    ///
    /// # Errors
    /// [`HeaderError::Unsupported`] if there is none, if it does not parse, or if it exceeds the limits of time and
    /// memory; I/O errors of the template's own file.
    pub fn read(file: &ModelFile, vocabulary: &Vocabulary) -> Result<Self, HeaderError> {
        let template = Self::parse(file, vocabulary)?;
        let example = [ChatMessage { role: cfq_proto::job::ChatRole::User, content: "x".to_owned() }];
        // Other errors may depend on the messages.
        if let Err(error @ TemplateError::OutOfFuel) = template.render(&example, &TimeLimit::none()) {
            return Err(file.unsupported(format!("it cannot render a message: {error}")));
        }
        Ok(template)
    }

    /// Reads and parses the template of `file`.
    ///
    /// # Errors
    /// [`HeaderError::Unsupported`] if there is none or if it does not parse; I/O errors of the template's own file.
    pub fn parse(file: &ModelFile, vocabulary: &Vocabulary) -> Result<Self, HeaderError> {
        let source = match file {
            ModelFile::Gguf(header) => header.get_str("tokenizer.chat_template").map(str::to_owned),
            ModelFile::Folder(folder) => template_in_folder(folder)?,
        };
        let source = source.ok_or_else(|| {
            file.unsupported("it has no chat template; models made for chat have one (they are often named -Instruct)")
        })?;
        if source.len() > MAX_TEMPLATE_BYTES {
            let size = source.len();
            return Err(file.unsupported(format!("its chat template has {size} bytes, more than {MAX_TEMPLATE_BYTES}")));
        }
        let names = (vocabulary.bos_name(), vocabulary.eos_name());
        let template = Self::new(&source, names, vocabulary.control_names().clone());
        template
            .environment
            .template_from_str(&template.source)
            .map_err(|error| file.unsupported(format!("its chat template cannot be parsed: {error}")))?;
        Ok(template)
    }

    fn new(source: &str, (bos, eos): (&str, &str), control_names: Arc<ControlNames>) -> Self {
        let mut environment = Environment::new();
        if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
            environment.set_syntax(syntax);
        }
        environment.set_fuel(Some(TEMPLATE_FUEL));
        container_text::limit(&mut environment);
        environment.set_unknown_method_callback(python_methods::call);
        environment.add_function("raise_exception", |reason: Value| -> Result<String, Error> {
            // The text of another value can be arbitrarily long.
            let reason = reason.as_str().unwrap_or("it raised an exception without a text");
            Err(Error::new(ErrorKind::InvalidOperation, reason.chars().take(MAX_REASON_CHARS).collect::<String>()))
        });
        Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned(), control_names }
    }

    /// Renders the conversation up to the beginning of the assistant's reply.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn render(&self, messages: &[ChatMessage], limit: &TimeLimit) -> Result<PromptText, TemplateError> {
        let render = || self.render_on_this_thread(messages, limit);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("chat-template".to_owned()).stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, render);
            let thread = thread.map_err(|error| TemplateError::Thread { reason: error.to_string() })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// The result of [`Self::render`], without a thread: the caller's must have a stack of [`STACK_BYTES`].
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn render_on_this_thread(
        &self,
        messages: &[ChatMessage],
        limit: &TimeLimit,
    ) -> Result<PromptText, TemplateError> {
        origin::render(self, messages, limit)
    }

    /// The text of messages with these contents instead of their own.
    fn render_text(&self, messages: &[ChatMessage], contents: &[impl AsRef<str>]) -> Result<String, TemplateError> {
        let messages: Vec<_> = messages
            .iter()
            .zip(contents)
            .map(|(message, content)| context! { role => message.role.as_str(), content => content.as_ref() })
            .collect();
        self.environment
            .template_from_str(&self.source)
            .and_then(|template| {
                template.render(context! {
                    messages,
                    add_generation_prompt => true,
                    bos_token => &self.bos,
                    eos_token => &self.eos,
                })
            })
            .map_err(|error| match is_out_of_fuel(&error) {
                true => TemplateError::OutOfFuel,
                false => TemplateError::Rejected { reason: error.to_string() },
            })
    }
}

/// Whether the error, or one of its causes, is that the fuel is used up.
fn is_out_of_fuel(error: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The template from chat_template.jinja, or from tokenizer_config.json: a string, or the entry "default" of a list.
fn template_in_folder(folder: &ModelFolder) -> Result<Option<String>, HeaderError> {
    if let Some(source) = folder.text("chat_template.jinja")? {
        return Ok(Some(source));
    }
    let config = folder.json("tokenizer_config.json")?;
    let template = config.as_ref().and_then(|s| s.get("chat_template"));
    let string = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let default = |all: &Vec<serde_json::Value>| {
        let named = all.iter().find(|t| t.get("name").and_then(|n| n.as_str()) == Some("default"));
        named.and_then(|t| t.get("template")).and_then(string)
    };
    Ok(template.and_then(|t| string(t).or_else(|| t.as_array().and_then(default))))
}

#[cfg(test)]
mod tests;
