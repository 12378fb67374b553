//! The reply in the standard output of a program: plain text, or what a coding agent writes as JSON.
//!
//! The forms were read from Claude Code 2.1, Codex 0.171 and Gemini CLI 0.61. Other events are ignored, as agents add some
//! with each version.

use std::collections::BTreeMap;

use cfq_proto::job::{FinishReason, JobFailure};
use serde::Deserialize;

use super::coding_agent::StdoutFormat;
use crate::proxy::context_error::ContextExceeded;
use crate::proxy::context_limit::ReportedUsage;
use crate::proxy::framing::Parts;
use crate::proxy::reply::Reply;

/// Maximum size of the text of a reply, in bytes: programs do not know the requested length.
pub(super) const MAX_TEXT_BYTES: usize = 4 << 20;
/// Words, in small letters, of errors because nobody is logged in or the key is wrong.
const LOGIN_ERRORS: [&str; 6] =
    ["/login", "401 unauthorized", "api key not valid", "invalid api key", "api_key_invalid", "set an auth method"];
/// What to do about them.
const LOGIN_STEP: &str = "log in to the coding agent as the user who runs cfq (as root: use a key), or set its key where `cfq up` is \
                          started";
/// Words, in small letters, of errors because the reply exceeds the agent's own limit.
const LENGTH_ERRORS: [&str; 2] = ["output token maximum", "max_output_tokens"];
/// Statuses of errors of the provider's API that a retry does not help.
const PERMANENT_STATUSES: [u16; 2] = [400, 404];
/// Why Claude ends a reply that breaks its provider's rules.
const REFUSAL: &str = "refusal";

/// Splits the output into text or events and reads them.
pub(super) enum OutputReader {
    /// Text. The field is the incomplete last line, as a character may be in two chunks.
    Text(Vec<u8>),
    Claude {
        lines: Parts,
        message: String,
    },
    Codex {
        lines: Parts,
        message: Option<String>,
    },
    /// One JSON object; the field is what was read of it.
    Gemini(Vec<u8>),
}

impl OutputReader {
    pub(super) fn new(form: StdoutFormat) -> Self {
        let lines = Parts::Lines(Vec::new());
        match form {
            StdoutFormat::Text => Self::Text(Vec::new()),
            StdoutFormat::Claude => Self::Claude { lines, message: String::new() },
            StdoutFormat::Codex => Self::Codex { lines, message: None },
            StdoutFormat::Gemini => Self::Gemini(Vec::new()),
        }
    }

    /// Adds the next bytes to the reply.
    pub(super) fn push(&mut self, bytes: &[u8], reply: &mut Reply<'_>) -> Result<(), JobFailure> {
        match self {
            Self::Text(partial) => {
                let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
                    partial.extend_from_slice(bytes);
                    return check_length(partial, reply);
                };
                let (lines, rest) = bytes.split_at(end + 1);
                partial.extend_from_slice(lines);
                let lines = std::mem::replace(partial, rest.to_vec());
                reply.push_text(String::from_utf8_lossy(&lines).into_owned()).map(drop)
            }
            Self::Claude { lines, message } => {
                split(lines, bytes, reply)?.iter().try_for_each(|line| read_claude(line, message, reply))
            }
            Self::Codex { lines, message } => {
                split(lines, bytes, reply)?.iter().try_for_each(|line| read_codex(line, message, reply))
            }
            Self::Gemini(partial) => {
                partial.extend_from_slice(bytes);
                check_length(partial, reply)
            }
        }
    }

    /// Adds what follows the last line break.
    pub(super) fn finish(self, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
        match self {
            Self::Text(rest) => reply.push_text(String::from_utf8_lossy(&rest).into_owned()).map(drop),
            Self::Claude { lines, mut message } => {
                lines.finish().map_or(Ok(()), |rest| read_claude(&rest, &mut message, reply))
            }
            Self::Codex { lines, mut message } => {
                lines.finish().map_or(Ok(()), |rest| read_codex(&rest, &mut message, reply))
            }
            Self::Gemini(whole) => read_gemini(&whole, reply),
        }
    }
}

