//! The critic's reply as lines, while it is written: one for the score, each defect, each suggestion and each required
//! change, as soon as it is complete. The reply is a JSON object, of which only a prefix is known.

use serde::Deserialize;
use serde_json::Value;

/// The lists of a report, and the word before their entries.
const LISTS: [(&str, &str); 3] = [("defects", ""), ("suggestions", "suggested "), ("required_changes", "required  ")];

/// Text of a critic, from which lines are taken.
#[derive(Debug, Default)]
pub struct ReviewLines {
    text: String,
    /// Bytes of `text` that have been read.
    read: usize,
    /// The list whose entries follow.
    list: Option<(&'static str, &'static str)>,
    /// True if entries or a score were found, and nothing that is no JSON.
    pub found: bool,
    /// True if an entry of a list is no JSON, so that others may be missing.
    is_damaged: bool,
}

/// Part of a report that is complete.
enum Found {
    Key(String),
    Score(f64),
    Entry(Value),
    EndOfList,
    /// An entry that is no JSON.
    Damaged,
}

impl ReviewLines {
    /// The lines that are complete with the new part of the text.
    pub fn push(&mut self, new: &str) -> Vec<String> {
        self.text.push_str(new);
        let mut lines = Vec::new();
        loop {
            let (end, found) = next(&self.text[self.read..], self.list.is_some());
            self.read += end;
            let Some(found) = found else { break };
            match found {
                Found::Key(key) => self.list = LISTS.into_iter().find(|(name, _)| *name == key),
                Found::Score(score) => lines.push(format!("score {score:.0}")),
                Found::EndOfList => self.list = None,
                Found::Damaged => (self.list, self.is_damaged) = (None, true),
                Found::Entry(entry) => lines.extend(self.list.and_then(|(_, word)| line(word, &entry))),
            }
        }
        self.found = (self.found || !lines.is_empty()) && !self.is_damaged;
        lines
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// An entry of a list as a line.
fn line(word: &str, entry: &Value) -> Option<String> {
    if let Some(text) = entry.as_str() {
        if text.trim().is_empty() {
            return None;
        }
        return Some(format!("{word}{}", text.replace('\n', " ")));
    }
    // As the model wrote it: the report may use other words for a severity than cfq.
    let field = |name: &str| entry.get(name).and_then(Value::as_str).map(str::trim).filter(|text| !text.is_empty());
    let place = field("location").map(|location| format!("{location}: ")).unwrap_or_default();
    let description = field("description").map_or_else(|| entry.to_string(), str::to_owned);
    let mut text = format!("{:9} {place}{description}", field("severity").unwrap_or("defect"));
    if let Some(fix) = field("suggested_fix") {
        text += &format!(" (fix: {fix})");
    }
    Some(text.replace('\n', " "))
}

/// The next complete part of a report in the text, and the number of bytes that were read up to its end; the rest of the
/// text is read again when more of it is known. In a list, entries are looked for, else keys.
fn next(text: &str, in_list: bool) -> (usize, Option<Found>) {
    if in_list {
        return next_entry(text);
    }
    let mut read = 0;
    while let Some(start) = text[read..].find('"').map(|start| read + start) {
        let (key, end) = match value_at::<String>(text, start) {
            Parsed::Complete(key, end) => (key, end),
            Parsed::Incomplete => return (start, None),
            Parsed::Invalid => {
                read = start + 1;
                continue;
            }
        };
        let after = text[end..].trim_start();
        if after.is_empty() {
            // Whether a `:` follows is not known yet.
            return (start, None);
        }
        let value = after.strip_prefix(':').map(str::trim_start).unwrap_or(after);
        let at = text.len() - value.len();
        let is_list = LISTS.iter().any(|(name, _)| *name == key);
        if !after.starts_with(':') || (key != "quality_score" && !is_list) {
            read = end;
            continue;
        }
        if value.is_empty() {
            return (start, None);
        }
        if is_list && value.starts_with('[') {
            return (at + 1, Some(Found::Key(key)));
        }
        if key == "quality_score" {
            // A number is complete when another character follows it.
            let is_digit = |c: char| matches!(c, '0'..='9' | '.' | '-' | '+' | 'e' | 'E');
            let Some(digits) = value.find(|c| !is_digit(c)) else { return (start, None) };
            if let Ok(score) = value[..digits].parse() {
                return (at + digits, Some(Found::Score(score)));
            }
        }
        read = end;
    }
    (text.len(), None)
}

fn next_entry(text: &str) -> (usize, Option<Found>) {
    let Some(start) = text.find(|c: char| !c.is_whitespace() && c != ',') else { return (text.len(), None) };
    if !text[start..].starts_with(['{', '"']) {
        // The end of the list, or no JSON.
        let end = start + text[start..].chars().next().map_or(0, char::len_utf8);
        return (end, Some(Found::EndOfList));
    }
    match value_at(text, start) {
        Parsed::Complete(entry, end) => (end, Some(Found::Entry(entry))),
        Parsed::Incomplete => (start, None),
        Parsed::Invalid => (start + 1, Some(Found::Damaged)),
    }
}

/// A JSON value in a text of which a prefix is known.
enum Parsed<T> {
    /// The value, and where it ends.
    Complete(T, usize),
    Incomplete,
    Invalid,
}

fn value_at<T: for<'de> Deserialize<'de>>(text: &str, start: usize) -> Parsed<T> {
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<T>();
    match values.next() {
        Some(Ok(value)) => Parsed::Complete(value, start + values.byte_offset()),
        Some(Err(error)) if error.is_eof() => Parsed::Incomplete,
        None => Parsed::Incomplete,
        Some(Err(_)) => Parsed::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"Here: {"quality_score": 60, "defects": [{"severity": "critical", "category": "correctness",
        "location": "a.py:3", "description": "wrong \"]\" for {}", "suggested_fix": "check\nit"}, {"severity": "minor",
        "category": "style", "location": "", "description": "long"}], "suggestions": ["", "explain: \"defects\""],
        "required_changes": [ ]}"#;

