//! What can go wrong with a hub, each with the next step. Addresses of its storage are left out: they are signed, and so
//! as good as a key for a while.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use cfq_memory::Bytes;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "{endpoint:?} is no address of a model hub; HF_ENDPOINT, or endpoint under [hub], is like https://huggingface.co"
    )]
    Endpoint { endpoint: String },
    #[error("the token for the hub cannot be used: {why}")]
    Token { why: String },
    #[error("no HTTP client could be made")]
    Client(#[source] reqwest::Error),
    #[error(
        "{endpoint} has no model repository {repo}, or it is private; check the name, and for a private one {}", token(*with_token)
    )]
    NoRepository { endpoint: String, repo: String, with_token: bool },
    #[error("{repo} has no revision {revision}: name a branch, a tag or a commit, or leave it out for the main branch")]
    NoRevision { repo: String, revision: String },
    #[error("{repo} has no file {file}{}", either(.choices))]
    NoFile { repo: String, file: String, choices: Vec<String> },
    #[error("{file} of {repo} is one part of a split model; {}", instead(.whole))]
    Part { repo: String, file: String, whole: Option<String> },
    #[error(
        "{file} of {repo} is no model file: name one that ends in .gguf or .safetensors, or a .safetensors.index.json"
    )]
    NoModel { repo: String, file: String },
    #[error("{file} of {repo} cannot be read: {why}")]
    Index { repo: String, file: String, why: String },
    #[error(
        "{repo} is gated: accept its terms at {page} (some are granted by hand, later), then {}", gate(*with_token)
    )]
    Gated { repo: String, page: String, with_token: bool },
    #[error("the hub refuses the token from {from}: it is wrong or has expired; make one that may read at {page}")]
    TokenRefused { from: String, page: String },
    #[error("the hub forbids {repo}: {said}")]
    Forbidden { repo: String, said: String },
    #[error("the hub lets nobody on this address fetch more for now{}; try again later, or {}", after(*.wait), token(*with_token))]
    TooMany { wait: Option<Duration>, with_token: bool },
    #[error("{endpoint} cannot be reached")]
    Unreachable {
        endpoint: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("the connection broke at {} of {}", Bytes(*have), Bytes(*size))]
    Broke {
        have: u64,
        size: u64,
        #[source]
        source: reqwest::Error,
    },
    #[error("the connection ended early, at {} of {}", Bytes(*have), Bytes(*size))]
    EndedEarly { have: u64, size: u64 },
    #[error("nearly nothing came for {} s, at {} of {}", quiet.as_secs_f64(), Bytes(*have), Bytes(*size))]
    Stalled { quiet: Duration, have: u64, size: u64 },
    #[error("given up after {tries} tries in vain; what was fetched is kept, and the same command goes on from there")]
    GaveUp {
        tries: u32,
        #[source]
        source: Box<HubError>,
    },
    #[error("stopped; what was fetched is kept, and the same command goes on from there")]
    Stopped,
    #[error("the hub answered {status} for {what}")]
    Status { status: u16, what: String },
    #[error("the hub's answer about {what} is not understood: {why}")]
    Strange { what: String, why: String },
    #[error("the hub gives no checksum for {file} of {repo}, so what it sends could not be checked")]
    NoChecksum { repo: String, file: String },
    #[error(
        "{file} changes on the hub while it is fetched; try again in a while, or name a commit: hf:{repo}@COMMIT:{file}"
    )]
    Changing { repo: String, file: String },
    #[error(
        "what came for {file} of {repo} is not the file the hub describes (its checksum differs), and was thrown away"
    )]
    WrongBytes { repo: String, file: String },
    #[error("cannot {action} {path}")]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl HubError {
    /// Asked differently, or as somebody else, it might work; asked again, it will not.
    pub fn is_of_the_request(&self) -> bool {
        match self {
            Self::Endpoint { .. }
            | Self::Token { .. }
            | Self::NoRepository { .. }
            | Self::NoRevision { .. }
            | Self::NoFile { .. }
            | Self::Part { .. }
            | Self::NoModel { .. }
            | Self::Gated { .. }
            | Self::TokenRefused { .. }
            | Self::Forbidden { .. } => true,
            Self::Client(_)
            | Self::Index { .. }
            | Self::TooMany { .. }
            | Self::Unreachable { .. }
            | Self::Broke { .. }
            | Self::EndedEarly { .. }
            | Self::Stalled { .. }
            | Self::GaveUp { .. }
            | Self::Stopped
            | Self::Status { .. }
            | Self::Strange { .. }
            | Self::NoChecksum { .. }
            | Self::Changing { .. }
            | Self::WrongBytes { .. }
            | Self::File { .. } => false,
        }
    }
}

fn token(with_token: bool) -> &'static str {
    if with_token {
        "use the token of an account that may read it"
    } else {
        "set HF_TOKEN, or token = \"file:PATH\" under [hub] in cfq.toml"
    }
}

fn gate(with_token: bool) -> &'static str {
    if with_token {
        "use a token of the account that accepted them, which may read gated repositories; the present one may not, or is wrong"
    } else {
        "give that account's token in HF_TOKEN, or as token = \"file:PATH\" under [hub] in cfq.toml"
    }
}

fn either(choices: &[String]) -> String {
    match choices {
        [] => "; it has no model file that cfq could load".to_owned(),
        files => format!("; it has {}", files.join(", ")),
    }
}

fn instead(whole: &Option<String>) -> String {
    match whole {
        Some(name) => format!("name {name} instead, which stands for all parts"),
        None => "name a file that is whole, since split GGUF files are not loaded".to_owned(),
    }
}

fn after(wait: Option<Duration>) -> String {
    wait.map_or_else(String::new, |wait| format!(" (it says: for {} s)", wait.as_secs()))
}
