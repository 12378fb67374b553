//! The reply in the standard output of a program: plain text, or the events of a known agent, one JSON value a line.
//!
//! The events were read from Claude Code 2.1, Codex 0.171 and Gemini CLI 0.61. Other events are ignored, as agents add
//! some with each version.

use cfq_proto::job::{FinishReason, JobFailure};
use serde::Deserialize;

use super::agent::OutputForm;
use crate::proxy::context_error::ContextExceeded;
use crate::proxy::context_limit::ReportedUsage;
use crate::proxy::framing::Parts;
use crate::proxy::reply::Reply;

/// What agents say if nobody is logged in, or if the key is wrong, in small letters.
const NOT_LOGGED_IN: [&str; 5] =
    ["/login", "401 unauthorized", "api key not valid", "invalid api key", "api_key_invalid"];
/// Statuses of errors of the provider's API that a retry does not help.
const PERMANENT_STATUSES: [u16; 4] = [400, 401, 403, 404];

/// Splits the output into text or events and reads them.
pub(super) enum OutputReader {
    /// Text. The field is the begun line, as a character may be in two chunks.
    Text(Vec<u8>),
    Events {
        read: fn(&[u8], &mut Reply<'_>) -> Result<(), JobFailure>,
        lines: Parts,
    },
}

impl OutputReader {
    pub(super) fn new(form: OutputForm) -> Self {
        let read = match form {
            OutputForm::Text => return Self::Text(Vec::new()),
            OutputForm::Claude => |line: &[u8], reply: &mut Reply<'_>| read_event(line, reply, read_claude),
            OutputForm::Codex => |line: &[u8], reply: &mut Reply<'_>| read_event(line, reply, read_codex),
            OutputForm::Gemini => |line: &[u8], reply: &mut Reply<'_>| read_event(line, reply, read_gemini),
        };
        Self::Events { read, lines: Parts::Lines(Vec::new()) }
    }

    /// Adds the next bytes to the reply.
    pub(super) fn push(&mut self, bytes: &[u8], reply: &mut Reply<'_>) -> Result<(), JobFailure> {
        match self {
            Self::Text(begun) => {
                begun.extend_from_slice(bytes);
                let end = begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let lines: Vec<u8> = begun.drain(..end).collect();
                reply.push_text(String::from_utf8_lossy(&lines).into_owned())?;
                Ok(())
            }
            Self::Events { read, lines } => {
                let lines = lines.push(bytes).map_err(|error| reply.peer().invalid_reply(&error.to_string()))?;
                lines.iter().try_for_each(|line| read(line, reply))
            }
        }
    }