    #[test]
    fn lines_are_the_same_in_pieces_of_every_size() {
        let expected = [
            "score 60",
            "critical  a.py:3: wrong \"]\" for {} (fix: check it)",
            "minor     long",
            "suggested explain: \"defects\"",
        ];
        for size in [1, 2, 3, 7, 64, 1_000] {
            let mut lines = ReviewLines::default();
            let chars: Vec<char> = REPORT.chars().collect();
            let found: Vec<String> =
                chars.chunks(size).flat_map(|piece| lines.push(&piece.iter().collect::<String>())).collect();
            assert_eq!(found, expected, "{size}");
            assert!(lines.found);
        }
    }

    #[test]
    fn a_line_appears_with_its_last_character() {
        let mut lines = ReviewLines::default();
        let end = REPORT.find("}, {").unwrap();
        assert_eq!(lines.push(&REPORT[..end]), ["score 60"]);
        assert_eq!(lines.push(&REPORT[end..end + 1]).len(), 1);
    }

    #[test]
    fn other_text_has_no_lines() {
        for text in [
            "I cannot review this.",
            "{\"quality_score\": \"high\"}",
            "\"unfinished",
            "{\"defects\": 3, \"a\": \"b\"}",
            "",
        ] {
            let mut lines = ReviewLines::default();
            assert!(lines.push(text).is_empty() && !lines.found, "{text}");
        }
    }

    #[test]
    fn other_words_and_damaged_entries_are_not_lost() {
        let mut lines = ReviewLines::default();
        let blocker =
            r#"{"defects": [{"severity": "Blocker", "location": "a.py:1", "description": "wrong"}, {"note": 1}, "#;
        assert_eq!(lines.push(blocker), ["Blocker   a.py:1: wrong", "defect    {\"note\":1}"]);
        assert!(lines.found);
        lines.push("{\"severity\": \"minor\", \"description\": \"two\nlines\"}]}");
        assert!(!lines.found, "the whole reply is printed");
    }

    #[test]
    fn quotes_in_prose_do_not_hide_the_report() {
        let mut lines = ReviewLines::default();
        assert_eq!(lines.push(&format!("The \"name\nis odd.\n{REPORT}")).len(), 4);
    }
}