/// The failure of a reply that an agent requested again after an interruption: its text would be cut or doubled.
fn repeated(reply: &Reply<'_>) -> JobFailure {
    JobFailure::Unavailable { reason: format!("{}: its reply was interrupted and repeated", reply.peer().name) }
}

fn check_length(text: &[u8], reply: &Reply<'_>) -> Result<(), JobFailure> {
    match text.len() > MAX_TEXT_BYTES {
        true => Err(reply.peer().invalid_reply(&format!("its text is longer than {MAX_TEXT_BYTES} bytes"))),
        false => Ok(()),
    }
}

fn split(lines: &mut Parts, bytes: &[u8], reply: &Reply<'_>) -> Result<Vec<Vec<u8>>, JobFailure> {
    lines.push(bytes).map_err(|error| reply.peer().invalid_reply(&error.to_string()))
}

/// The failure for an error that the program reports: the prompt is too long, a human has to act, or a retry can help.
pub(super) fn failure(message: &str, status: Option<u16>, reply: &Reply<'_>) -> JobFailure {
    let peer = reply.peer();
    let exceeded = ContextExceeded::of(&serde_json::Value::Null, message);
    if let (Some(exceeded), Some(context)) = (exceeded, peer.context) {
        return context.failure(exceeded);
    }
    let reason = format!("{}: {}", peer.name, peer.quote(message));
    let text = message.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|words| text.contains(words));
    if has(&LOGIN_ERRORS) || matches!(status, Some(401 | 403)) {
        return JobFailure::Rejected { reason: format!("{reason} -> {LOGIN_STEP}") };
    }
    match has(&LENGTH_ERRORS) || status.is_some_and(|status| PERMANENT_STATUSES.contains(&status)) {
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
    /// A message begins. A reply that exceeds the maximum length of one message continues in the next.
    MessageStart,
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
    /// Number of requests to the model; 0 if the agent answered by itself.
    num_turns: Option<u32>,
    /// The last message, or the message of the error.
    result: Option<String>,
    stop_reason: Option<String>,
    usage: Option<ClaudeUsage>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ClaudeUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

/// Reads one event; `message` is the text of the running message. A line that is no event is for humans.
fn read_claude(line: &[u8], message: &mut String, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    let Ok(event) = serde_json::from_slice(line) else { return Ok(()) };
    match event {
        ClaudeEvent::StreamEvent { event: ClaudeStreamEvent::MessageStart } => message.clear(),
        ClaudeEvent::StreamEvent { event: ClaudeStreamEvent::ContentBlockDelta { delta } } => {
            let text = delta.text.unwrap_or_default();
            message.push_str(&text);
            reply.push_text(text)?;
        }
        ClaudeEvent::Result(result) => read_claude_result(result, message, reply)?,
        ClaudeEvent::StreamEvent { event: ClaudeStreamEvent::Other } | ClaudeEvent::Other => {}
    }
    Ok(())
}

fn read_claude_result(result: ClaudeResult, message: &str, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    let text = result.result.unwrap_or_default();
    if result.stop_reason.as_deref() == Some(REFUSAL) {
        let reason = format!("{} refused: {}", reply.peer().name, reply.peer().quote(&text));
        return Err(JobFailure::Rejected { reason });
    }
    if result.is_error || result.num_turns == Some(0) {
        return Err(failure(&text, result.api_error_status, reply));
    }
    if !reply.has_text() {
        reply.push_text(text)?;
    } else if message.trim() != text.trim() {
        // The stream broke, and the agent requested the reply again.
        return Err(repeated(reply));
    }
    if let Some(usage) = result.usage {
        let cached_tokens = usage.cache_read_input_tokens;
        let uncached = usage.input_tokens.saturating_add(usage.cache_creation_input_tokens);
        let prompt_tokens = uncached.saturating_add(cached_tokens);
        reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens: usage.output_tokens });
    }
    reply.set_finish(match result.stop_reason.as_deref() {
        Some("max_tokens" | "model_context_window_exceeded") => FinishReason::Length,
        Some(_) | None => FinishReason::Stop,
    });
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
    TurnFailed { error: AgentError },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum CodexItem {
    /// One message of the model. Earlier ones announce what it does, or were interrupted.
    AgentMessage { text: String },
    #[serde(other)]
    Other,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct CodexUsage {
    input_tokens: u32,
    cached_input_tokens: u32,
    output_tokens: u32,
}

#[derive(Deserialize)]
struct AgentError {
    message: String,
}

/// Reads one event; `message` is the last message of the model.
fn read_codex(line: &[u8], message: &mut Option<String>, reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    let Ok(event) = serde_json::from_slice(line) else { return Ok(()) };
    match event {
        CodexEvent::ItemCompleted { item: CodexItem::AgentMessage { text } } => *message = Some(text),
        CodexEvent::TurnCompleted { usage } => {
            reply.push_text(message.take().unwrap_or_default())?;
            let CodexUsage { input_tokens, cached_input_tokens, output_tokens } = usage.unwrap_or_default();
            let (prompt_tokens, cached_tokens) = (input_tokens, cached_input_tokens);
            reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens });
            reply.set_finish(FinishReason::Stop);
        }
        CodexEvent::TurnFailed { error } => return Err(failure(&error.message, None, reply)),
        CodexEvent::ItemCompleted { item: CodexItem::Other } | CodexEvent::Other => {}
    }
    Ok(())
}

