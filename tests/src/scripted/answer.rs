//! Writing a scripted answer to the connection, whole or in pieces, and telling what became of it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Json;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Gate;
use super::calls::{End, Ongoing};

/// A text as it goes out; before some piece of it a gate may stand.
pub(super) struct Pieces {
    texts: VecDeque<String>,
    bytes: usize,
    gate: Option<(usize, Gate)>,
}

impl Pieces {
    pub(super) fn of(text: &str) -> Self {
        let characters: Vec<char> = text.chars().collect();
        Self { texts: characters.chunks(8).map(|c| c.iter().collect()).collect(), bytes: text.len(), gate: None }
    }

    pub(super) fn held(first: &str, rest: &str, gate: Gate) -> Self {
        let (mut all, rest) = (Self::of(first), Self::of(rest));
        // The gate is where this many pieces are left, and the end of the stream besides.
        all.gate = Some((rest.texts.len(), gate));
        all.bytes += rest.bytes;
        all.texts.extend(rest.texts);
        all
    }

    /// Waits for the gate where one stands before the next piece.
    async fn next(&mut self) -> Option<String> {
        if let Some((left, gate)) = &self.gate
            && *left == self.texts.len()
        {
            gate.passed().await;
        }
        self.texts.pop_front()
    }
}

pub(super) async fn whole(mut pieces: Pieces, finish: &str, wait: Duration, call: Ongoing) -> Response {
    let mut text = String::new();
    tokio::time::sleep(wait).await;
    while let Some(piece) = pieces.next().await {
        text.push_str(&piece);
    }
    call.sent(&text);
    call.ends(End::Answered);
    Json(json!({
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": finish }],
        "usage": { "prompt_tokens": 10, "completion_tokens": text.len() / 4, "total_tokens": 10 + text.len() / 4 },
    }))
    .into_response()
}

fn frame(text: &str) -> Bytes {
    let chunk = json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }] });
    format!("data: {chunk}\n\n").into()
}

pub(super) fn endless(call: Ongoing) -> Response {
    sse(futures::stream::repeat_with(move || {
        // Not noted as sent: it would fill the memory.
        let _held = &call;
        Ok(frame("all work and no play "))
    }))
}

pub(super) fn streamed(pieces: Pieces, finish: &'static str, wait: Duration, call: Ongoing) -> Response {
    sse(futures::stream::unfold(Some((pieces, call)), move |state| async move {
        let (mut pieces, call) = state?;
        tokio::time::sleep(wait).await;
        if let Some(text) = pieces.next().await {
            call.sent(&text);
            return Some((Ok(frame(&text)), Some((pieces, call))));
        }
        call.ends(End::Answered);
        let tokens = pieces.bytes / 4;
        let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": finish }] });
        let usage =
            json!({ "choices": [], "usage": { "prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 0 } });
        Some((Ok(format!("data: {end}\n\ndata: {usage}\n\ndata: [DONE]\n\n").into()), None))
    }))
}

fn sse(stream: impl futures::Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    Response::builder().header("content-type", "text/event-stream").body(Body::from_stream(stream)).unwrap()
}
