//! One completion at an endpoint: sends the request and reads the reply, in the protocol of the model.

use std::time::{Duration, Instant};

use cfq_engine::Outbox;
use cfq_proto::job::{Completion, JobFailure, OutputFormat, Prompt, PromptForm};

use super::EndpointClient;
use super::context_limit::ContextLimit;
use super::framing::Parts;
use super::ollama;
use super::openai::{self, ChunkReader};
use super::peer::Peer;
use super::protocol::{Protocol, RemoteModel};
use super::reply::{PartContent, Reply};
use super::sse::EventParser;

/// Maximum time in which the body of an error response is read.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes that are read of the body of an error response.
const MAX_ERROR_BODY_BYTES: usize = 64 << 10;
/// Maximum bytes of text per requested token; tokens are rarely longer.
const MAX_TOKEN_BYTES: usize = 32;
/// Lower bound for the limit on a reply's text, in bytes; it applies if only few tokens are requested.
const MIN_TEXT_LIMIT_BYTES: usize = 64 << 10;
/// Maximum ratio of received bytes to bytes of text in a stream. It is high because each token is sent in its own part.
const MAX_STREAM_BYTES_PER_TEXT_BYTE: usize = 64;
/// Maximum ratio of received bytes to bytes of text in a reply that is not streamed.
const MAX_JSON_BYTES_PER_TEXT_BYTE: usize = 8;

/// Words of Ollama's error for a model that it does not have.
const MISSING_MODEL: &str = "not found";
/// Interval at which a call that waits for Ollama reports a step.
const LOADING_STEP_INTERVAL: Duration = Duration::from_secs(5);
/// Number of these intervals with failed health checks after which the call fails. A machine that loads a large model may
/// miss a check.
const MAX_DOWN_INTERVALS: u32 = 3;

/// Waits for the head of Ollama's reply, which is sent with the first token: before it, Ollama loads the model, and it
/// stops the load if the connection is closed. While the health checks succeed, this wait is progress.
async fn while_loading<T>(
    sent: impl Future<Output = T>,
    client: &EndpointClient,
    outbox: &Outbox,
) -> Result<T, JobFailure> {
    let mut sent = std::pin::pin!(sent);
    let mut interval = tokio::time::interval(LOADING_STEP_INTERVAL);
    let mut down_intervals = 0;
    loop {
        tokio::select! {
            answer = &mut sent => return Ok(answer),
            _ = interval.tick() => match client.down_reason() {
                Some(reason) => {
                    down_intervals += 1;
                    if down_intervals >= MAX_DOWN_INTERVALS {
                        return Err(JobFailure::Unavailable { reason });
                    }
                }
                None => {
                    down_intervals = 0;
                    outbox.report_step("");
                }
            },
        }
    }
}

/// Reads the parts of a reply in the protocol of the model.
enum PartReader {
    OpenAi(ChunkReader),
    Ollama,
}

impl PartReader {
    fn read(&mut self, part: &[u8], reply: &mut Reply<'_>) -> Result<PartContent, JobFailure> {
        match self {
            Self::OpenAi(chunks) => chunks.read(part, reply),
            Self::Ollama => ollama::read_line(part, reply),
        }
    }
}

