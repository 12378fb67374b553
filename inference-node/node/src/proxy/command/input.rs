//! The prompt as a program reads it: one text without roles.

use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt};

/// Added to the system message: agents expect tools otherwise.
const TEXT_ONLY: &str = "Reply with text only. No tools and no files are available.";

/// The texts for a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProgramInput {
    /// Instructions for the whole conversation.
    pub(super) system: String,
    /// The other messages.
    pub(super) prompt: String,
}

impl ProgramInput {
    pub(super) fn of(prompt: &Prompt) -> Self {
        let (system, others): (Vec<&ChatMessage>, Vec<&ChatMessage>) =
            prompt.messages.iter().partition(|message| message.role == ChatRole::System);
        let mut system: Vec<&str> = system.into_iter().map(|message| message.content.as_str()).collect();
        system.push(TEXT_ONLY);
        let mut texts: Vec<String> = match &others[..] {
            [only] => vec![only.content.clone()],
            // A program has no roles, so the authors are named.
            several => {
                several.iter().map(|message| format!("[{}]\n{}", message.role.as_str(), message.content)).collect()
            }
        };
        if let OutputFormat::JsonSchema { schema } = &prompt.format {
            texts.push(format!(
                "Reply with one JSON value that is valid under this JSON schema, without any other text:\n{schema}"
            ));
        }
        Self { system: system.join("\n\n"), prompt: texts.join("\n\n") }
    }

    /// Both texts, for a program that is not told the system message in another way.
    pub(super) fn joined(&self) -> String {
        format!("{}\n\n{}", self.system, self.prompt)
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::Sampling;
    use serde_json::json;

    use super::*;

    fn input(messages: &[(ChatRole, &str)], format: OutputFormat) -> ProgramInput {
        let messages = messages
            .iter()
            .map(|(role, content)| ChatMessage { role: *role, content: (*content).to_owned() })
            .collect();
        ProgramInput::of(&Prompt { messages, sampling: Sampling::default(), format, ..Prompt::default() })
    }

    #[test]
    fn system_message_is_apart_and_authors_are_named_if_there_are_several() {
        use ChatRole::{Assistant, System, User};
        let single = input(&[(System, "Be brief."), (User, "Hello")], OutputFormat::Text);
        assert_eq!((single.system, single.prompt), (format!("Be brief.\n\n{TEXT_ONLY}"), "Hello".to_owned()));
        let several = input(&[(User, "a"), (Assistant, "b"), (User, "c")], OutputFormat::Text);
        assert_eq!(several.prompt, "[user]\na\n\n[assistant]\nb\n\n[user]\nc");
        let schema = input(&[(User, "a")], OutputFormat::JsonSchema { schema: json!({ "type": "object" }) });
        assert!(schema.prompt.ends_with(r#"{"type":"object"}"#), "{}", schema.prompt);
    }
}
