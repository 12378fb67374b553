//! When enough of an answer is written. A report that is made of JSON, its verdict first, may settle what follows from it
//! long before its end; who asks for it says beforehand what settles it, as data, and the node stops writing there.
//!
//! Only what is whole counts: a number may still get another digit, a list another entry. So a field is known when a comma
//! or the object's end stands behind it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The rest is not wanted once this holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Enough {
    /// A field of the answer that is a number ...
    pub number: String,
    /// ... and is at least this ...
    pub from: f64,
    /// ... and less than this.
    pub below: f64,
    /// A field that must be known as well.
    pub known: String,
    /// Text that must not stand in what is known; empty is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub without: String,
}

impl Enough {
    /// What is known of the answer, if it is enough.
    pub fn of(&self, text: &str) -> Option<Map<String, Value>> {
        let (known, fields) = known(text)?;
        let number = fields.get(&self.number)?.as_f64()?;
        let settled = (self.from..self.below).contains(&number)
            && fields.contains_key(&self.known)
            && (self.without.is_empty() || !known.contains(&self.without));
        settled.then_some(fields)
    }
}

/// The fields of an object that is being written which cannot change any more, and the text they are written in.
fn known(text: &str) -> Option<(&str, Map<String, Value>)> {
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
    let known = &text[..end];
    match serde_json::from_str(&format!("{known}}}")).ok()? {
        Value::Object(fields) => Some((known, fields)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn low() -> Enough {
        Enough { number: "score".into(), from: 0.0, below: 60.0, known: "score".into(), without: String::new() }
    }

    #[test]
    fn a_number_counts_when_it_can_get_no_further_digit() {
        assert_eq!(low().of(r#"{"score": 5"#), None, "it may become 59 or 590");
        assert_eq!(low().of(r#"{"score": 5, "#).map(|fields| fields.len()), Some(1));
        assert_eq!(low().of(r#"{"score": 5}"#).map(|fields| fields.len()), Some(1));
        assert_eq!(low().of(r#"{"score": 60, "#), None);
        assert_eq!(low().of(r#"{"a": {"score": 5, "b": 1}, "#), None, "another object's");
        assert_eq!(low().of(r#"Well: {"a": "x, y}", "score": 1e1, "b"#).map(|fields| fields.len()), Some(2));
    }

    #[test]
    fn a_list_counts_when_it_is_closed_and_what_must_not_be_said_is_not() {
        let clean = Enough { known: "defects".into(), without: "critical".into(), ..low() };
        assert_eq!(clean.of(r#"{"score": 5, "defects": ["#), None);
        assert_eq!(clean.of(r#"{"score": 5, "defects": ["minor"]"#), None);
        assert!(clean.of(r#"{"score": 5, "defects": ["minor"], "#).is_some());
        assert_eq!(clean.of(r#"{"score": 5, "defects": ["critical"], "#), None);
        for strange in ["", "}", "{]", "[1]", "{\"score\": 5,, \"x\"", "no object"] {
            assert_eq!(low().of(strange), None, "{strange}");
        }
    }
}
