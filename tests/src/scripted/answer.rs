//! Sends a scripted answer, whole or as a stream, and records how the call ended.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Json;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Gate;
use super::calls::{End, OpenCall};

/// Protocol of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    OpenAi,
    OpenAiText,
    Ollama,
    OllamaText,
}

/// The chunks of an answer that are still to be sent; a gate may block before one of them.
pub(super) struct Chunks {
    texts: VecDeque<String>,
    bytes: usize,
    /// The gate, and the number of chunks that come after it.
    gate: Option<(usize, Gate)>,
}

impl Chunks {
    pub(super) fn of(text: &str) -> Self {
        let characters: Vec<char> = text.chars().collect();
        Self { texts: characters.chunks(8).map(|c| c.iter().collect()).collect(), bytes: text.len(), gate: None }
    }

    pub(super) fn gated(first: &str, rest: &str, gate: Gate) -> Self {
        let (mut all, rest) = (Self::of(first), Self::of(rest));
        // If no text follows the gate, it blocks the end of the stream.
        all.gate = Some((rest.texts.len(), gate));
        all.bytes += rest.bytes;
        all.texts.extend(rest.texts);
        all
    }

    /// Returns the next chunk; waits for the gate if it blocks this chunk. `None` at the end.
    async fn next(&mut self) -> Option<String> {
        if let Some((left, gate)) = &self.gate
            && *left == self.texts.len()
        {
            gate.passed().await;
        }
        self.texts.pop_front()
    }
}

pub(super) async fn whole(mut chunks: Chunks, finish: &str, delay: Duration, call: OpenCall) -> Response {
    let mut text = String::new();
    tokio::time::sleep(delay).await;
    while let Some(chunk) = chunks.next().await {
        text.push_str(&chunk);
    }
    call.record_sent(&text);
    call.finish(End::Answered);
    Json(json!({
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": finish }],
        "usage": { "prompt_tokens": 10, "completion_tokens": text.len() / 4, "total_tokens": 10 + text.len() / 4 },
    }))
    .into_response()
}

impl Protocol {
    fn chunk(self, text: &str) -> Bytes {
        match self {
            Self::OpenAi => {
                let chunk = json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }] });
                format!("data: {chunk}\n\n").into()
            }
            Self::OpenAiText => {
                let chunk =
                    json!({ "choices": [{ "index": 0, "text": text, "logprobs": null, "finish_reason": null }] });
                format!("data: {chunk}\n\n").into()
            }
            Self::Ollama => {
                let line = json!({ "message": { "role": "assistant", "content": text }, "done": false });
                format!("{line}\n").into()
            }
            Self::OllamaText => format!("{}\n", json!({ "response": text, "done": false })).into(),
        }
    }

    fn end(self, finish: &str, tokens: usize) -> Bytes {
        match self {
            Self::OpenAi | Self::OpenAiText => {
                let content = if self == Self::OpenAi { ("delta", json!({})) } else { ("text", json!("")) };
                let mut end = json!({ "choices": [{ "index": 0, "finish_reason": finish }] });
                end["choices"][0][content.0] = content.1;
                let usage = json!({ "prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 0 });
                let usage = json!({ "choices": [], "usage": usage });
                format!("data: {end}\n\ndata: {usage}\n\ndata: [DONE]\n\n").into()
            }
            Self::Ollama | Self::OllamaText => {
                let mut line = json!({
                    "done": true, "done_reason": finish, "prompt_eval_count": 10, "eval_count": tokens,
                });
                match self {
                    Self::Ollama => line["message"] = json!({ "role": "assistant", "content": "" }),
                    _ => line["response"] = json!(""),
                }
                format!("{line}\n").into()
            }
        }
    }

    fn response(self, stream: impl futures::Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
        let content_type = match self {
            Self::OpenAi | Self::OpenAiText => "text/event-stream",
            Self::Ollama | Self::OllamaText => "application/x-ndjson",
        };
        Response::builder().header("content-type", content_type).body(Body::from_stream(stream)).unwrap()
    }
}

pub(super) fn endless(protocol: Protocol, call: OpenCall) -> Response {
    protocol.response(futures::stream::repeat_with(move || {
        // The text is not recorded as sent, because the record would grow without bound.
        let _open = &call;
        Ok(protocol.chunk("all work and no play "))
    }))
}

pub(super) fn streamed(
    protocol: Protocol,
    chunks: Chunks,
    finish: &'static str,
    delay: Duration,
    call: OpenCall,
) -> Response {
    protocol.response(futures::stream::unfold(Some((chunks, call)), move |state| async move {
        let (mut chunks, call) = state?;
        tokio::time::sleep(delay).await;
        if let Some(text) = chunks.next().await {
            call.record_sent(&text);
            return Some((Ok(protocol.chunk(&text)), Some((chunks, call))));
        }
        call.finish(End::Answered);
        Some((Ok(protocol.end(finish, chunks.bytes / 4)), None))
    }))
}
