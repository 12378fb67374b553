//! The model's own chat template, a Jinja template that turns messages into the prompt's text.
//!
//! Templates are written for Python's Jinja2 with the settings of Hugging Face transformers: `trim_blocks` and
//! `lstrip_blocks` are on, Python's string and list methods exist, and `raise_exception` ends rendering with the
//! template's own error.

use cfq_proto::job::ChatMessage;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};

use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::safetensors::ModelFolder;
use crate::model::tokenizer::Vocabulary;

/// Maximum number of template instructions per rendering: far beyond any real conversation, but it stops endless loops.
const MAX_TEMPLATE_INSTRUCTIONS: u64 = 10_000_000;

/// A parsed chat template, with the names of the BOS and EOS tokens that it may insert.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

/// Rendering failed: the template raised an exception or is faulty for these messages.
#[derive(Debug, thiserror::Error)]
#[error("the model's chat template rejects these messages: {reason}")]
pub struct TemplateError {
    reason: String,
}

impl ChatTemplate {
    /// Reads and parses the template of `file`.
    ///
    /// # Errors
    /// [`HeaderError::Unsupported`] if there is none or it does not parse; I/O errors of the template's own file.
    pub fn read(file: &ModelFile, vocabulary: &Vocabulary) -> Result<Self, HeaderError> {
        let source = match file {
            ModelFile::Gguf(header) => header.get_str("tokenizer.chat_template").map(str::to_owned),
            ModelFile::Folder(folder) => template_in_folder(folder)?,
        };
        let source = source.ok_or_else(|| {
            file.unsupported("it has no chat template; models made for chat have one (they are often named -Instruct)")
        })?;
        let template = Self::new(&source, vocabulary.bos_name(), vocabulary.eos_name());
        template
            .environment
            .template_from_str(&template.source)
            .map_err(|error| file.unsupported(format!("its chat template cannot be parsed: {error}")))?;
        Ok(template)
    }

    fn new(source: &str, bos: &str, eos: &str) -> Self {
        let mut environment = Environment::new();
        if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
            environment.set_syntax(syntax);
        }
        environment.set_fuel(Some(MAX_TEMPLATE_INSTRUCTIONS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        });
        Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() }
    }

    /// Renders the conversation up to the beginning of the assistant's reply.
    ///
    /// # Errors
    /// If the template raises an exception, or fails on these messages.
    pub fn render(&self, messages: &[ChatMessage]) -> Result<String, TemplateError> {
        let messages: Vec<_> =
            messages.iter().map(|m| context! { role => m.role.as_str(), content => &m.content }).collect();
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
            .map_err(|error| TemplateError { reason: error.to_string() })
    }
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
mod tests {
    use std::path::Path;

    use super::*;
    use cfq_proto::job::ChatRole;

    fn user(content: &str) -> Vec<ChatMessage> {
        vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }]
    }

    #[test]
    fn python_methods_and_block_trimming_work() {
        let source = "{% for m in messages %}\n{{ m['role'].upper() }}: {{ m.content.strip() }}\n{% endfor %}\n{% if add_generation_prompt %}ASSISTANT:{% endif %}";
        let text = ChatTemplate::new(source, "<s>", "</s>").render(&user(" hi ")).unwrap();
        assert_eq!(text, "USER: hi\nASSISTANT:");
    }

    #[test]
    fn raise_exception_ends_rendering_with_its_reason() {
        let source = "{{ raise_exception('roles must alternate') }}";
        let error = ChatTemplate::new(source, "", "").render(&user("x")).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[derive(serde::Deserialize)]
    struct Conversation {
        messages: Vec<ChatMessage>,
        text: String,
        ids: Vec<u32>,
    }

    // Expected: transformers' rendering of the same template (tests/fixtures/chat_models.py).
    #[test]
    fn conversations_match_transformers_and_have_one_bos_token() {
        for family in ["deepseek-distill", "deepseek-distill-qwen", "mistral-tekken"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
            let expected = std::fs::read_to_string(folder.join("conversations.json")).unwrap();
            let expected: Vec<Conversation> = serde_json::from_str(&expected).unwrap();
            assert!(!expected.is_empty());
            for path in [folder.join("model.gguf"), folder] {
                let file = ModelFile::read(&path).unwrap();
                let vocabulary = Vocabulary::read(&file).unwrap();
                let template = ChatTemplate::read(&file, &vocabulary).unwrap();
                for Conversation { messages, text, ids } in &expected {
                    assert_eq!(&template.render(messages).unwrap(), text, "{}", path.display());
                    assert_eq!(&vocabulary.encode_sequence(text).unwrap(), ids, "{}: {text:?}", path.display());
                }
            }
        }
    }
}
