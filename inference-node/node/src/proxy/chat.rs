//! One chat completion at an endpoint: builds the request and reads the stream. `peer` classifies the failures.

use std::time::Instant;

use cfq_engine::{Outbox, TextStream};
use cfq_proto::job::{ChatMessage, Completion, FinishReason, JobFailure, OutputFormat, Prompt, Usage};
use serde_json::{Value, json};

use crate::proxy::EndpointClient;
use crate::proxy::chunk::{Chunk, RemoteUsage};
use crate::proxy::control_names::Unescape;
use crate::proxy::peer::{Peer, error_message};
use crate::proxy::sse::EventParser;

/// Maximum bytes that are read of the body of an error response.
const MAX_ERROR_BODY_BYTES: usize = 64 << 10;
/// Maximum bytes of text per requested token; tokens are rarely longer.
const MAX_TOKEN_BYTES: usize = 32;
/// Lower bound for the limit on a reply's text, in bytes; it applies if only few tokens are requested.
const MIN_TEXT_LIMIT_BYTES: usize = 64 << 10;
/// Maximum ratio of received bytes to bytes of text in a stream. It is high because each token is sent in its own
/// event.
const MAX_STREAM_BYTES_PER_TEXT_BYTE: usize = 64;
/// Maximum ratio of received bytes to bytes of text in a reply that is not streamed.
const MAX_JSON_BYTES_PER_TEXT_BYTE: usize = 8;

