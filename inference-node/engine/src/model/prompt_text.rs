//! The text of a rendered prompt, which knows which of its characters come from the messages.

/// A text and the origin of its characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptText {
    text: String,
    /// For each byte of `text`, whether it comes from a message's content. Empty if no byte does.
    from_content: Vec<bool>,
}

impl PromptText {
    /// Text of a chat template.
    pub fn of_template(text: impl Into<String>) -> Self {
        Self { text: text.into(), from_content: Vec::new() }
    }

    /// Text of a message's content.
    pub fn of_content(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { from_content: vec![true; text.len()], text }
    }

    /// The characters, each with whether it comes from a message's content.
    pub fn of_chars(chars: impl IntoIterator<Item = (char, bool)>) -> Self {
        let mut prompt = Self::of_template(String::new());
        for (c, from_content) in chars {
            prompt.text.push(c);
            prompt.from_content.resize(prompt.text.len(), from_content);
        }
        prompt
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Position of the first character in `range` that comes from a message's content.
    pub fn first_from_content(&self, range: std::ops::Range<usize>) -> Option<usize> {
        let start = range.start;
        self.from_content.get(range)?.iter().position(|from_content| *from_content).map(|at| start + at)
    }
}
