//! Reasons that replies give for a request that was not carried out. Every type also loads the free text that cfq 0.1
//! sends.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::blob::BlobHash;

/// Why the scheduler cannot carry out a request now. The sender repeats the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    #[serde(untagged)]
    Other(String),
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
#[serde(rename_all = "snake_case")]
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
    /// Reason as free text.
    #[serde(untagged)]
    Other(String),
}

impl fmt::Display for RefusedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Database { doing } => write!(f, "Postgres refused a statement ({doing})"),
            Self::UnreadableRow { what, text } => {
                write!(f, "the database contains a {what} that this build cannot read: {text:?}")
            }
            Self::JournalTooLong { limit } => write!(f, "a journal has at most {limit} tokens"),
            Self::TokenIdTooLarge => f.write_str("a token id is above 2^31 - 1"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    fn reloaded<T: Serialize + DeserializeOwned>(reason: &T) -> T {
        serde_json::from_value(serde_json::to_value(reason).unwrap()).unwrap()
    }

    #[test]
    fn reasons_load_from_their_json_and_from_the_free_text_of_0_1() {
        for reason in [
            UnavailableReason::Database { doing: "placing a job".into() },
            UnavailableReason::NotLeader,
            UnavailableReason::NotRegistered,
            UnavailableReason::MissingBlob { hash: BlobHash::of(b"x") },
            UnavailableReason::JournalGap { after: 3 },
            UnavailableReason::Other("no leader".into()),
        ] {
            assert_eq!(reloaded(&reason), reason);
        }
        for reason in [
            RefusedReason::Database { doing: "writing a job".into() },
            RefusedReason::UnreadableRow { what: "role".into(), text: "gamma".into() },
            RefusedReason::JournalTooLong { limit: 9 },
            RefusedReason::TokenIdTooLarge,
            RefusedReason::Other("too large".into()),
        ] {
            assert_eq!(reloaded(&reason), reason);
        }
        assert_eq!(serde_json::to_value(UnavailableReason::NotLeader).unwrap(), "not_leader");
        let text: UnavailableReason = serde_json::from_str(r#""no leader yet""#).unwrap();
        assert_eq!(text.to_string(), "no leader yet");
    }
}
