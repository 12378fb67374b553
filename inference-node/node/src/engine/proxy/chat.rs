//! One chat completion: the request, the stream, and what each failure means for a retry.

use std::time::Instant;

use cfq_proto::job::{Completion, FinishReason, JobFailure, OutputFormat, Prompt, Usage};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::Outbox;
use crate::engine::proxy::Server;
use crate::engine::sse::Events;
use crate::engine::text::TextStream;

/// Bytes taken of an error's body.
const ERROR_BODY: usize = 64 << 10;
/// Characters of an endpoint's own words that are passed on.
const WORDS: usize = 500;
/// A token is rarely longer than this many bytes of text.
const TOKEN_BYTES: usize = 32;
/// Text that is always taken, however few tokens were asked for.
const LEAST_TEXT: usize = 64 << 10;
/// Bytes on the wire for one byte of text: each token comes in an event of its own.
const WIRE: usize = 64;

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<RemoteUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    /// In a stream.
    delta: Option<Part>,
    /// From a server that does not stream.
    message: Option<Part>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Part {
    content: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct RemoteUsage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

/// The request's body. Settings outside OpenAI's own are sent only when asked for, since strict servers refuse them.
fn body(remote: &str, prompt: &Prompt) -> Value {
    let sampling = &prompt.sampling;
    let mut body = json!({
        "model": remote,
        "messages": prompt.messages,
        "stream": true,
        "stream_options": { "include_usage": true },
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
    });
    let mut set = |name: &str, value: Value| {
        if let Some(object) = body.as_object_mut() {
            object.insert(name.to_owned(), value);
        }
    };
    if let Some(p) = sampling.top_p {
        set("top_p", json!(p));
    }
    if let Some(k) = sampling.top_k {
        set("top_k", json!(k));
    }
    if let Some(p) = sampling.min_p {
        set("min_p", json!(p));
    }
    if sampling.repetition_penalty != 1.0 {
        set("repetition_penalty", json!(sampling.repetition_penalty));
    }
    if !sampling.stop.is_empty() {
        // OpenAI takes four; all of them are applied here again.
        set("stop", json!(sampling.stop.iter().take(4).collect::<Vec<_>>()));
    }
    if let OutputFormat::JsonSchema { schema } = &prompt.format {
        set("response_format", json!({ "type": "json_schema", "json_schema": { "name": "output", "schema": schema } }));
    }
    body
}

/// What has come so far.
struct Reply {
    stream: TextStream,
    text: String,
    finish: Option<FinishReason>,
    pieces: u32,
    first_token_ms: Option<u64>,
    usage: Option<RemoteUsage>,
    longest: usize,
}

pub(super) async fn complete(
    server: &Server,
    remote: &str,
    prompt: &Prompt,
    outbox: &Outbox,
    began: Instant,
) -> Result<Completion, JobFailure> {
    let url = format!("{}/chat/completions", server.url);
    let request = server.authorized(server.client.post(&url)).json(&body(remote, prompt));
    let mut answer = request.send().await.map_err(|error| unreachable(&url, &error))?;
    let status = answer.status();
    if !status.is_success() {
        let mut said = Vec::new();
        while said.len() < ERROR_BODY {
            match answer.chunk().await {
                Ok(Some(bytes)) => said.extend_from_slice(&bytes[..bytes.len().min(ERROR_BODY - said.len())]),
                Ok(None) | Err(_) => break,
            }
        }
        return Err(refused(&url, status, &said));
    }
    let streams = answer
        .headers()
        .get(reqwest::header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .is_none_or(|kind| !kind.contains("application/json"));
    let longest = (prompt.sampling.max_tokens as usize).saturating_mul(TOKEN_BYTES).max(LEAST_TEXT);
    let mut reply = Reply {
        stream: TextStream::new(&prompt.sampling.stop),
        text: String::new(),
        finish: None,
        pieces: 0,
        first_token_ms: None,
        usage: None,
        longest,
    };
    let mut events = Events::default();
    let mut whole = Vec::new();
    let mut received = 0usize;
    'reading: while let Some(bytes) = answer.chunk().await.map_err(|error| unreachable(&url, &error))? {
        received += bytes.len();
        if received > longest.saturating_mul(WIRE) {
            return Err(garbage(&url, &format!("it sent {received} bytes and did not end")));
        }
        if !streams {
            whole.extend_from_slice(&bytes);
            if whole.len() > longest.saturating_mul(8) {
                return Err(garbage(&url, &format!("its answer is longer than {} bytes", whole.len())));
            }
            outbox.step("");
            continue;
        }
        for data in events.push(&bytes).map_err(|error| garbage(&url, &error.to_string()))? {
            if data == "[DONE]" {
                reply.finish.get_or_insert(FinishReason::Stop);
                break 'reading;
            }
            reply.take(&url, data.as_bytes(), outbox, began)?;
        }
        if reply.is_cut() {
            break;
        }
        outbox.step("");
    }
    if streams {
        if reply.finish.is_none()
            && let Some(data) = events.finish()
        {
            if data == "[DONE]" {
                reply.finish = Some(FinishReason::Stop);
            } else {
                reply.take(&url, data.as_bytes(), outbox, began)?;
            }
        }
    } else {
        reply.take(&url, &whole, outbox, began)?;
    }
    let Some(finish) = reply.finish else {
        return Err(JobFailure::Unavailable { reason: format!("{url} broke off in the middle of its answer") });
    };
    let rest = reply.stream.finish();
    outbox.step(&rest);
    reply.text.push_str(&rest);
    let total_ms = began.elapsed().as_millis() as u64;
    let said = reply.usage.as_ref();
    let usage = Usage {
        prompt_tokens: said.map_or(0, |u| u.prompt_tokens),
        cached_tokens: said.and_then(|u| u.prompt_tokens_details.as_ref()?.cached_tokens).unwrap_or(0),
        output_tokens: said.map_or(reply.pieces, |u| u.completion_tokens),
        first_token_ms: reply.first_token_ms.unwrap_or(total_ms),
        total_ms,
    };
    Ok(Completion { text: reply.text, finish, usage })
}

impl Reply {
    /// A stop string was met, and the endpoint may go on writing: nothing more is wanted of it.
    fn is_cut(&mut self) -> bool {
        self.finish.is_some() && self.stream.push(&[]).stopped
    }

    fn take(&mut self, url: &str, data: &[u8], outbox: &Outbox, began: Instant) -> Result<(), JobFailure> {
        let chunk: Chunk = serde_json::from_slice(data)
            .map_err(|error| garbage(url, &format!("{error} in {:?}", shorten(&String::from_utf8_lossy(data)))))?;
        if let Some(error) = chunk.error.filter(|e| !e.is_null()) {
            return Err(JobFailure::Unavailable { reason: format!("{url}: {}", shorten(&words(&error))) });
        }
        if chunk.usage.is_some() {
            self.usage = chunk.usage;
        }
        for choice in chunk.choices.into_iter().filter(|c| c.index == 0) {
            let part = choice.delta.or(choice.message);
            if let Some(refusal) = part.as_ref().and_then(|p| p.refusal.as_deref()) {
                return Err(JobFailure::Rejected { reason: format!("{url} refuses: {}", shorten(refusal)) });
            }
            let content = part.and_then(|p| p.content).unwrap_or_default();
            if !content.is_empty() {
                self.pieces += 1;
                self.first_token_ms.get_or_insert(began.elapsed().as_millis() as u64);
                let piece = self.stream.push(content.as_bytes());
                self.text.push_str(&piece.text);
                outbox.step(&piece.text);
                if piece.stopped {
                    self.finish = Some(FinishReason::Stop);
                    return Ok(());
                }
                if self.text.len() > self.longest {
                    return Err(garbage(url, &format!("its text is longer than {} bytes", self.longest)));
                }
            }
            match choice.finish_reason.as_deref() {
                None => {}
                Some("length") => self.finish = Some(FinishReason::Length),
                Some("content_filter") => {
                    return Err(JobFailure::Rejected { reason: format!("{url}: its content filter ended the answer") });
                }
                Some(_) => self.finish = Some(FinishReason::Stop),
            }
        }
        Ok(())
    }
}

/// An error with its causes, in one line.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

fn unreachable(url: &str, error: &reqwest::Error) -> JobFailure {
    JobFailure::Unavailable { reason: format!("{url}: {}", causes(error)) }
}

fn garbage(url: &str, what: &str) -> JobFailure {
    JobFailure::Engine { reason: format!("{url} does not answer as a chat completion: {what}") }
}

fn refused(url: &str, status: reqwest::StatusCode, body: &[u8]) -> JobFailure {
    let text = match serde_json::from_slice::<Value>(body) {
        Ok(value) => words(value.get("error").unwrap_or(&value)),
        Err(_) => String::from_utf8_lossy(body).trim().to_owned(),
    };
    let reason = format!("{url} answers {status}: {}", shorten(&text));
    if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) {
        JobFailure::Unavailable { reason }
    } else {
        JobFailure::Rejected { reason }
    }
}

