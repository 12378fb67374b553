//! Search for the names of control tokens in text.

use std::collections::{HashMap, HashSet};

/// The names of a vocabulary's control tokens.
#[derive(Debug, Default)]
pub struct ControlNames {
    by_first_char: HashMap<char, Vec<String>>,
    chars: HashSet<char>,
}

impl ControlNames {
    /// Indexes the names.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let mut index = Self::default();
        for name in names {
            let Some(first) = name.chars().next() else { continue };
            index.chars.extend(name.chars().filter(|c| !c.is_whitespace()));
            index.by_first_char.entry(first).or_default().push(name);
        }
        index
    }

    /// All characters of the names, without white space: templates trim it.
    pub fn chars(&self) -> &HashSet<char> {
        &self.chars
    }

    /// Byte ranges of all names in `text`; names may overlap.
    pub fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = std::ops::Range<usize>> + 'a {
        text.char_indices().flat_map(move |(at, c)| {
            let names = self.by_first_char.get(&c).map_or(&[][..], Vec::as_slice).iter();
            names.filter(move |name| text[at..].starts_with(name.as_str())).map(move |name| at..at + name.len())
        })
    }

    /// Whether `text` contains a name or is a part of one.
    pub fn overlaps(&self, text: &str) -> bool {
        let mut names = self.by_first_char.values().flatten();
        names.any(|name| name.contains(text)) || self.find(text).next().is_some()
    }
}

/// Whether an added token that is declared as text is a control token by its name: DeepSeek's turn markers
/// `<｜User｜>` and `<｜Assistant｜>` are declared as text. Tags like `<think>` are text that models read and write.
pub fn is_control_name(name: &str) -> bool {
    let within = |open, close| name.starts_with(open) && name.ends_with(close);
    within('<', '>') && name.contains(['|', '\u{FF5C}']) || within('[', ']') && name.len() > 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_names_are_found() {
        let names = ControlNames::new(["<|a|>", "|><|b", "x y"].map(str::to_owned));
        assert_eq!(names.find("é<|a|><|b|>x y").collect::<Vec<_>>(), [2..7, 5..10, 12..15]);
        assert!(names.overlaps("<|") && names.overlaps("-<|a|>-") && !names.overlaps("</think>"));
        assert!(names.chars().contains(&'y') && !names.chars().contains(&' '));
    }

    #[test]
    fn turn_markers_are_control_tokens_and_tags_are_not() {
        assert!(is_control_name("<｜User｜>") && is_control_name("<|user|>") && is_control_name("[INST]"));
        assert!(!is_control_name("<think>") && !is_control_name("\n\n") && !is_control_name("[]"));
    }
}