/// Runs one completion with a model of the server; the text is sent to `outbox` as it arrives.
pub(super) async fn complete(
    client: &EndpointClient,
    model: &RemoteModel,
    prompt: &Prompt,
    outbox: &Outbox,
    started: Instant,
) -> Result<Completion, JobFailure> {
    if prompt.form == PromptForm::Text && model.protocol == Protocol::OpenAi && prompt.format != OutputFormat::Text {
        // Some servers ignore what the protocol does not define.
        let reason =
            "OpenAI's protocol does not constrain the output of text completions; use a model that runs in-process";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    if let OutputFormat::Regex { .. } | OutputFormat::Grammar { .. } = prompt.format {
        let reason = "the server's protocol does not support output by regular expression or grammar; use a model that \
                      runs in-process, or a JSON schema";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    let server = &client.server;
    let escaped = client.report(model).control_names.and_then(|names| names.escape(&prompt.messages));
    let messages = escaped.as_deref().unwrap_or(&prompt.messages);
    let context_tokens = client.context_tokens(model);
    let (path, body) = match model.protocol {
        Protocol::OpenAi => {
            let path = format!("{}/{}", server.url, openai::path(prompt.form));
            (path, openai::request_body(&model.name, prompt, messages))
        }
        Protocol::Ollama => {
            let path = format!("{}/{}", server.root(), ollama::path(prompt.form));
            (path, ollama::request_body(&model.name, prompt, messages, context_tokens))
        }
    };
    let limit = ContextLimit::of(prompt, context_tokens);
    let peer = &Peer { context: Some(limit), ..Peer::new(path, server.key.as_ref()) };
    let request = match model.protocol {
        Protocol::OpenAi => server.client.post(&peer.name),
        Protocol::Ollama => server.patient_client.post(&peer.name),
    };
    let sent = server.authorized(request).json(&body).send();
    let mut answer = match model.protocol {
        Protocol::OpenAi => sent.await,
        Protocol::Ollama => while_loading(sent, client, outbox).await?,
    }
    .map_err(|error| peer.unreachable(&error))?;
    let status = answer.status();
    if !status.is_success() {
        let mut body = Vec::new();
        let deadline = Instant::now() + ERROR_BODY_TIMEOUT;
        while body.len() < MAX_ERROR_BODY_BYTES {
            match peer.chunk(&mut answer, deadline).await {
                Ok(Some(bytes)) => body.extend_from_slice(&bytes[..bytes.len().min(MAX_ERROR_BODY_BYTES - body.len())]),
                Ok(None) | Err(_) => break,
            }
        }
        let failure = peer.error_status(status, &body);
        if model.protocol == Protocol::Ollama
            && status == reqwest::StatusCode::NOT_FOUND
            && failure.to_string().contains(MISSING_MODEL)
        {
            // The model was removed from the server. It can be pulled again while the job waits.
            let reason = format!("{} ({failure})", client.record_missing(model));
            return Err(JobFailure::Unavailable { reason });
        }
        return Err(failure);
    }
    let content_type = answer.headers().get(reqwest::header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let streams = content_type.is_none_or(|kind| !kind.contains("application/json"));
    let max_text_bytes =
        (prompt.sampling.max_tokens as usize).saturating_mul(MAX_TOKEN_BYTES).max(MIN_TEXT_LIMIT_BYTES);
    let max_stream_bytes = max_text_bytes.saturating_mul(MAX_STREAM_BYTES_PER_TEXT_BYTE);
    let (mut parts, mut reader) = match model.protocol {
        Protocol::OpenAi => (Parts::Events(EventParser::default()), PartReader::OpenAi(ChunkReader::default())),
        Protocol::Ollama => (Parts::Lines(Vec::new()), PartReader::Ollama),
    };
    if !streams {
        let max_bytes = max_text_bytes.saturating_mul(MAX_JSON_BYTES_PER_TEXT_BYTE);
        parts = Parts::Whole { body: Vec::new(), max_bytes };
    }
    let mut reply = Reply::new((peer, outbox, started), &prompt.sampling.stop, escaped.is_some(), max_text_bytes);
    let mut received = 0usize;
    // Comments and parts without anything new keep the connection alive, but are no progress of the job.
    let mut last_progress = Instant::now();
    while let Some(bytes) = peer.chunk(&mut answer, last_progress + client.step_timeout).await? {
        received += bytes.len();
        if received > max_stream_bytes {
            return Err(peer.invalid_reply(&format!("it sent {received} bytes without an end")));
        }
        for part in parts.push(&bytes).map_err(|error| peer.invalid_reply(&error.to_string()))? {
            let content = reader.read(&part, &mut reply)?;
            if content.is_progress {
                last_progress = Instant::now();
            }
            if content.is_last {
                return reply.into_completion();
            }
        }
        if reply.is_stopped() {
            return reply.into_completion();
        }
    }
    if (reply.finish().is_none() || !streams)
        && let Some(part) = parts.finish()
    {
        reader.read(&part, &mut reply)?;
    }
    reply.into_completion()
}
