//! One chat completion: the request, the stream, and what each failure means for a retry.

use std::ops::Deref;
use std::time::Instant;

use cfq_link::secret::Secret;
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
    for (name, penalty) in
        [("frequency_penalty", sampling.frequency_penalty), ("presence_penalty", sampling.presence_penalty)]
    {
        if penalty != 0.0 {
            set(name, json!(penalty));
        }
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
    if let OutputFormat::Regex { .. } | OutputFormat::Grammar { .. } = prompt.format {
        let reason = "the OpenAI protocol has no words for output by regular expression or grammar; take a model that runs in-process, or a JSON schema";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    let peer = &Peer { url: format!("{}/chat/completions", server.url), key: server.key.as_ref() };
    let request = server.authorized(server.client.post(&peer.url)).json(&body(remote, prompt));
    let mut answer = request.send().await.map_err(|error| peer.unreachable(&error))?;
    let status = answer.status();
    if !status.is_success() {
        let mut said = Vec::new();
        while said.len() < ERROR_BODY {
            match answer.chunk().await {
                Ok(Some(bytes)) => said.extend_from_slice(&bytes[..bytes.len().min(ERROR_BODY - said.len())]),
                Ok(None) | Err(_) => break,
            }
        }
        return Err(peer.refused(status, &said));
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
    // Comments keep a connection alive, not a job: only what was read as a chunk is a step.
    let mut last_chunk = Instant::now();
    'reading: while let Some(bytes) = peer.chunk(&mut answer, last_chunk + server.patience).await? {
        received += bytes.len();
        if received > longest.saturating_mul(WIRE) {
            return Err(peer.garbage(&format!("it sent {received} bytes and did not end")));
        }
        if !streams {
            whole.extend_from_slice(&bytes);
            if whole.len() > longest.saturating_mul(8) {
                return Err(peer.garbage(&format!("its answer is longer than {} bytes", whole.len())));
            }
            continue;
        }
        for data in events.push(&bytes).map_err(|error| peer.garbage(&error.to_string()))? {
            if data == "[DONE]" {
                reply.finish.get_or_insert(FinishReason::Stop);
                break 'reading;
            }
            reply.take(peer, data.as_bytes(), outbox, began)?;
            last_chunk = Instant::now();
        }
        if reply.is_cut() {
            break;
        }
    }
    if streams {
        if reply.finish.is_none()
            && let Some(data) = events.finish()
        {
            if data == "[DONE]" {
                reply.finish = Some(FinishReason::Stop);
            } else {
                reply.take(peer, data.as_bytes(), outbox, began)?;
            }
        }
    } else {
        reply.take(peer, &whole, outbox, began)?;
    }
    let Some(finish) = reply.finish else {
        return Err(JobFailure::Unavailable { reason: format!("{} broke off in the middle of its answer", peer.url) });
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
        ..Usage::default()
    };
    Ok(Completion { text: reply.text, finish, usage, logprobs: Vec::new() })
}

impl Reply {
    /// A stop string was met, and the endpoint may go on writing: nothing more is wanted of it.
    fn is_cut(&mut self) -> bool {
        self.finish.is_some() && self.stream.push(&[]).stopped
    }

    fn take(&mut self, peer: &Peer<'_>, data: &[u8], outbox: &Outbox, began: Instant) -> Result<(), JobFailure> {
        let url = &peer.url;
        let chunk: Chunk = serde_json::from_slice(data)
            .map_err(|error| peer.garbage(&format!("{error} in {:?}", peer.said(&String::from_utf8_lossy(data)))))?;
        outbox.step("");
        if let Some(error) = chunk.error.filter(|e| !e.is_null()) {
            return Err(JobFailure::Unavailable { reason: format!("{url}: {}", peer.said(&words(&error))) });
        }
        if chunk.usage.is_some() {
            self.usage = chunk.usage;
        }
        for choice in chunk.choices.into_iter().filter(|c| c.index == 0) {
            let part = choice.delta.or(choice.message);
            if let Some(refusal) = part.as_ref().and_then(|p| p.refusal.as_deref()) {
                return Err(JobFailure::Rejected { reason: format!("{url} refuses: {}", peer.said(refusal)) });
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
                    return Err(peer.garbage(&format!("its text is longer than {} bytes", self.longest)));
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

/// The server as it is named in messages. Its own words are cut to a length, and an API key it echoes is not passed on.
struct Peer<'a> {
    url: String,
    key: Option<&'a Secret>,
}

impl Peer<'_> {
    /// The next bytes of `answer`, awaited until `deadline`.
    async fn chunk(
        &self,
        answer: &mut reqwest::Response,
        deadline: Instant,
    ) -> Result<Option<impl Deref<Target = [u8]> + use<>>, JobFailure> {
        match tokio::time::timeout_at(deadline.into(), answer.chunk()).await {
            Ok(read) => read.map_err(|error| self.unreachable(&error)),
            Err(_) => Err(JobFailure::Unavailable { reason: format!("{} keeps its answer waiting", self.url) }),
        }
    }

    fn without_key(&self, text: &str) -> String {
        match self.key.map(Secret::reveal) {
            Some(key) if !key.is_empty() => text.replace(key, "***"),
            Some(_) | None => text.to_owned(),
        }
    }

    fn said(&self, text: &str) -> String {
        // First the key, so that no half of it is left at the cut.
        shorten(&self.without_key(text))
    }

    fn unreachable(&self, error: &reqwest::Error) -> JobFailure {
        JobFailure::Unavailable { reason: format!("{}: {}", self.url, self.without_key(&causes(error))) }
    }

    fn garbage(&self, what: &str) -> JobFailure {
        let what = self.without_key(what);
        JobFailure::Engine { reason: format!("{} does not answer as a chat completion: {what}", self.url) }
    }

    fn refused(&self, status: reqwest::StatusCode, body: &[u8]) -> JobFailure {
        let text = match serde_json::from_slice::<Value>(body) {
            Ok(value) => words(value.get("error").unwrap_or(&value)),
            Err(_) => String::from_utf8_lossy(body).trim().to_owned(),
        };
        let reason = format!("{} answers {status}: {}", self.url, self.said(&text));
        if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) {
            JobFailure::Unavailable { reason }
        } else {
            JobFailure::Rejected { reason }
        }
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
        let peer = Peer { url: "u".to_owned(), key: None };
        let of = |code: u16, body: &str| peer.refused(reqwest::StatusCode::from_u16(code).unwrap(), body.as_bytes());
        for code in [500, 502, 503, 429, 408] {
            assert!(matches!(of(code, "busy"), JobFailure::Unavailable { .. }), "{code}");
        }
        for code in [301, 400, 401, 403, 404, 422] {
            assert!(matches!(of(code, "no"), JobFailure::Rejected { .. }), "{code}");
        }
        let told = of(401, r#"{"error":{"message":"wrong key","type":"x"}}"#).to_string();
        assert!(told.ends_with("401 Unauthorized: wrong key"), "{told}");
    }

    #[test]
    fn an_echoed_key_is_hidden_even_where_the_words_are_cut() {
        let key = Secret::new("sk-0123456789");
        let peer = Peer { url: "u".to_owned(), key: Some(&key) };
        let echo = format!("{}sk-0123456789 is wrong", "x".repeat(WORDS - 5));
        let told = peer.refused(reqwest::StatusCode::UNAUTHORIZED, echo.as_bytes()).to_string();
        assert!(told.contains("***") && !told.contains("sk-"), "{told}");
        assert!(peer.garbage("invalid type: sk-0123456789").to_string().ends_with("***"));
    }
}
