//! Chat completions and text completions in Ollama's own protocol (<https://docs.ollama.com/api/chat>,
//! <https://docs.ollama.com/api/generate>): the request and the lines of the reply.
//!
//! Ollama's OpenAI-compatible API has no parameter for the context length, and silently truncates a prompt that does not
//! fit. Here, each request sets `num_ctx`, and `truncate: false` makes a longer prompt an error.

use cfq_proto::job::{ChatMessage, FinishReason, JobFailure, OutputFormat, Prompt, PromptForm};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::context_limit::ReportedUsage;
use super::openai::text_of;
use super::reply::{PartContent, Reply};

/// The body of a request with these messages. `context_tokens` is the context length with which the server loads the
/// model; another length makes it load the model again.
pub(super) fn request_body(remote: &str, prompt: &Prompt, messages: &[ChatMessage], context_tokens: u32) -> Value {
    let sampling = &prompt.sampling;
    // llama.cpp's seeds have 32 bits, and the server refuses negative ones.
    let seed = sampling.seed & u64::from(u32::MAX >> 1);
    let mut options = json!({
        "num_ctx": context_tokens,
        "num_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": seed,
        // Many versions apply a repetition penalty by default, which harms code.
        "repeat_penalty": sampling.repetition_penalty,
    });
    let optional = [
        ("top_p", sampling.top_p.map(|p| json!(p))),
        ("top_k", sampling.top_k.map(|k| json!(k))),
        ("min_p", sampling.min_p.map(|p| json!(p))),
        ("frequency_penalty", (sampling.frequency_penalty != 0.0).then(|| json!(sampling.frequency_penalty))),
        ("presence_penalty", (sampling.presence_penalty != 0.0).then(|| json!(sampling.presence_penalty))),
        ("stop", (!sampling.stop.is_empty()).then(|| json!(sampling.stop))),
    ];
    if let Some(options) = options.as_object_mut() {
        options.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    }
    let mut body = json!({
        "model": remote,
        "stream": true,
        // A prompt or reply that does not fit the context is an error, or ends with the reason `length`.
        "truncate": false,
        "shift": false,
        "options": options,
    });
    match prompt.form {
        PromptForm::Chat => body["messages"] = json!(messages),
        PromptForm::Text => {
            body["prompt"] = json!(text_of(messages));
            // Without the template of the model.
            body["raw"] = json!(true);
            // Otherwise Ollama takes text between tags of reasoning out of the response.
            body["think"] = json!(false);
        }
    }
    if let OutputFormat::JsonSchema { schema } = &prompt.format {
        body["format"] = schema.clone();
    }
    body
}

/// The path of the request below the server's root.
pub(super) fn path(form: PromptForm) -> &'static str {
    match form {
        PromptForm::Chat => "api/chat",
        PromptForm::Text => "api/generate",
    }
}

#[derive(Deserialize)]
struct Line {
    message: Option<Message>,
    /// Text of a text completion.
    response: Option<String>,
    /// Reasoning of a text completion. It is not part of the reply's text.
    #[serde(default)]
    thinking: String,
    #[serde(default)]
    done: bool,
    done_reason: Option<String>,
    #[serde(default)]
    prompt_eval_count: u32,
    #[serde(default)]
    eval_count: u32,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: String,
    /// Reasoning of the model. It is not part of the reply's text.
    #[serde(default)]
    thinking: String,
    tool_calls: Option<Vec<IgnoredAny>>,
}

