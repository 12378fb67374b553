//! Names of control tokens in prompts for a server.
//!
//! The server renders the chat template, and most servers then turn every name of a control token in the text into that
//! token, so the content of a file could end a turn and begin another. If the server reports its chat template or its
//! tokens (`reported_names`), the names are known: in contents they get an invisible character, and replies that repeat
//! it lose it again.

use std::collections::BTreeSet;

use cfq_proto::job::ChatMessage;

/// ZERO WIDTH SPACE, inserted after the first character of a name.
const INVISIBLE: char = '\u{200B}';
/// Maximum length of a name, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of names of a model. Models have up to about a thousand control tokens.
const MAX_NAMES: usize = 4096;
/// Maximum bytes of a chat template that are searched for names. The largest templates have about 20 KiB.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Names without a bar, of Llama 2, Mistral and Gemma.
const PLAIN_NAMES: [&str; 6] = ["<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"];

/// The names in a chat template: sorted, and none is the beginning of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ControlNames(Vec<String>);

impl ControlNames {
    /// The names in the source of a chat template.
    pub(super) fn of_template(source: &str) -> Self {
        // The server is not trusted, so the search is limited: here in the template, below in each name.
        let source = &source[..source.floor_char_boundary(MAX_TEMPLATE_BYTES)];
        let names = source.match_indices(['<', '[']).filter_map(|(at, open)| {
            let rest = &source[at..];
            let close = if open == "<" { b'>' } else { b']' };
            let name = &rest[..=rest.bytes().take(MAX_NAME_BYTES).position(|byte| byte == close)?];
            let inner = name.get(1..name.len() - 1)?;
            let is_name = match open {
                "<" => PLAIN_NAMES.contains(&name) || inner.contains(['|', '\u{FF5C}']) && !inner.contains(['\'', '"']),
                _ => inner.len() > 2 && inner.chars().all(|c| c.is_ascii_uppercase() || matches!(c, '/' | '_')),
            };
            is_name.then_some(name)
        });
        let mut names: BTreeSet<&str> = names.collect();
        // Names that the template composes, as in '<|' + role + '|>'.
        if source.contains("<|'") || source.contains("<|\"") {
            names.insert("<|");
        }
        Self(Vec::new()).with(names.into_iter().map(str::to_owned))
    }

    /// Adds names, up to [`MAX_NAMES`] in total. Names of another form are left out: a server could call every letter a
    /// control token.
    pub(super) fn with(mut self, names: impl IntoIterator<Item = String>) -> Self {
        let names = names.into_iter().filter(|name| (2..=MAX_NAME_BYTES).contains(&name.len()));
        let free = MAX_NAMES.saturating_sub(self.0.len());
        self.0.extend(names.filter(|name| name.starts_with(['<', '['])).take(free));
        self.0.sort_unstable();
        // Every text that begins with the longer name begins with the shorter one too.
        self.0.dedup_by(|name, shorter| name.starts_with(shorter.as_str()));
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
            if matches!(c, '<' | '[') && self.begins_with_name(&text[at..]) {
                escaped.push(INVISIBLE);
            }
        }
        escaped
    }

    /// Whether a name is the beginning of `text`. Since no name is the beginning of another one, only the last name in
    /// the order up to `text` can be.
    fn begins_with_name(&self, text: &str) -> bool {
        let up_to_text = self.0.partition_point(|name| name.as_str() <= text);
        self.0[..up_to_text].last().is_some_and(|name| text.starts_with(name.as_str()))
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
    use proptest::prelude::*;

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

    #[test]
    fn number_of_names_is_limited() {
        let numbered = || (0..2 * MAX_NAMES).map(|n| format!("<|{n}|>"));
        let names = ControlNames::of_template(&numbered().collect::<String>());
        assert_eq!(names.0.len(), MAX_NAMES);
        assert_eq!(ControlNames::of_template("<|a|>").with(numbered()).0.len(), MAX_NAMES);
        assert_eq!(names.with(numbered()).0.len(), MAX_NAMES);
    }

    #[test]
    fn only_the_beginning_of_a_long_template_is_searched() {
        // The limit is within a character.
        let source = format!("<|a|>{}<|b|>", "\u{FF5C}".repeat(MAX_TEMPLATE_BYTES / 3));
        assert!(!source.is_char_boundary(MAX_TEMPLATE_BYTES));
        assert_eq!(ControlNames::of_template(&source).0, ["<|a|>"]);
    }

    #[test]
    fn openings_without_an_end_are_searched_in_linear_time() {
        // A search that goes through the rest of the template for each opening takes days.
        let source = format!("<|a|>{}", "<".repeat(60 << 20));
        assert_eq!(ControlNames::of_template(&source).0, ["<|a|>"]);
    }

    proptest! {
        #[test]
        fn exactly_the_beginnings_of_names_are_made_invalid(
            reported in proptest::collection::vec("[<\\[][<|ab\u{FF5C}]{1,3}", 0..12),
            text in "[<\\[|ab\u{FF5C}]{0,32}",
        ) {
            let mut expected = String::new();
            for (at, c) in text.char_indices() {
                expected.push(c);
                if reported.iter().any(|name| text[at..].starts_with(name)) {
                    expected.push(INVISIBLE);
                }
            }
            let (first, second) = reported.split_at(reported.len() / 2);
            let names = ControlNames(Vec::new()).with(first.to_vec()).with(second.to_vec());
            prop_assert_eq!(names.escape_text(&text), expected);
        }
    }
}