    /// Adds what follows the last line break.
    pub(super) fn finish(self, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
        match self {
            Self::Text(rest) => reply.push_text(String::from_utf8_lossy(&rest).into_owned()).map(drop),
            Self::Events { read, lines } => lines.finish().map_or(Ok(()), |rest| read(&rest, reply)),
        }
    }
}

/// Reads one event. A line that is no event is ignored: it is for humans.
fn read_event<E: for<'de> Deserialize<'de>>(
    line: &[u8],
    reply: &mut Reply<'_>,
    read: impl FnOnce(E, &mut Reply<'_>) -> Result<(), JobFailure>,
) -> Result<(), JobFailure> {
    serde_json::from_slice(line).map_or(Ok(()), |event| read(event, reply))
}

/// The failure for an error that the program reports: the prompt is too long, a human has to act, or a retry can help.
pub(super) fn failure(message: &str, status: Option<u16>, reply: &Reply<'_>) -> JobFailure {
    let peer = reply.peer();
    let exceeded = ContextExceeded::of(&serde_json::Value::Null, message);
    if let (Some(exceeded), Some(context)) = (exceeded, peer.context) {
        return context.failure(exceeded);
    }
    let reason = format!("{}: {}", peer.url, peer.quote(message));
    let text = message.to_ascii_lowercase();
    let is_permanent = status.is_some_and(|status| PERMANENT_STATUSES.contains(&status))
        || NOT_LOGGED_IN.iter().any(|words| text.contains(words));
    match is_permanent {
        true => JobFailure::Rejected { reason },
        false => JobFailure::Unavailable { reason },
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ClaudeEvent {
    /// An event of the provider's API (<https://docs.claude.com/en/docs/build-with-claude/streaming>).
    StreamEvent { event: ClaudeStreamEvent },
    /// The end of the run.
    Result(ClaudeResult),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ClaudeStreamEvent {
    ContentBlockDelta {
        delta: ClaudeDelta,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ClaudeDelta {
    /// Text of the reply; the thoughts of the model have another field.
    text: Option<String>,
}

#[derive(Deserialize)]
struct ClaudeResult {
    #[serde(default)]
    is_error: bool,
    api_error_status: Option<u16>,
    /// The reply, or the message of the error.
    result: Option<String>,
    stop_reason: Option<String>,
    usage: Option<ClaudeUsage>,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct ClaudeUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

fn read_claude(event: ClaudeEvent, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    match event {
        ClaudeEvent::StreamEvent { event: ClaudeStreamEvent::ContentBlockDelta { delta } } => {
            reply.push_text(delta.text.unwrap_or_default())?;
        }
        ClaudeEvent::Result(result) if result.is_error => {
            let message = result.result.unwrap_or_else(|| "it reported an error without a message".to_owned());
            return Err(failure(&message, result.api_error_status, reply));
        }
        ClaudeEvent::Result(result) => {
            if !reply.has_text() {
                reply.push_text(result.result.unwrap_or_default())?;
            }
            if let Some(usage) = result.usage {
                let cached_tokens = usage.cache_read_input_tokens;
                let prompt_tokens = usage.input_tokens + usage.cache_creation_input_tokens + cached_tokens;
                reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens: usage.output_tokens });
            }
            reply.set_finish(match result.stop_reason.as_deref() {
                Some("max_tokens" | "model_context_window_exceeded") => FinishReason::Length,
                Some(_) | None => FinishReason::Stop,
            });
        }
        ClaudeEvent::StreamEvent { event: ClaudeStreamEvent::Other } | ClaudeEvent::Other => {}
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum CodexEvent {
    #[serde(rename = "item.completed")]
    ItemCompleted { item: CodexItem },
    #[serde(rename = "turn.completed")]
    TurnCompleted { usage: Option<CodexUsage> },
    #[serde(rename = "turn.failed")]
    TurnFailed { error: CodexError },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum CodexItem {
    /// One message of the model.
    AgentMessage { text: String },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct CodexUsage {
    input_tokens: u32,
    cached_input_tokens: u32,
    output_tokens: u32,
}

#[derive(Deserialize)]
struct CodexError {
    message: String,
}

fn read_codex(event: CodexEvent, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    match event {
        CodexEvent::ItemCompleted { item: CodexItem::AgentMessage { text } } => {
            let separator = if reply.has_text() { "\n" } else { "" };
            reply.push_text(format!("{separator}{text}"))?;
        }
        CodexEvent::TurnCompleted { usage } => {
            let CodexUsage { input_tokens, cached_input_tokens, output_tokens } = usage.unwrap_or_default();
            reply.set_usage(ReportedUsage {
                prompt_tokens: input_tokens,
                cached_tokens: cached_input_tokens,
                output_tokens,
            });
            reply.set_finish(FinishReason::Stop);
        }
        CodexEvent::TurnFailed { error } => return Err(failure(&error.message, None, reply)),
        CodexEvent::ItemCompleted { item: CodexItem::Other } | CodexEvent::Other => {}
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum GeminiEvent {
    Message {
        role: GeminiRole,
        content: String,
    },
    /// The end of the run.
    Result {
        status: String,
        error: Option<GeminiError>,
        stats: Option<GeminiStats>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum GeminiRole {
    Assistant,
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct GeminiError {
    message: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct GeminiStats {
    input_tokens: u32,
    output_tokens: u32,
    cached: u32,
}

fn read_gemini(event: GeminiEvent, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    match event {
        GeminiEvent::Message { role: GeminiRole::Assistant, content } => {
            reply.push_text(content)?;
        }
        GeminiEvent::Result { status, error, stats } if status == "success" || error.is_none() => {
            let GeminiStats { input_tokens, output_tokens, cached } = stats.unwrap_or_default();
            let (prompt_tokens, cached_tokens) = (input_tokens, cached);
            reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens });
            reply.set_finish(FinishReason::Stop);
        }
        GeminiEvent::Result { error, .. } => {
            let message = error.map(|error| error.message).unwrap_or_default();
            return Err(failure(&message, None, reply));
        }
        GeminiEvent::Message { .. } | GeminiEvent::Other => {}
    }
    Ok(())
}
