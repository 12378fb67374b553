//! Errors of a hub; the messages name the next step for the user. The messages never contain URLs of the hub's storage,
//! because these URLs are signed and give access to the file for some time.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use cfq_memory::Bytes;

/// Why a model could not be fetched from a hub. Sizes are in bytes.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The configured address of the hub is not a valid URL.
    #[error(
        "invalid address of the model hub: {endpoint:?}; set HF_ENDPOINT, or endpoint under [hub], to an address like \
         https://huggingface.co"
    )]
    InvalidEndpoint { endpoint: String },
    /// The configured token cannot be loaded.
    #[error("the token for the hub cannot be used: {reason}")]
    UnreadableToken { reason: String },
    /// No HTTP client could be created.
    #[error("cannot create an HTTP client")]
    HttpClient(#[source] reqwest::Error),
    /// The repository does not exist, or is private.
    #[error(
        "{endpoint} has no model repository {repo}, or the repository is private: check the name; if it is private, {}",
        token_advice(*with_token)
    )]
    RepositoryNotFound { endpoint: String, repo: String, with_token: bool },
    /// The revision does not exist.
    #[error(
        "{repo} has no revision {revision}: name a branch, a tag or a commit, or omit the revision for the main branch"
    )]
    RevisionNotFound { repo: String, revision: String },
    /// The file does not exist; `choices` are model files of the repository.
    #[error("{repo} has no file {file}{}", list_choices(.choices))]
    FileNotFound { repo: String, file: String, choices: Vec<String> },
    /// The file is one part of a split model.
    #[error("{file} of {repo} is one part of a split model; {}", split_advice(.whole))]
    SplitPart { repo: String, file: String, whole: Option<String> },
    /// The file is not a model.
    #[error(
        "{file} of {repo} is not a model file: name one that ends in .gguf or .safetensors, or a \
         .safetensors.index.json"
    )]
    NotAModelFile { repo: String, file: String },
    /// The index of the weights is invalid.
    #[error("{file} of {repo} cannot be read: {reason}")]
    InvalidIndex { repo: String, file: String, reason: String },
    /// The index of the weights is larger than any real one.
    #[error("{file} of {repo} has {}, more than the maximum of {} for an index of weights", Bytes(*size), Bytes(*limit))]
    IndexTooLarge { repo: String, file: String, size: u64, limit: u64 },
    /// The terms of the repository were not accepted.
    #[error(
        "{repo} is gated: accept its terms at {page} (access may be granted manually, and later), then {}",
        gate_advice(*with_token)
    )]
    Gated { repo: String, page: String, with_token: bool },
    /// The token is wrong or expired.
    #[error("the hub rejects the token from {from}: it is wrong or has expired; create one with read access at {page}")]
    TokenRejected { from: String, page: String },
    /// The hub denies access for another reason.
    #[error("the hub denies access to {repo}: {reason}")]
    Forbidden { repo: String, reason: String },
    /// Too many requests from this address.
    #[error(
        "the hub is rate-limiting this address{}; try again later, or {}",
        retry_after(*.wait), token_advice(*with_token)
    )]
    RateLimited { wait: Option<Duration>, with_token: bool },
    /// No connection to the hub.
    #[error("cannot reach {endpoint}")]
    Unreachable {
        endpoint: String,
        #[source]
        source: reqwest::Error,
    },
    /// The connection broke during a transfer.
    #[error("the connection broke at {} of {}", Bytes(*have), Bytes(*size))]
    ConnectionBroken {
        have: u64,
        size: u64,
        #[source]
        source: reqwest::Error,
    },
    /// The response ended before the end of the file.
    #[error("the connection ended early, at {} of {}", Bytes(*have), Bytes(*size))]
    TruncatedResponse { have: u64, size: u64 },
    /// Less than `stall_bytes` arrived within the stall timeout.
    #[error("the connection stalled for {} s, at {} of {}", duration.as_secs_f64(), Bytes(*have), Bytes(*size))]
    Stalled { duration: Duration, have: u64, size: u64 },
    /// All retries failed.
    #[error("{attempts} attempts in a row failed; the partial download is kept, and the same command resumes it")]
    RetriesExhausted {
        attempts: u32,
        #[source]
        source: Box<HubError>,
    },
    /// The caller stopped the fetch.
    #[error("stopped; the partial download is kept, and the same command resumes it")]
    Stopped,
    /// The HTTP status has no known meaning.
    #[error("the hub answered {status} for {what}")]
    UnexpectedStatus { status: u16, what: String },
    /// The response does not follow the protocol.
    #[error("unexpected response from the hub about {what}: {reason}")]
    UnexpectedResponse { what: String, reason: String },
    /// The hub has no checksum of the file.
    #[error("the hub has no checksum of {file} of {repo}, so a download could not be verified")]
    NoChecksum { repo: String, file: String },
    /// The file changed twice during the fetch.
    #[error("{file} keeps changing on the hub; try again later, or name a commit: hf:{repo}@COMMIT:{file}")]
    FileKeepsChanging { repo: String, file: String },
    /// The received file is not the one that the hub describes.
    #[error("checksum mismatch: the received {file} of {repo} differs from the hub's file; it was discarded")]
    ChecksumMismatch { repo: String, file: String },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl HubError {
    /// Whether the request itself is the cause of the error: another request or another account may succeed, a retry
    /// cannot.
    pub fn is_invalid_request(&self) -> bool {
        match self {
            Self::InvalidEndpoint { .. }
            | Self::UnreadableToken { .. }
            | Self::RepositoryNotFound { .. }
            | Self::RevisionNotFound { .. }
            | Self::FileNotFound { .. }
            | Self::SplitPart { .. }
            | Self::NotAModelFile { .. }
            | Self::Gated { .. }
            | Self::TokenRejected { .. }
            | Self::Forbidden { .. } => true,
            Self::HttpClient(_)
            | Self::InvalidIndex { .. }
            | Self::IndexTooLarge { .. }
            | Self::RateLimited { .. }
            | Self::Unreachable { .. }
            | Self::ConnectionBroken { .. }
            | Self::TruncatedResponse { .. }
            | Self::Stalled { .. }
            | Self::RetriesExhausted { .. }
            | Self::Stopped
            | Self::UnexpectedStatus { .. }
            | Self::UnexpectedResponse { .. }
            | Self::NoChecksum { .. }
            | Self::FileKeepsChanging { .. }
            | Self::ChecksumMismatch { .. }
            | Self::Io { .. } => false,
        }
    }
}

fn token_advice(with_token: bool) -> &'static str {
    if with_token {
        "use the token of an account that may read it"
    } else {
        "set HF_TOKEN, or token = \"file:PATH\" under [hub] in cfq.toml"
    }
}

fn gate_advice(with_token: bool) -> &'static str {
    if with_token {
        "use a token of the account that accepted them, with read access to gated repositories; the current token has \
         none, or is wrong"
    } else {
        "give that account's token in HF_TOKEN, or as token = \"file:PATH\" under [hub] in cfq.toml"
    }
}

fn list_choices(choices: &[String]) -> String {
    match choices {
        [] => "; it has no model file that cfq can load".to_owned(),
        files => format!("; it has {}", files.join(", ")),
    }
}

fn split_advice(whole: &Option<String>) -> String {
    match whole {
        Some(name) => format!("name {name} instead, which includes all parts"),
        None => "name an unsplit file, because split GGUF files are not supported".to_owned(),
    }
}

fn retry_after(wait: Option<Duration>) -> String {
    wait.map_or_else(String::new, |wait| format!(" (for {} s)", wait.as_secs()))
}
