//! Labels of tasks, by which users select tasks.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;

/// Label of a task: up to 63 letters, digits and `-`, `_`, `.`, `/`, `=`, as in `nightly` or `team=web`. The first
/// character is a letter or a digit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Label(String);

impl Label {
    /// Returns the label as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Label {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let fits = (1..=63).contains(&text.len())
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./=".contains(&b));
        let expected = "up to 63 letters, digits and - _ . / =, beginning with a letter or a digit";
        if fits { Ok(Self(text)) } else { Err(IdError { kind: "label", text, expected }) }
    }
}

impl FromStr for Label {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::try_from(text.to_owned())
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_the_documented_form() {
        for good in ["nightly", "team=web", "a/b.c-d_e", "7"] {
            assert_eq!(good.parse::<Label>().unwrap().as_str(), good);
        }
        for bad in ["", "-x", "a b", "a,b", "ä", "a&b", &"x".repeat(64)] {
            let error = bad.parse::<Label>().unwrap_err().to_string();
            assert!(error.contains("is not a label"), "{error}");
        }
    }
}
