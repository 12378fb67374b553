//! Ids are types: a job's id cannot be handed where a task's is wanted. All are UUIDv7, so they sort by creation, except
//! the names people give to machines and the numbers people type.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// An id that could not be read from text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: {expected}")]
pub struct IdError {
    pub kind: &'static str,
    pub text: String,
    pub expected: &'static str,
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A fresh id, later than all earlier ones of this process.
            pub fn fresh() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Uuid::parse_str(text).map(Self).map_err(|_| IdError {
                    kind: stringify!($name),
                    text: text.to_owned(),
                    expected: "a UUID",
                })
            }
        }
    };
}

uuid_id!(
    /// What a user asked for.
    TaskId
);
uuid_id!(
    /// One model call of a task.
    JobId
);
uuid_id!(
    /// The right to act for one attempt; a new one is made with every grant.
    LeaseId
);
uuid_id!(
    /// One start of a node or runner process: the same name with another boot is another holder.
    BootId
);
uuid_id!(
    /// What a creator made in one iteration.
    ArtifactId
);
uuid_id!(
    /// Something only the human can answer.
    QuestionId
);

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// 1 to 63 of `a-z`, `0-9` and `-`: it is one token of a NATS subject and must never widen one.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                let fits = (1..=63).contains(&text.len())
                    && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
                if fits {
                    Ok(Self(text))
                } else {
                    Err(IdError { kind: stringify!($name), text, expected: "1 to 63 of a-z, 0-9 and -" })
                }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }
    };
}

name_id!(
    /// A machine that runs models.
    NodeId
);
name_id!(
    /// A process that drives tasks.
    RunnerId
);

/// The number people type: `t42`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct TaskNumber(pub i64);

impl fmt::Display for TaskNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

impl FromStr for TaskNumber {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        text.strip_prefix('t').unwrap_or(text).parse::<i64>().ok().filter(|n| *n > 0).map(Self).ok_or(IdError {
            kind: "task number",
            text: text.to_owned(),
            expected: "t followed by a number, as in t42",
        })
    }
}

/// What a user may type for a task: its number or its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskKey {
    Number(TaskNumber),
    Id(TaskId),
}

impl FromStr for TaskKey {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        if let Ok(id) = text.parse::<TaskId>() {
            return Ok(Self::Id(id));
        }
        text.parse::<TaskNumber>().map(Self::Number).map_err(|_| IdError {
            kind: "task",
            text: text.to_owned(),
            expected: "a number as in t42, or a task id",
        })
    }
}

impl fmt::Display for TaskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(n) => n.fmt(f),
            Self::Id(id) => id.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_widen_a_subject() {
        for bad in ["", "a.b", "*", ">", "A", "a b", &"x".repeat(64)] {
            assert!(NodeId::new(bad).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<NodeId>("\"a.b\"").is_err());
        assert_eq!(NodeId::new("gaming-pc").unwrap().as_str(), "gaming-pc");
    }

    #[test]
    fn a_task_is_found_by_number_or_id() {
        assert_eq!("t42".parse::<TaskKey>().unwrap(), TaskKey::Number(TaskNumber(42)));
        assert_eq!("42".parse::<TaskKey>().unwrap(), TaskKey::Number(TaskNumber(42)));
        let id = TaskId::fresh();
        assert_eq!(id.to_string().parse::<TaskKey>().unwrap(), TaskKey::Id(id));
        for bad in ["", "t", "t0", "t-1", "x42"] {
            assert!(bad.parse::<TaskKey>().is_err(), "{bad:?}");
        }
    }
}
