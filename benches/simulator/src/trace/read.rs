//! Reader of trace files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Arrival, BLOCK_TOKENS, Call, Workload, chain};

/// How a trace is replayed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceOptions {
    /// Divides all arrival times: 0.5 replays the trace at half its speed.
    pub speed: f64,
    /// Longer prompts are cut to this number of tokens.
    pub max_prompt_tokens: u64,
}

/// Why a trace cannot be read.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be read.
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A line is not a call in one of the two formats.
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// A call waits for one that is not defined before it.
    Dependency {
        /// Number of the line, from 1.
        line: usize,
        /// The missing call.
        request_id: String,
    },
}

impl std::fmt::Display for TraceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io { path, .. } => write!(f, "cannot read the trace {}", path.display()),
            Self::Line { line, .. } => write!(
                f,
                "line {line} of the trace is no call: expected JSON with input_length, output_length, hash_ids, and \
                 timestamp or not_before_ms"
            ),
            Self::Dependency { line, request_id } => {
                write!(f, "line {line} of the trace waits for {request_id:?}, which no line before it defines")
            }
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Line { source, .. } => Some(source),
            Self::Dependency { .. } => None,
        }
    }
}

/// One line of either format.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    request_id: Option<String>,
    #[serde(default)]
    model: String,
    input_length: u64,
    output_length: u32,
    hash_ids: Vec<u64>,
    #[serde(default)]
    timestamp: f64,
    #[serde(default)]
    not_before_ms: f64,
    #[serde(default)]
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    request_id: String,
    #[serde(default)]
    delay_ms: f64,
}

/// Reads a trace file.
pub fn read(path: &Path, options: TraceOptions) -> Result<Workload, TraceError> {
    let text = std::fs::read_to_string(path).map_err(|source| TraceError::Io { path: path.to_owned(), source })?;
    parse(&text, options)
}

fn parse(text: &str, options: TraceOptions) -> Result<Workload, TraceError> {
    let (mut calls, mut by_id, mut models) = (Vec::new(), BTreeMap::new(), Vec::new());
    for (index, line) in text.lines().enumerate() {
        let is_header = index == 0 && line.contains("\"schema\"");
        if is_header || line.trim().is_empty() {
            continue;
        }
        let number = index + 1;
        let line: Line = serde_json::from_str(line).map_err(|source| TraceError::Line { line: number, source })?;
        let model = models.iter().position(|name| *name == line.model).unwrap_or_else(|| {
            models.push(line.model.clone());
            models.len() - 1
        });
        let prompt_tokens = line.input_length.min(options.max_prompt_tokens);
        let whole_blocks = ((prompt_tokens / BLOCK_TOKENS) as usize).min(line.hash_ids.len());
        let waits_for = |dependency: &Dependency| {
            let missing = || TraceError::Dependency { line: number, request_id: dependency.request_id.clone() };
            Ok((*by_id.get(&dependency.request_id).ok_or_else(missing)?, dependency.delay_ms))
        };
        let after = line.dependencies.iter().map(waits_for).collect::<Result<Vec<_>, _>>()?;
        let arrival = match after.is_empty() {
            true => Arrival::At(line.timestamp.max(line.not_before_ms) / options.speed),
            false => Arrival::After(after),
        };
        if let Some(id) = line.request_id {
            by_id.insert(id, calls.len());
        }
        calls.push(Call {
            model,
            prompt_tokens,
            output_tokens: line.output_length.max(1),
            chain: chain(model, &line.hash_ids[..whole_blocks]),
            arrival,
        });
    }
    Ok(Workload { calls, models })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: TraceOptions = TraceOptions { speed: 0.5, max_prompt_tokens: 2_000 };

    #[test]
    fn both_formats_are_read() {
        let mooncake = r#"{"timestamp": 40, "input_length": 4000, "output_length": 6, "hash_ids": [0,1,2,3,4,5,6,7]}"#;
        let read = parse(mooncake, OPTIONS).unwrap();
        assert_eq!(read.calls[0].arrival, Arrival::At(80.0));
        assert_eq!((read.calls[0].prompt_tokens, read.calls[0].chain.len()), (2_000, 3), "cut to whole blocks");

        let agentic = concat!(
            "{\"schema\": \"dynamo.agentic_mooncake\", \"version\": 2}\n",
            r#"{"request_id": "a", "model": "alpha", "input_length": 1024, "output_length": 9, "hash_ids": [1, 2], "not_before_ms": 5, "dependencies": []}"#,
            "\n",
            r#"{"request_id": "b", "model": "beta", "input_length": 1024, "output_length": 9, "hash_ids": [1, 3], "not_before_ms": 0, "dependencies": [{"request_id": "a", "trigger": "completion", "delay_ms": 7}]}"#,
        );
        let read = parse(agentic, OPTIONS).unwrap();
        assert_eq!(read.models, ["alpha", "beta"]);
        assert_eq!(read.calls[1].arrival, Arrival::After(vec![(0, 7.0)]));
        assert_ne!(read.calls[0].chain[0], read.calls[1].chain[0], "models share no keys and values");
    }

    #[test]
    fn errors_name_the_line() {
        let unknown =
            r#"{"input_length": 1, "output_length": 1, "hash_ids": [], "dependencies": [{"request_id": "x"}]}"#;
        let error = parse(unknown, OPTIONS).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("\"x\""), "{error}");
        let error = parse("{}", OPTIONS).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("input_length"), "{error}");
    }
}
