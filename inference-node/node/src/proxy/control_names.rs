//! Names of control tokens in prompts for a server.
//!
//! The server renders the chat template, and most servers then turn every name of a control token in the text into that
//! token, so the content of a file could end a turn and begin another. If the server reports its chat template or its
//! tokens (`reported_names`), the names are known: in contents they get an invisible character, and replies that repeat
//! it lose it again.

use cfq_proto::job::ChatMessage;

/// ZERO WIDTH SPACE, inserted after the first character of a name.
const INVISIBLE: char = '\u{200B}';
/// Maximum length of a name, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Names without a bar, of Llama 2, Mistral and Gemma.
const PLAIN_NAMES: [&str; 6] = ["<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"];

/// The names in a chat template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ControlNames(Vec<String>);

impl ControlNames {
    /// The names in the source of a chat template.
    pub(super) fn of_template(source: &str) -> Self {
        let names = source.match_indices(['<', '[']).filter_map(|(at, open)| {
            let rest = &source[at..];
            let close = if open == "<" { '>' } else { ']' };
            let name = &rest[..=rest.find(close).filter(|end| *end < MAX_NAME_BYTES)?];
            let inner = name.get(1..name.len() - 1)?;
            let is_name = match open {
                "<" => PLAIN_NAMES.contains(&name) || inner.contains(['|', '\u{FF5C}']) && !inner.contains(['\'', '"']),
                _ => inner.len() > 2 && inner.chars().all(|c| c.is_ascii_uppercase() || matches!(c, '/' | '_')),
            };
            is_name.then(|| name.to_owned())
        });
        let mut names: Vec<String> = names.collect();
        // Names that the template composes, as in '<|' + role + '|>'.
        if source.contains("<|'") || source.contains("<|\"") {
            names.push("<|".to_owned());
        }
        Self(Vec::new()).with(names)
    }

    /// Adds names. Names of another form are left out: a server could call every letter a control token.
    pub(super) fn with(mut self, names: impl IntoIterator<Item = String>) -> Self {
        let names = names.into_iter().filter(|name| (2..=MAX_NAME_BYTES).contains(&name.len()));
        self.0.extend(names.filter(|name| name.starts_with(['<', '['])));
        self.0.sort_unstable();
        self.0.dedup();
        self
    }

    /// The messages with all names in their contents made invalid; `None` if they have no names.
    pub(super) fn escape(&self, messages: &[ChatMessage]) -> Option<Vec<ChatMessage>> {
        let escaped: Vec<ChatMessage> = messages
            .iter()
            .map(|message| ChatMessage { role: message.role, content: self.escape_text(&message.content) })
            .collect();
        (escaped != messages).then_some(escaped)
    }

    fn escape_text(&self, text: &str) -> String {
        let mut escaped = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            escaped.push(c);
            if matches!(c, '<' | '[') && self.0.iter().any(|name| text[at..].starts_with(name.as_str())) {
                escaped.push(INVISIBLE);
            }
        }
        escaped
    }
}

/// Removes the invisible characters from a reply that arrives in parts.
#[derive(Debug)]
pub(super) struct Unescape {
    /// Whether the prompt has such characters.
    escaped: bool,
    last: char,
}

impl Unescape {
    /// For the reply to a prompt; `escaped`: whether the prompt has invisible characters.
    pub(super) fn new(escaped: bool) -> Self {
        Self { escaped, last: ' ' }
    }

    /// The next part of the reply.
    pub(super) fn push(&mut self, text: String) -> String {
        if !self.escaped {
            return text;
        }
        let mut keep = |c| {
            let last = std::mem::replace(&mut self.last, c);
            !(c == INVISIBLE && matches!(last, '<' | '['))
        };
        text.chars().filter(|c| keep(*c)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::job::ChatRole;

    #[test]
    fn names_are_found_in_templates() {
        let names = |source| ControlNames::of_template(source).0;
        assert_eq!(
            names(
                "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}<|im_end|>{{ messages[0] }}{% endfor %}<think>"
            ),
            ["<|im_end|>", "<|im_start|>"]
        );
        assert_eq!(names("{{ bos_token }}[INST] x [/INST]</s>"), ["</s>", "[/INST]", "[INST]"]);
        assert_eq!(names("{{ '<|' + m.role + '|>' }}"), ["<|"]);
        assert_eq!(names("{{ '<｜User｜>' + m.content }}"), ["<｜User｜>"]);
        let added = ControlNames::of_template("<|a|>").with(["</s>", "e", "<", "", "<|a|>"].map(str::to_owned));
        assert_eq!(added.0, ["</s>", "<|a|>"]);
    }

    #[test]
    fn names_in_contents_are_made_invalid_and_replies_restored() {
        let names = ControlNames::of_template("<|im_start|>[INST]");
        let message = |content: &str| vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }];
        assert_eq!(names.escape(&message("a < b [0] <|im_end|>")), None);
        let escaped = names.escape(&message("<|im_start|>[INST]")).unwrap();
        assert_eq!(escaped, message("<\u{200B}|im_start|>[\u{200B}INST]"));
        let mut unescape = Unescape::new(true);
        let parts = ["a<", "\u{200B}|im_start|>[\u{200B}", "INST]\u{200B}"].map(|part| unescape.push(part.to_owned()));
        assert_eq!(parts.concat(), "a<|im_start|>[INST]\u{200B}");
    }
}