/// The output of Gemini CLI: of a reply to the standard output, of an error to the standard error.
#[derive(Deserialize)]
struct GeminiOutput {
    response: Option<String>,
    error: Option<AgentError>,
    #[serde(default)]
    stats: GeminiStats,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct GeminiStats {
    models: BTreeMap<String, GeminiModelStats>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct GeminiModelStats {
    tokens: GeminiTokens,
    roles: BTreeMap<String, GeminiRequests>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct GeminiTokens {
    prompt: u32,
    candidates: u32,
    cached: u32,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct GeminiRequests {
    total_requests: u32,
    total_errors: u32,
}

fn read_gemini(whole: &[u8], reply: &mut Reply<'_>) -> Result<(), JobFailure> {
    let Ok(output) = serde_json::from_slice::<GeminiOutput>(whole) else { return Ok(()) };
    let Some(text) = output.response else { return Ok(()) };
    let models = output.stats.models.values();
    // A request whose reply was interrupted is no error, but is repeated: its text is in the reply twice.
    let main = models.clone().filter_map(|model| model.roles.get("main"));
    if main.map(|role| role.total_requests.saturating_sub(role.total_errors)).sum::<u32>() > 1 {
        return Err(repeated(reply));
    }
    reply.push_text(text)?;
    let sum = |count: fn(&GeminiTokens) -> u32| models.clone().map(|model| count(&model.tokens)).sum();
    let (prompt_tokens, cached_tokens) = (sum(|tokens| tokens.prompt), sum(|tokens| tokens.cached));
    reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens: sum(|tokens| tokens.candidates) });
    reply.set_finish(FinishReason::Stop);
    Ok(())
}

/// The message of the error that Gemini CLI wrote to the end of its standard error, as an object over several lines.
pub(super) fn gemini_error(errors: &str) -> Option<String> {
    let begin = errors.rfind("\n{\n").map(|at| at + 1).or_else(|| errors.starts_with("{\n").then_some(0))?;
    let mut objects = serde_json::Deserializer::from_str(&errors[begin..]).into_iter::<GeminiOutput>();
    Some(objects.next()?.ok()?.error?.message)
}