/// Adds one line to the reply.
pub(super) fn read_line(line: &[u8], reply: &mut Reply<'_>) -> Result<PartContent, JobFailure> {
    let line: Line = reply.peer().parse(line)?;
    if let Some(error) = line.error.filter(|e| !e.is_null()) {
        return Err(reply.peer().error_in_reply(&error));
    }
    let mut is_progress = !line.thinking.is_empty();
    if let Some(message) = line.message {
        is_progress |= !message.thinking.is_empty() || message.tool_calls.is_some_and(|calls| !calls.is_empty());
        is_progress |= reply.push_text(message.content)?;
    }
    if let Some(text) = line.response {
        is_progress |= reply.push_text(text)?;
    }
    if line.done {
        is_progress = true;
        let (prompt_tokens, output_tokens) = (line.prompt_eval_count, line.eval_count);
        reply.set_usage(ReportedUsage { prompt_tokens, cached_tokens: 0, output_tokens });
        if !reply.is_stopped() {
            let is_cut = line.done_reason.as_deref() == Some("length");
            reply.set_finish(if is_cut { FinishReason::Length } else { FinishReason::Stop });
        }
    }
    if is_progress {
        reply.report_progress();
    }
    Ok(PartContent { is_progress, is_last: line.done })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use cfq_engine::Generation;
    use cfq_proto::job::Sampling;

    use super::*;
    use crate::proxy::peer::Peer;

    #[test]
    fn request_sets_the_context_length_and_forbids_truncation() {
        let sampling = Sampling { top_k: Some(5), stop: vec!["x".into()], seed: u64::MAX, ..Sampling::default() };
        let format = OutputFormat::JsonSchema { schema: json!({ "type": "object" }) };
        let body = request_body("m", &Prompt { messages: vec![], sampling, format, ..Prompt::default() }, &[], 16_384);
        assert_eq!((&body["truncate"], &body["shift"]), (&json!(false), &json!(false)));
        assert_eq!(body["options"]["num_ctx"], 16_384);
        assert_eq!((&body["options"]["top_k"], &body["options"]["stop"]), (&json!(5), &json!(["x"])));
        assert_eq!(body["options"]["seed"], i32::MAX);
        assert_eq!(body["format"], json!({ "type": "object" }));
        let plain =
            Prompt { messages: vec![], sampling: Sampling::default(), format: OutputFormat::Text, ..Prompt::default() };
        let plain = request_body("m", &plain, &[], 16_384);
        assert!(plain.get("format").is_none() && plain["options"].get("top_p").is_none(), "{plain}");
    }

    #[test]
    fn reasoning_is_progress_but_no_text_and_the_last_line_has_the_usage() {
        let (outbox, _reader) = Generation::channel();
        let peer = Peer::new("u".to_owned(), None);
        let mut reply = Reply::new((&peer, &outbox, Instant::now()), &[], false, 1000);
        for (line, is_progress, is_last) in [
            (r#"{"model":"m","message":{"role":"assistant","content":""},"done":false}"#, false, false),
            (r#"{"message":{"role":"assistant","content":"","thinking":"hm"},"done":false}"#, true, false),
            (r#"{"message":{"role":"assistant","content":"te"},"done":false}"#, true, false),
            (
                r#"{"message":{"content":"xt"},"done":true,"done_reason":"length","prompt_eval_count":9,"eval_count":4}"#,
                true,
                true,
            ),
        ] {
            let content = read_line(line.as_bytes(), &mut reply).unwrap();
            assert_eq!(content, PartContent { is_progress, is_last }, "{line}");
        }
        let done = reply.into_completion().unwrap();
        assert_eq!((done.text.as_str(), done.finish), ("text", FinishReason::Length));
        assert_eq!((done.usage.prompt_tokens, done.usage.output_tokens), (9, 4));
    }

    #[test]
    fn text_completion_is_raw_and_its_lines_are_read() {
        let messages = [ChatMessage { role: cfq_proto::job::ChatRole::User, content: "a b".to_owned() }];
        let prompt = Prompt { form: PromptForm::Text, ..Prompt::default() };
        let body = request_body("m", &prompt, &messages, 4096);
        assert_eq!((&body["prompt"], &body["raw"], &body["think"]), (&json!("a b"), &json!(true), &json!(false)));
        assert!(body.get("messages").is_none(), "{body}");
        let (outbox, _reader) = Generation::channel();
        let peer = Peer::new("u".to_owned(), None);
        let mut reply = Reply::new((&peer, &outbox, Instant::now()), &[], false, 1000);
        for (line, is_progress) in [
            (r#"{"response":"","thinking":"hm","done":false}"#, true),
            (r#"{"response":"","done":false}"#, false),
            (r#"{"response":" c","done":false}"#, true),
            (r#"{"response":"","done":true,"done_reason":"length","eval_count":1}"#, true),
        ] {
            assert_eq!(read_line(line.as_bytes(), &mut reply).unwrap().is_progress, is_progress, "{line}");
        }
        let done = reply.into_completion().unwrap();
        assert_eq!((done.text.as_str(), done.finish), (" c", FinishReason::Length));
    }
}
