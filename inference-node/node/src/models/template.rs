//! The chat template a model carries, run as the Jinja it is.
//!
//! Templates are written for Python's Jinja2 with Hugging Face's settings: blocks swallow the newline after them, Python's
//! string and list methods exist, and `raise_exception` stops rendering with the template's own words.

use cfq_proto::job::ChatMessage;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};

use crate::models::file::ModelFile;
use crate::models::header::HeaderError;
use crate::models::safetensors::Folder;
use crate::models::tokenizer::Vocabulary;

/// Instructions one rendering may take: far beyond any real conversation, and the end of a template that never ends.
const FUEL: u64 = 10_000_000;

#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

#[derive(Debug, thiserror::Error)]
#[error("the model's chat template refuses these messages: {reason}")]
pub struct TemplateError {
    reason: String,
}

impl ChatTemplate {
    pub fn read(file: &ModelFile, vocabulary: &Vocabulary) -> Result<Self, HeaderError> {
        let source = match file {
            ModelFile::Gguf(header) => header.text("tokenizer.chat_template").map(str::to_owned),
            ModelFile::Folder(folder) => in_folder(folder)?,
        };
        let source = source.ok_or_else(|| {
            file.unsupported("it has no chat template: cfq needs a model made for chat (often named -Instruct)")
        })?;
        let template = Self::new(&source, vocabulary.bos_name(), vocabulary.eos_name());
        template
            .environment
            .template_from_str(&template.source)
            .map_err(|error| file.unsupported(format!("its chat template cannot be read: {error}")))?;
        Ok(template)
    }

    fn new(source: &str, bos: &str, eos: &str) -> Self {
        let mut environment = Environment::new();
        if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
            environment.set_syntax(syntax);
        }
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        });
        Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() }
    }

    /// The text of a conversation, open for the assistant's reply.
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

/// In a file of its own, or in the tokenizer's settings: one, or a list of which the default is meant.
fn in_folder(folder: &Folder) -> Result<Option<String>, HeaderError> {
    if let Some(source) = folder.text("chat_template.jinja")? {
        return Ok(Some(source));
    }
    let settings = folder.json("tokenizer_config.json")?;
    let template = settings.as_ref().and_then(|s| s.get("chat_template"));
    let one = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let default = |all: &Vec<serde_json::Value>| {
        let named = all.iter().find(|t| t.get("name").and_then(|n| n.as_str()) == Some("default"));
        named.and_then(|t| t.get("template")).and_then(one)
    };
    Ok(template.and_then(|t| one(t).or_else(|| t.as_array().and_then(default))))
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
    fn a_template_may_refuse_in_its_own_words() {
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
    fn conversations_read_as_the_references_and_are_opened_once() {
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
