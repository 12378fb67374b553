//! Early stop: a condition on a partial JSON answer. In a JSON report that starts with its verdict, the first fields
//! may already fix the caller's decision. The caller describes this case as a condition in the request, and the node
//! stops generating once the condition holds.
//!
//! Only complete values count: an unfinished number may still get another digit, an unfinished list another entry. A
//! field is complete once a comma or the object's end follows it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Condition under which the rest of a JSON answer is not needed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EarlyStop {
    /// Name of the numeric field that the condition checks.
    pub number: String,
    /// Minimum of that field, inclusive.
    pub from: f64,
    /// Maximum of that field, exclusive.
    pub below: f64,
    /// Name of a field that must be complete; it may be the same field.
    pub known: String,
    /// Text that must not occur in the complete fields; empty if any text may occur.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub without: String,
}

impl EarlyStop {
    /// Returns the complete fields of the partial answer `text` if the condition holds.
    pub fn met_by(&self, text: &str) -> Option<Map<String, Value>> {
        let (complete, fields) = complete_fields(text)?;
        let number = fields.get(&self.number)?.as_f64()?;
        let holds = (self.from..self.below).contains(&number)
            && fields.contains_key(&self.known)
            && (self.without.is_empty() || !complete.contains(&self.without));
        holds.then_some(fields)
    }
}

/// Returns the part of `text` that holds the complete fields of its first JSON object, and these fields. The object may
/// be unfinished.
fn complete_fields(text: &str) -> Option<(&str, Map<String, Value>)> {
    let text = &text[text.find('{')?..];
    let (mut depth, mut string, mut escaped, mut end) = (0u32, false, false, 0);
    for (at, byte) in text.bytes().enumerate() {
        match (string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => string = !string,
            (false, b'{' | b'[') => depth += 1,
            (false, b'}' | b']') => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    end = at;
                    break;
                }
            }
            (false, b',') if depth == 1 => end = at,
            (true | false, _) => {}
        }
    }
    let complete = &text[..end];
    match serde_json::from_str(&format!("{complete}}}")).ok()? {
        Value::Object(fields) => Some((complete, fields)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn low_score() -> EarlyStop {
        EarlyStop { number: "score".into(), from: 0.0, below: 60.0, known: "score".into(), without: String::new() }
    }

    #[test]
    fn number_counts_only_once_it_is_complete() {
        assert_eq!(low_score().met_by(r#"{"score": 5"#), None, "it may become 59 or 590");
        assert_eq!(low_score().met_by(r#"{"score": 5, "#).map(|fields| fields.len()), Some(1));
        assert_eq!(low_score().met_by(r#"{"score": 5}"#).map(|fields| fields.len()), Some(1));
        assert_eq!(low_score().met_by(r#"{"score": 60, "#), None);
        assert_eq!(low_score().met_by(r#"{"a": {"score": 5, "b": 1}, "#), None, "a nested object's field");
        assert_eq!(low_score().met_by(r#"Well: {"a": "x, y}", "score": 1e1, "b"#).map(|fields| fields.len()), Some(2));
    }

    #[test]
    fn list_counts_only_once_closed_and_without_forbidden_text() {
        let no_critical = EarlyStop { known: "defects".into(), without: "critical".into(), ..low_score() };
        assert_eq!(no_critical.met_by(r#"{"score": 5, "defects": ["#), None);
        assert_eq!(no_critical.met_by(r#"{"score": 5, "defects": ["minor"]"#), None);
        assert!(no_critical.met_by(r#"{"score": 5, "defects": ["minor"], "#).is_some());
        assert_eq!(no_critical.met_by(r#"{"score": 5, "defects": ["critical"], "#), None);
        for malformed in ["", "}", "{]", "[1]", "{\"score\": 5,, \"x\"", "no object"] {
            assert_eq!(low_score().met_by(malformed), None, "{malformed}");
        }
    }
}
