//! Makes Ollama fetch a model (<https://docs.ollama.com/api/pull>). Ollama resumes a fetch that was interrupted.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::endpoint::{Endpoint, EndpointError};
use super::framing::Parts;
use super::peer::Peer;
use super::report;
use super::server::Server;
use crate::error_text::why_unreachable;

/// Longest time without a line of progress. Ollama is silent while it computes the checksum of a large file.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Last line of a fetch.
const SUCCESS: &str = "success";
/// Maximum number of files of a model whose progress is added up.
const MAX_FILES: usize = 1000;
/// Maximum length of a file's digest, in bytes.
const MAX_DIGEST_BYTES: usize = 128;

/// Progress of a fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullStep {
    /// Bytes of the files that are known so far.
    Transferred { done: u64, total: u64 },
    /// What the server does now, in its words.
    Status(String),
}

/// Why a model was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The server cannot be reached, or the connection broke.
    #[error(
        "cannot reach {url}: {reason}; start the server, or correct its url in cfq.toml, and repeat the command (an \
         interrupted download continues)"
    )]
    Unreachable { url: String, reason: String },
    /// The server reports an error.
    #[error("{url} could not fetch {model}: {reason}")]
    Refused { url: String, model: String, reason: String },
    /// The server answered otherwise than Ollama does, or the connection ended too early.
    #[error("{url}: {reason}; the same command continues the download")]
    Invalid { url: String, reason: String },
    /// The server is another program, or a version that cfq does not use.
    #[error("{0}")]
    Unusable(String),
}

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    status: String,
    #[serde(default)]
    digest: String,
    total: Option<u64>,
    completed: Option<u64>,
    error: Option<String>,
}

/// Makes the server of the endpoint `name` fetch `model`, by the server's name for it.
///
/// # Errors
/// [`PullError`].
pub async fn pull(
    name: &str,
    endpoint: &Endpoint,
    model: &str,
    mut report_step: impl FnMut(PullStep),
) -> Result<(), PullError> {
    let server = Server::new(name, endpoint, SILENCE_TIMEOUT)?;
    if let Ok(Some(reason)) = report::unusable_ollama(&server).await {
        return Err(PullError::Unusable(reason));
    }
    let peer = Peer::new(format!("{}/api/pull", server.root()), server.key.as_ref());
    let unreachable = |error: &reqwest::Error| PullError::Unreachable {
        url: server.root().to_owned(),
        reason: peer.quote(&why_unreachable(error)),
    };
    let refused = |reason: &str| PullError::Refused {
        url: server.root().to_owned(),
        model: model.to_owned(),
        reason: peer.quote(reason),
    };
    let request = server.client.post(&peer.name).json(&json!({ "model": model, "stream": true }));
    let mut answer = server.authorized(request).send().await.map_err(|error| unreachable(&error))?;
    let invalid = |reason: &str| PullError::Invalid { url: server.root().to_owned(), reason: peer.quote(reason) };
    if !answer.status().is_success() {
        let status = answer.status();
        if matches!(status.as_u16(), 401 | 403) {
            return Err(refused(&format!("it answered {status}: correct `key` under [endpoints.{name}] in cfq.toml")));
        }
        let body = match answer.chunk().await {
            Ok(Some(bytes)) => bytes.to_vec(),
            Ok(None) | Err(_) => Vec::new(),
        };
        return Err(match serde_json::from_slice::<Line>(&body) {
            Ok(Line { error: Some(error), .. }) => refused(&error),
            Ok(_) | Err(_) => invalid(&format!("it answered {status}: {}", String::from_utf8_lossy(&body).trim())),
        });
    }
    let mut parts = Parts::Lines(Vec::new());
    let mut transfers = Transfers::default();
    let mut is_done = false;
    let mut read = |line: &[u8]| {
        let Ok(mut line) = serde_json::from_slice::<Line>(line) else { return Err(invalid("it sent an invalid line")) };
        if let Some(error) = line.error {
            return Err(refused(&format!("{error}; check the name at https://ollama.com/library")));
        }
        is_done |= line.status == SUCCESS;
        line.status = peer.quote(&line.status);
        report_step(transfers.step(line));
        Ok(())
    };
    while let Some(bytes) = answer.chunk().await.map_err(|error| unreachable(&error))? {
        for line in parts.push(&bytes).map_err(|error| invalid(&error.to_string()))? {
            read(&line)?;
        }
    }
    if let Some(line) = parts.finish() {
        read(&line)?;
    }
    match is_done {
        true => Ok(()),
        false => Err(invalid("the connection ended before the download was complete")),
    }
}

/// Bytes of each file of a model.
#[derive(Default)]
struct Transfers {
    /// Transferred and total bytes, by the file's digest.
    files: HashMap<String, (u64, u64)>,
}

impl Transfers {
    fn step(&mut self, line: Line) -> PullStep {
        let is_counted = self.files.contains_key(&line.digest) || self.files.len() < MAX_FILES;
        let is_counted = is_counted && line.digest.len() <= MAX_DIGEST_BYTES;
        let Some(total) = line.total.filter(|_| is_counted) else {
            return PullStep::Status(line.status);
        };
        // The first line of a file has no number of transferred bytes.
        self.files.insert(line.digest, (line.completed.unwrap_or(0).min(total), total));
        let sum = |of: fn(&(u64, u64)) -> u64| self.files.values().fold(0u64, |sum, file| sum.saturating_add(of(file)));
        PullStep::Transferred { done: sum(|file| file.0), total: sum(|file| file.1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_files_are_added_up() {
        let mut transfers = Transfers::default();
        let mut step = |line: &str| transfers.step(serde_json::from_str(line).unwrap());
        assert_eq!(step(r#"{"status":"pulling manifest"}"#), PullStep::Status("pulling manifest".to_owned()));
        for (line, done, total) in [
            (r#"{"status":"pulling a","digest":"a","total":100}"#, 0, 100),
            (r#"{"status":"pulling a","digest":"a","total":100,"completed":60}"#, 60, 100),
            (r#"{"status":"pulling b","digest":"b","total":10,"completed":10}"#, 70, 110),
            (r#"{"status":"pulling a","digest":"a","total":100,"completed":900}"#, 110, 110),
        ] {
            assert_eq!(step(line), PullStep::Transferred { done, total }, "{line}");
        }
    }
}
