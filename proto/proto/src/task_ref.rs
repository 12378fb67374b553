//! References from one task to another in a submission: an existing task, or a task of the same batch by its name.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{IdError, TaskKey, TaskNumber};

/// Name of a task within a batch: a letter, then up to 62 letters, digits, `-` and `_`. A text that is a task number or
/// id is not a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct TaskName(String);

impl TaskName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TaskName {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let fits = (1..=63).contains(&text.len())
            && text.starts_with(|first: char| first.is_ascii_alphabetic())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if fits && existing_task(&text).is_none() {
            Ok(Self(text))
        } else {
            let expected = "a letter, then letters, digits, - and _; not a task number such as t42";
            Err(IdError { kind: "task name", text, expected })
        }
    }
}

impl From<TaskName> for String {
    fn from(name: TaskName) -> Self {
        name.0
    }
}

impl fmt::Display for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number or id of a task. Numbers of calls, as in `c5`, are none: no task waits for a call.
fn existing_task(text: &str) -> Option<TaskKey> {
    text.parse::<TaskKey>().ok().filter(|key| !matches!(key, TaskKey::Number(TaskNumber(..0))))
}

/// Reference to a task in a submission: the number or id of an existing task, or the name of a task of the same batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub enum TaskRef {
    /// An existing task.
    Key(#[schemars(with = "String")] TaskKey),
    /// Another task of the same batch.
    Name(TaskName),
}

impl FromStr for TaskRef {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        if let Some(key) = existing_task(text) {
            return Ok(Self::Key(key));
        }
        TaskName::try_from(text.to_owned()).map(Self::Name).map_err(|error| IdError {
            kind: "task",
            expected: "a number as in t42, a task id, or the name of a task of the same batch",
            ..error
        })
    }
}

impl TryFrom<String> for TaskRef {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<TaskRef> for String {
    fn from(task: TaskRef) -> Self {
        task.to_string()
    }
}

impl fmt::Display for TaskRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => key.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_is_a_number_an_id_or_a_name() {
        assert_eq!("t3".parse(), Ok(TaskRef::Key(TaskKey::Number(TaskNumber(3)))));
        assert!(matches!("c3".parse().unwrap(), TaskRef::Name(name) if name.as_str() == "c3"));
        let name: TaskRef = "write-tests".parse().unwrap();
        assert!(matches!(&name, TaskRef::Name(name) if name.as_str() == "write-tests"), "{name:?}");
        assert_eq!(serde_json::to_string(&name).unwrap(), "\"write-tests\"");
        assert_eq!(serde_json::from_str::<TaskRef>("\"write-tests\"").unwrap(), name);
        for bad in ["", "t0 ", "-a", "a b", "ä", &"x".repeat(64)] {
            assert!(bad.parse::<TaskRef>().is_err(), "{bad:?}");
        }
        for number in ["t42", "7"] {
            assert!(TaskName::try_from(number.to_owned()).is_err(), "{number:?}");
        }
    }
}