/// The body of a request with these messages. Parameters that OpenAI does not define are sent only if set, because
/// strict servers refuse them.
fn request_body(remote: &str, prompt: &Prompt, messages: &[ChatMessage]) -> Value {
    let sampling = &prompt.sampling;
    let mut body = json!({
        "model": remote,
        "messages": messages,
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
        // OpenAI accepts at most four. All stop strings are also applied to the received text.
        set("stop", json!(sampling.stop.iter().take(4).collect::<Vec<_>>()));
    }
    if let OutputFormat::JsonSchema { schema } = &prompt.format {
        set("response_format", json!({ "type": "json_schema", "json_schema": { "name": "output", "schema": schema } }));
    }
    body
}

/// The reply so far.
struct Reply {
    unescape: Unescape,
    stream: TextStream,
    text: String,
    finish: Option<FinishReason>,
    /// Whether a chunk had a role.
    has_role: bool,
    /// Number of chunks with text.
    text_chunks: u32,
    first_token_ms: Option<u64>,
    usage: Option<RemoteUsage>,
    /// Maximum size of the text, in bytes.
    max_text_bytes: usize,
}

/// Runs one chat completion with the server's model `remote`; the text is sent to `outbox` as it arrives.
pub(super) async fn complete(
    server: &EndpointClient,
    remote: &str,
    prompt: &Prompt,
    outbox: &Outbox,
    started: Instant,
) -> Result<Completion, JobFailure> {
    if let OutputFormat::Regex { .. } | OutputFormat::Grammar { .. } = prompt.format {
        let reason = "the OpenAI protocol does not support output by regular expression or grammar; use a model that \
                      runs in-process, or a JSON schema";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    let peer = &Peer { url: format!("{}/chat/completions", server.url), key: server.key.as_ref() };
    let escaped = server.control_names(remote).and_then(|names| names.escape(&prompt.messages));
    let body = request_body(remote, prompt, escaped.as_deref().unwrap_or(&prompt.messages));
    let request = server.authorized(server.client.post(&peer.url)).json(&body);
    let mut answer = request.send().await.map_err(|error| peer.unreachable(&error))?;
    let status = answer.status();
    if !status.is_success() {
        let mut body = Vec::new();
        while body.len() < MAX_ERROR_BODY_BYTES {
            match answer.chunk().await {
                Ok(Some(bytes)) => body.extend_from_slice(&bytes[..bytes.len().min(MAX_ERROR_BODY_BYTES - body.len())]),
                Ok(None) | Err(_) => break,
            }
        }
        return Err(peer.error_status(status, &body));
    }
    let streams = answer
        .headers()
        .get(reqwest::header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .is_none_or(|kind| !kind.contains("application/json"));
    let max_text_bytes =
        (prompt.sampling.max_tokens as usize).saturating_mul(MAX_TOKEN_BYTES).max(MIN_TEXT_LIMIT_BYTES);
    let mut reply = Reply::new(&prompt.sampling.stop, escaped.is_some(), max_text_bytes);
    let mut events = EventParser::default();
    let mut whole = Vec::new();
    let mut received = 0usize;
    // SSE comments and chunks without anything new keep the connection alive, but are no progress of the job.
    let mut last_progress = Instant::now();
    'reading: while let Some(bytes) = peer.chunk(&mut answer, last_progress + server.step_timeout).await? {
        received += bytes.len();
        if received > max_text_bytes.saturating_mul(MAX_STREAM_BYTES_PER_TEXT_BYTE) {
            return Err(peer.invalid_reply(&format!("it sent {received} bytes without an end")));
        }
        if !streams {
            whole.extend_from_slice(&bytes);
            if whole.len() > max_text_bytes.saturating_mul(MAX_JSON_BYTES_PER_TEXT_BYTE) {
                return Err(peer.invalid_reply(&format!("its reply is longer than {} bytes", whole.len())));
            }
            continue;
        }
        for data in events.push(&bytes).map_err(|error| peer.invalid_reply(&error.to_string()))? {
            if data == "[DONE]" {
                reply.finish.get_or_insert(FinishReason::Stop);
                break 'reading;
            }
            if reply.on_chunk(peer, data.as_bytes(), outbox, started)? {
                last_progress = Instant::now();
            }
        }
        if reply.is_stopped() {
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
                reply.on_chunk(peer, data.as_bytes(), outbox, started)?;
            }
        }
    } else {
        reply.on_chunk(peer, &whole, outbox, started)?;
    }
    let Some(finish) = reply.finish else {
        return Err(JobFailure::Unavailable { reason: format!("{} broke off in the middle of its reply", peer.url) });
    };
    let rest = reply.stream.finish();
    outbox.report_step(&rest);
    reply.text.push_str(&rest);
    let total_ms = started.elapsed().as_millis() as u64;
    let reported = reply.usage.as_ref();
    let usage = Usage {
        prompt_tokens: reported.map_or(0, |u| u.prompt_tokens),
        cached_tokens: reported.and_then(|u| u.prompt_tokens_details.as_ref()?.cached_tokens).unwrap_or(0),
        output_tokens: reported.map_or(reply.text_chunks, |u| u.completion_tokens),
        first_token_ms: reply.first_token_ms.unwrap_or(total_ms),
        total_ms,
        ..Usage::default()
    };
    Ok(Completion { text: reply.text, finish, usage, logprobs: Vec::new() })
}

impl Reply {
    /// An empty reply; `escaped`: whether the prompt has invisible characters.
    fn new(stop: &[String], escaped: bool, max_text_bytes: usize) -> Self {
        Self {
            unescape: Unescape::new(escaped),
            stream: TextStream::new(stop),
            text: String::new(),
            finish: None,
            has_role: false,
            text_chunks: 0,
            first_token_ms: None,
            usage: None,
            max_text_bytes,
        }
    }

    /// Whether a stop string was found in the text; the endpoint may still be generating.
    fn is_stopped(&mut self) -> bool {
        self.finish.is_some() && self.stream.push(&[]).stopped
    }

    /// Processes one chunk of the stream, or the whole reply of a server that does not stream. Returns whether it is
    /// progress, and reports progress as a step: the first role, text, other output of the model, the finish reason, or
    /// the usage of more tokens.
    fn on_chunk(
        &mut self,
        peer: &Peer<'_>,
        data: &[u8],
        outbox: &Outbox,
        started: Instant,
    ) -> Result<bool, JobFailure> {
        let url = &peer.url;
        let chunk: Chunk = serde_json::from_slice(data).map_err(|error| {
            peer.invalid_reply(&format!("{error} in {:?}", peer.quote(&String::from_utf8_lossy(data))))
        })?;
        if let Some(error) = chunk.error.filter(|e| !e.is_null()) {
            return Err(JobFailure::Unavailable { reason: format!("{url}: {}", peer.quote(&error_message(&error))) });
        }
        let mut is_progress = false;
        if let Some(usage) = chunk.usage {
            is_progress = self.usage.as_ref().is_none_or(|last| last.completion_tokens < usage.completion_tokens);
            self.usage = Some(usage);
        }
        for choice in chunk.choices.into_iter().filter(|c| c.index == 0) {
            let part = choice.delta.or(choice.message);
            if let Some(refusal) = part.as_ref().and_then(|p| p.refusal.as_deref()) {
                return Err(JobFailure::Rejected { reason: format!("{url} refused: {}", peer.quote(refusal)) });
            }
            if let Some(part) = &part {
                // Some servers repeat the role in every chunk.
                let is_first_role = part.role.is_some() && !std::mem::replace(&mut self.has_role, true);
                is_progress |= is_first_role || part.has_other_output();
            }
            let content = self.unescape.push(part.and_then(|p| p.content).unwrap_or_default());
            if !content.is_empty() {
                is_progress = true;
                self.text_chunks += 1;
                self.first_token_ms.get_or_insert(started.elapsed().as_millis() as u64);
                let piece = self.stream.push(content.as_bytes());
                self.text.push_str(&piece.text);
                outbox.report_step(&piece.text);
                if piece.stopped {
                    self.finish = Some(FinishReason::Stop);
                    return Ok(true);
                }
                if self.text.len() > self.max_text_bytes {
                    return Err(peer.invalid_reply(&format!("its text is longer than {} bytes", self.max_text_bytes)));
                }
            }
            let finish = match choice.finish_reason.as_deref() {
                None => continue,
                Some("length") => FinishReason::Length,
                Some("content_filter") => {
                    return Err(JobFailure::Rejected { reason: format!("{url}: its content filter ended the reply") });
                }
                Some(_) => FinishReason::Stop,
            };
            is_progress |= self.finish.replace(finish).is_none();
        }
        if is_progress {
            outbox.report_step("");
        }
        Ok(is_progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_engine::Generation;
    use cfq_proto::job::Sampling;
    use futures::FutureExt;

    #[test]
    fn only_requested_parameters_are_sent() {
        let prompt = Prompt { messages: vec![], sampling: Sampling::default(), format: OutputFormat::Text };
        let plain = request_body("m", &prompt, &[]);
        for absent in ["top_k", "min_p", "top_p", "stop", "repetition_penalty", "response_format"] {
            assert!(plain.get(absent).is_none(), "{absent}");
        }
        let sampling = Sampling { top_k: Some(5), stop: vec!["x".into()], ..Sampling::default() };
        let format = OutputFormat::JsonSchema { schema: json!({ "type": "object" }) };
        let full = request_body("m", &Prompt { messages: vec![], sampling, format }, &[]);
        assert_eq!(full["response_format"]["json_schema"]["schema"]["type"], "object");
        assert_eq!((&full["top_k"], &full["stop"][0]), (&json!(5), &json!("x")));
    }

    #[test]
    fn only_chunks_with_something_new_are_progress() {
        let (outbox, mut reader) = Generation::channel();
        let peer = Peer { url: "u".to_owned(), key: None };
        let mut reply = Reply::new(&[], false, 1000);
        let delta = |delta: &str| format!(r#"{{"choices":[{{"index":0,"delta":{delta}}}]}}"#);
        let usage = |tokens: u32| format!(r#"{{"choices":[],"usage":{{"completion_tokens":{tokens}}}}}"#);
        let role = delta(r#"{"role":"assistant","content":""}"#);
        let finish = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#.to_owned();
        for (chunk, progress) in [
            ("{}".to_owned(), false),
            (r#"{"choices":[]}"#.to_owned(), false),
            (delta("{}"), false),
            (delta(r#"{"content":null}"#), false),
            (role.clone(), true),
            (role, false),
            (delta(r#"{"role":"assistant","reasoning":"hm","content":""}"#), true),
            (delta(r#"{"reasoning_content":"hm"}"#), true),
            (delta(r#"{"reasoning_content":"","reasoning":"","tool_calls":[]}"#), false),
            (delta(r#"{"tool_calls":[{"index":0}]}"#), true),
            (delta(r#"{"content":"text"}"#), true),
            (usage(5), true),
            (usage(5), false),
            (usage(6), true),
            (finish.clone(), true),
            (finish, false),
            (usage(6), false),
        ] {
            let returned = reply.on_chunk(&peer, chunk.as_bytes(), &outbox, Instant::now()).unwrap();
            let is_reported = reader.next().now_or_never().is_some();
            assert_eq!((returned, is_reported), (progress, progress), "{chunk}");
        }
        assert_eq!((reply.text.as_str(), reply.finish), ("text", Some(FinishReason::Stop)));
    }

    #[test]
    fn quotes_of_an_invalid_chunk_are_short() {
        let (outbox, _reader) = Generation::channel();
        let peer = Peer { url: "u".to_owned(), key: None };
        // The parser's error contains the whole value.
        for chunk in [
            format!(r#"{{"choices":"{}"}}"#, "x".repeat(2 << 20)),
            format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(2 << 20)),
        ] {
            let chunk = chunk.as_bytes();
            let failure = Reply::new(&[], false, 1000).on_chunk(&peer, chunk, &outbox, Instant::now()).unwrap_err();
            assert!(failure.to_string().len() < 4096, "{} bytes", failure.to_string().len());
        }
    }
}
