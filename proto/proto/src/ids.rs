//! Typed ids: a job's id cannot be passed where a task's is expected. The ids are UUIDv7, so they sort by creation
//! time. Exceptions: a node or runner is identified by its name, and a task has a number too, which users type.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Text that is not a valid id or name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {} {kind}: {expected}", article(kind))]
pub struct IdError {
    /// Kind of id or name that was expected, for example `task number`.
    pub kind: &'static str,
    /// The rejected text.
    pub text: String,
    /// Description of the accepted form.
    pub expected: &'static str,
}

fn article(noun: &str) -> &'static str {
    if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// Creates an id that sorts after all earlier ones of this process.
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
                    kind: $kind,
                    text: text.to_owned(),
                    expected: "a UUID",
                })
            }
        }
    };
}

uuid_id!(
    /// Id of a task.
    TaskId, "task id"
);
uuid_id!(
    /// Id of a job, one model call of a task.
    JobId, "job id"
);
uuid_id!(
    /// Id of a lease, the right to act for one attempt; every grant creates a new one.
    LeaseId, "lease id"
);
uuid_id!(
    /// Id of one start (boot) of a node or runner process. Leases belong to a boot, not to a name.
    BootId, "boot id"
);
uuid_id!(
    /// Id of a runner's request for a lease; a repeated request has the same id.
    LeaseRequestId, "id of a lease request"
);
uuid_id!(
    /// Id of an artifact, the creator's result of one iteration.
    ArtifactId, "artifact id"
);
uuid_id!(
    /// Id of a question to a human.
    QuestionId, "question id"
);
uuid_id!(
    /// Id of an API token.
    ApiTokenId, "token id"
);

impl ApiTokenId {
    /// Stands for the token in the data folder of the server, whose holder owns the server.
    pub const OWNER: Self = Self(Uuid::nil());
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Creates a name after checking it: 1 to 63 characters of `a-z`, `0-9` and `-`. A name is used as one
            /// token of a NATS subject, so it must not contain a wildcard or separator.
            ///
            /// # Errors
            /// [`IdError`] for any other text.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                let fits = (1..=63).contains(&text.len())
                    && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
                if fits {
                    Ok(Self(text))
                } else {
                    Err(IdError { kind: $kind, text, expected: "1 to 63 of a-z, 0-9 and -" })
                }
            }

            /// Returns the name as text.
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
    /// Name of a node, a machine that runs models.
    NodeId, "node name"
);
name_id!(
    /// Name of a runner, a process that runs the loops of tasks.
    RunnerId, "runner name"
);
name_id!(
    /// Name of an API token.
    ApiTokenName, "token name"
);

/// Number of a task as users type it: `t42`. Calls of clients of the OpenAI-compatible API have negative numbers, written
/// as in `c42`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct TaskNumber(pub i64);

impl fmt::Display for TaskNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            call @ ..0 => write!(f, "c{}", call.unsigned_abs()),
            task => write!(f, "t{task}"),
        }
    }
}

impl FromStr for TaskNumber {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let (sign, digits) = match text.strip_prefix('c') {
            Some(call) => (-1, call),
            None => (1, text.strip_prefix('t').unwrap_or(text)),
        };
        digits.parse::<i64>().ok().filter(|n| *n > 0).map(|n| Self(sign * n)).ok_or(IdError {
            kind: "task number",
            text: text.to_owned(),
            expected: "t followed by a number, as in t42",
        })
    }
}

/// Reference to a task as users type it: its number or its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskKey {
    /// The task's number.
    Number(TaskNumber),
    /// The task's id.
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

impl JobId {
    /// The job of an artifact that no job made.
    pub const NONE: Self = Self(Uuid::nil());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_with_subject_wildcard_is_rejected() {
        for bad in ["", "a.b", "*", ">", "A", "a b", &"x".repeat(64)] {
            assert!(NodeId::new(bad).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<NodeId>("\"a.b\"").is_err());
        assert_eq!(NodeId::new("gaming-pc").unwrap().as_str(), "gaming-pc");
    }

    #[test]
    fn rejected_id_is_named_in_plain_words() {
        let job = "x".parse::<JobId>().unwrap_err().to_string();
        assert_eq!(job, "\"x\" is not a job id: a UUID");
        let artifact = "x".parse::<ArtifactId>().unwrap_err().to_string();
        assert!(artifact.starts_with("\"x\" is not an artifact id:"), "{artifact}");
        let node = NodeId::new("A").unwrap_err().to_string();
        assert!(node.starts_with("\"A\" is not a node name:"), "{node}");
        let agent = "gamma".parse::<crate::task::Agent>().unwrap_err().to_string();
        assert_eq!(agent, "\"gamma\" is not an agent: alpha or beta");
    }

    #[test]
    fn task_key_is_a_number_or_an_id() {
        assert_eq!("t42".parse::<TaskKey>().unwrap(), TaskKey::Number(TaskNumber(42)));
        assert_eq!("42".parse::<TaskKey>().unwrap(), TaskKey::Number(TaskNumber(42)));
        assert_eq!("c42".parse::<TaskKey>().unwrap().to_string(), "c42");
        let id = TaskId::fresh();
        assert_eq!(id.to_string().parse::<TaskKey>().unwrap(), TaskKey::Id(id));
        for bad in ["", "t", "t0", "t-1", "c", "c0", "c-1", "x42"] {
            assert!(bad.parse::<TaskKey>().is_err(), "{bad:?}");
        }
    }
}