/// The message inside an error object, whatever its shape.
fn words(error: &Value) -> String {
    let message = error.get("message").or_else(|| error.get("detail")).unwrap_or(error);
    message.as_str().map_or_else(|| message.to_string(), str::to_owned)
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(WORDS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::job::Sampling;

    #[test]
    fn only_what_was_asked_for_is_sent() {
        let prompt = Prompt { messages: vec![], sampling: Sampling::default(), format: OutputFormat::Text };
        let plain = body("m", &prompt);
        for absent in ["top_k", "min_p", "top_p", "stop", "repetition_penalty", "response_format"] {
            assert!(plain.get(absent).is_none(), "{absent}");
        }
        let sampling = Sampling { top_k: Some(5), stop: vec!["x".into()], ..Sampling::default() };
        let format = OutputFormat::JsonSchema { schema: json!({ "type": "object" }) };
        let full = body("m", &Prompt { messages: vec![], sampling, format });
        assert_eq!(full["response_format"]["json_schema"]["schema"]["type"], "object");
        assert_eq!((&full["top_k"], &full["stop"][0]), (&json!(5), &json!("x")));
    }

    #[test]
    fn a_status_says_whether_a_retry_can_help() {
        let of = |code: u16, body: &str| refused("u", reqwest::StatusCode::from_u16(code).unwrap(), body.as_bytes());
        for code in [500, 502, 503, 429, 408] {
            assert!(matches!(of(code, "busy"), JobFailure::Unavailable { .. }), "{code}");
        }
        for code in [301, 400, 401, 403, 404, 422] {
            assert!(matches!(of(code, "no"), JobFailure::Rejected { .. }), "{code}");
        }
        let told = of(401, r#"{"error":{"message":"wrong key","type":"x"}}"#).to_string();
        assert!(told.ends_with("401 Unauthorized: wrong key"), "{told}");
    }
}
