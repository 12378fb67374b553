//! Chat completions and text completions of OpenAI: the request and the parts of the reply.

use cfq_proto::job::{ChatMessage, FinishReason, JobFailure, OutputFormat, Prompt, PromptForm};
use serde_json::{Value, json};

use super::chunk::Chunk;
use super::context_limit::ReportedUsage;
use super::reply::{PartContent, Reply};

/// End of a stream.
const DONE: &[u8] = b"[DONE]";

/// The body of a request with these messages. Parameters that OpenAI does not define are sent only if set, because
/// strict servers refuse them.
pub(super) fn request_body(remote: &str, prompt: &Prompt, messages: &[ChatMessage]) -> Value {
    let sampling = &prompt.sampling;
    let mut body = json!({
        "model": remote,
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
    match prompt.form {
        PromptForm::Chat => set("messages", json!(messages)),
        PromptForm::Text => set("prompt", json!(text_of(messages))),
    }
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

/// The path of the request below the server's URL.
pub(super) fn path(form: PromptForm) -> &'static str {
    match form {
        PromptForm::Chat => "chat/completions",
        PromptForm::Text => "completions",
    }
}

/// The text of a prompt that is no conversation.
pub(super) fn text_of(messages: &[ChatMessage]) -> String {
    messages.iter().map(|message| message.content.as_str()).collect()
}

/// Reads the parts of a reply.
#[derive(Debug, Default)]
pub(super) struct ChunkReader {
    /// Whether a chunk had a role.
    has_role: bool,
}

impl ChunkReader {
    /// Adds one chunk of a stream, or the whole reply of a server that does not stream, to the reply.
    pub(super) fn read(&mut self, part: &[u8], reply: &mut Reply<'_>) -> Result<PartContent, JobFailure> {
        if part == DONE {
            if reply.finish().is_none() {
                reply.set_finish(FinishReason::Stop);
            }
            return Ok(PartContent { is_progress: false, is_last: true });
        }
        let is_progress = self.read_chunk(part, reply)?;
        if is_progress {
            reply.report_progress();
        }
        Ok(PartContent { is_progress, is_last: false })
    }

    /// Returns whether the chunk is progress: the first role, text, other output of the model, the finish reason, or the
    /// usage of more tokens.
    fn read_chunk(&mut self, part: &[u8], reply: &mut Reply<'_>) -> Result<bool, JobFailure> {
        let peer = reply.peer();
        let url = &peer.name;
        let chunk: Chunk = peer.parse(part)?;
        if let Some(error) = chunk.error.filter(|e| !e.is_null()) {
            return Err(peer.error_in_reply(&error));
        }
        let mut is_progress = false;
        if let Some(usage) = chunk.usage {
            let cached_tokens = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
            let (prompt_tokens, output_tokens) = (usage.prompt_tokens, usage.completion_tokens);
            is_progress = reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens, output_tokens });
        }
        for choice in chunk.choices.into_iter().filter(|c| c.index == 0) {
            let message = choice.delta.or(choice.message);
            if let Some(refusal) = message.as_ref().and_then(|m| m.refusal.as_deref()) {
                return Err(JobFailure::Rejected { reason: format!("{url} refused: {}", peer.quote(refusal)) });
            }
            if let Some(message) = &message {
                // Some servers repeat the role in every chunk.
                let is_first_role = message.role.is_some() && !std::mem::replace(&mut self.has_role, true);
                is_progress |= is_first_role || message.has_other_output();
            }
            let text = message.and_then(|m| m.content).or(choice.text);
            is_progress |= reply.push_text(text.unwrap_or_default())?;
            if reply.is_stopped() {
                return Ok(true);
            }
            let finish = match choice.finish_reason.as_deref() {
                None => continue,
                Some("length") => FinishReason::Length,
                Some("content_filter") => {
                    return Err(JobFailure::Rejected { reason: format!("{url}: its content filter ended the reply") });
                }
                Some(_) => FinishReason::Stop,
            };
            is_progress |= reply.set_finish(finish);
        }
        Ok(is_progress)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use cfq_engine::Generation;
    use cfq_proto::job::Sampling;
    use futures::FutureExt;

    use super::*;
    use crate::proxy::peer::Peer;

    #[test]
    fn only_requested_parameters_are_sent() {
        let prompt =
            Prompt { messages: vec![], sampling: Sampling::default(), format: OutputFormat::Text, ..Prompt::default() };
        let plain = request_body("m", &prompt, &[]);
        for absent in ["top_k", "min_p", "top_p", "stop", "repetition_penalty", "response_format"] {
            assert!(plain.get(absent).is_none(), "{absent}");
        }
        let sampling = Sampling { top_k: Some(5), stop: vec!["x".into()], ..Sampling::default() };
        let format = OutputFormat::JsonSchema { schema: json!({ "type": "object" }) };
        let full = request_body("m", &Prompt { messages: vec![], sampling, format, ..Prompt::default() }, &[]);
        assert_eq!(full["response_format"]["json_schema"]["schema"]["type"], "object");
        assert_eq!((&full["top_k"], &full["stop"][0]), (&json!(5), &json!("x")));
    }

    #[test]
    fn only_chunks_with_something_new_are_progress() {
        let (outbox, mut reader) = Generation::channel();
        let peer = Peer::new("u".to_owned(), None);
        let mut reply = Reply::new((&peer, &outbox, Instant::now()), &[], false, 1000);
        let mut chunks = ChunkReader::default();
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
            let returned = chunks.read(chunk.as_bytes(), &mut reply).unwrap().is_progress;
            let is_reported = reader.next().now_or_never().is_some();
            assert_eq!((returned, is_reported), (progress, progress), "{chunk}");
        }
        let done = reply.into_completion().unwrap();
        assert_eq!((done.text.as_str(), done.finish), ("text", FinishReason::Stop));
    }

    #[test]
    fn quotes_of_an_invalid_chunk_are_short() {
        let (outbox, _reader) = Generation::channel();
        let peer = Peer::new("u".to_owned(), None);
        // The parser's error contains the whole value.
        for chunk in [
            format!(r#"{{"choices":"{}"}}"#, "x".repeat(2 << 20)),
            format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(2 << 20)),
        ] {
            let mut reply = Reply::new((&peer, &outbox, Instant::now()), &[], false, 1000);
            let failure = ChunkReader::default().read(chunk.as_bytes(), &mut reply).unwrap_err();
            assert!(failure.to_string().len() < 4096, "{} bytes", failure.to_string().len());
        }
    }
}
