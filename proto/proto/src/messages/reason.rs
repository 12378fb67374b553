//! Reasons that replies give for a request that was not carried out. In a message, a reason is its text: no receiver
//! distinguishes the causes, and every build can read the reasons of every other one. A received text is `Other`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::blob::BlobHash;

/// Why the scheduler cannot carry out a request now. The sender repeats the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum UnavailableReason {
    /// Postgres is down, overloaded or too slow.
    Database {
        /// The operation that failed.
        doing: String,
    },
    /// The scheduler that received the request is no longer the leader.
    NotLeader,
    /// The boot that sent the request is not registered.
    NotRegistered,
    /// A blob that the request refers to is not stored for this task. The sender must send the blob first.
    MissingBlob {
        /// Hash of the blob.
        hash: BlobHash,
    },
    /// Tokens before the first one in the message are not in the journal. The sender must send the whole journal again.
    JournalGap {
        /// Number of tokens that the journal should have had.
        after: u32,
    },
    /// Reason as free text.
    Other(String),
}

impl From<UnavailableReason> for String {
    fn from(reason: UnavailableReason) -> Self {
        reason.to_string()
    }
}

impl From<String> for UnavailableReason {
    fn from(text: String) -> Self {
        Self::Other(text)
    }
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Database { doing } => write!(f, "Postgres is not available ({doing})"),
            Self::NotLeader => f.write_str("this scheduler is no longer the leader"),
            Self::NotRegistered => f.write_str("this boot of the runner is not registered: register first"),
            Self::MissingBlob { hash } => {
                write!(f, "blob {hash} is not stored, or not for this task: send the blob first")
            }
            Self::JournalGap { after } => write!(f, "the journal has fewer than {after} tokens"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// Why a write can never be carried out. Repeating the request does not help.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum RefusedReason {
    /// Postgres refused the write, for example because a value violates a constraint.
    Database {
        /// The operation that failed.
        doing: String,
    },
    /// The database contains a value that the scheduler cannot read.
    UnreadableRow {
        /// Kind of the value.
        what: String,
        /// The stored value.
        text: String,
    },
    /// The journal would exceed the maximum length.
    JournalTooLong {
        /// Maximum length, in tokens.
        limit: usize,
    },
    /// A token id in the journal is larger than 2^31 - 1.
    TokenIdTooLarge,
    /// The request names a repository other than that of the task.
    OtherRepository {
        /// Path of the task's repository.
        expected: String,
    },
    /// Reason as free text.
    Other(String),
}

impl From<RefusedReason> for String {
    fn from(reason: RefusedReason) -> Self {
        reason.to_string()
    }
}

impl From<String> for RefusedReason {
    fn from(text: String) -> Self {
        Self::Other(text)
    }
}

impl fmt::Display for RefusedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Database { doing } => write!(f, "Postgres refused a statement ({doing})"),
            Self::UnreadableRow { what, text } => {
                write!(f, "the database contains a {what} that this build cannot read: {text:?}")
            }
            Self::JournalTooLong { limit } => write!(f, "a journal has at most {limit} tokens"),
            Self::OtherRepository { expected } => write!(f, "the task belongs to the repository {expected}"),
            Self::TokenIdTooLarge => f.write_str("a token id is above 2^31 - 1"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_its_text_in_a_message() {
        let hash = BlobHash::of(b"x");
        for (reason, text) in [
            (
                UnavailableReason::Database { doing: "placing a job".into() },
                "Postgres is not available (placing a job)".to_owned(),
            ),
            (UnavailableReason::NotLeader, "this scheduler is no longer the leader".to_owned()),
            (
                UnavailableReason::MissingBlob { hash: hash.clone() },
                format!("blob {hash} is not stored, or not for this task: send the blob first"),
            ),
            (UnavailableReason::NotRegistered, "this boot of the runner is not registered: register first".to_owned()),
            (UnavailableReason::JournalGap { after: 3 }, "the journal has fewer than 3 tokens".to_owned()),
        ] {
            let sent = serde_json::to_value(&reason).unwrap();
            assert_eq!(sent, text);
            assert_eq!(serde_json::from_value::<UnavailableReason>(sent).unwrap(), UnavailableReason::Other(text));
        }
        for (reason, text) in [
            (RefusedReason::Database { doing: "writing a job".into() }, "Postgres refused a statement (writing a job)"),
            (
                RefusedReason::UnreadableRow { what: "role".into(), text: "gamma".into() },
                "the database contains a role that this build cannot read: \"gamma\"",
            ),
            (RefusedReason::JournalTooLong { limit: 9 }, "a journal has at most 9 tokens"),
            (RefusedReason::TokenIdTooLarge, "a token id is above 2^31 - 1"),
        ] {
            let sent = serde_json::to_value(&reason).unwrap();
            assert_eq!(sent, text);
            assert_eq!(serde_json::from_value::<RefusedReason>(sent).unwrap(), RefusedReason::Other(text.to_owned()));
        }
    }
}
