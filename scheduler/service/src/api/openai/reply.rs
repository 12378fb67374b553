//! The bodies of chat replies: `chat.completion`, and the chunks of a stream.

use cfq_proto::job::{Completion, FinishReason, TokenLogprob, TokenLogprobs, Usage};
use serde_json::{Value, json};

use super::tools::{ToolCall, Tools};

/// What all bodies of one reply have in common.
#[derive(Debug, Clone)]
pub struct ReplyHead {
    /// Id of the call.
    pub id: String,
    /// Time of the request, in seconds since 1970.
    pub created: i64,
    /// The model as the client named it.
    pub model: String,
    pub include_usage: bool,
    /// The functions that the model may call.
    pub tools: Tools,
}

impl ReplyHead {
    /// The body of a reply that is not streamed.
    pub fn whole(&self, completion: &Completion) -> Value {
        let (content, calls) = self.tools.parse_tool_calls(&completion.text);
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null, "annotations": [] });
        if !calls.is_empty() {
            message["tool_calls"] = calls.iter().map(tool_call).collect();
            if content.is_empty() {
                message["content"] = Value::Null;
            }
        }
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": message,
                "logprobs": logprobs(&completion.logprobs),
                "finish_reason": finish_reason(completion.finish, &calls),
            }],
            "usage": usage(&completion.usage),
        })
    }

    /// The first chunk of a stream; it has no text.
    pub fn first_chunk(&self) -> Value {
        self.chunk(json!({ "role": "assistant", "content": "" }), None)
    }

    /// A chunk with text.
    pub fn text_chunk(&self, text: &str) -> Value {
        self.chunk(json!({ "content": text }), None)
    }

    /// The chunk with the calls of functions.
    pub fn tool_calls_chunk(&self, calls: &[ToolCall]) -> Value {
        let indexed = calls.iter().enumerate().map(|(index, call)| {
            let mut entry = json!({ "index": index });
            for (name, value) in tool_call(call).as_object().into_iter().flatten() {
                entry[name] = value.clone();
            }
            entry
        });
        self.chunk(json!({ "tool_calls": indexed.collect::<Value>() }), None)
    }

    /// The last chunk of the choice.
    pub fn last_chunk(&self, finish: FinishReason, calls: &[ToolCall]) -> Value {
        self.chunk(json!({}), Some(finish_reason(finish, calls)))
    }

    /// The chunk with the usage, after all others.
    pub fn usage_chunk(&self, used: &Usage) -> Value {
        let mut chunk = self.chunk(json!({}), None);
        chunk["choices"] = json!([]);
        chunk["usage"] = usage(used);
        chunk
    }

    fn chunk(&self, delta: Value, finish_reason: Option<&'static str>) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason }],
        });
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

fn finish_reason(finish: FinishReason, calls: &[ToolCall]) -> &'static str {
    match finish {
        _ if !calls.is_empty() => "tool_calls",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn tool_call(call: &ToolCall) -> Value {
    json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": call.arguments } })
}

fn usage(used: &Usage) -> Value {
    json!({
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.prompt_tokens.saturating_add(used.output_tokens),
        "prompt_tokens_details": { "cached_tokens": used.cached_tokens },
        "completion_tokens_details": {
            "accepted_prediction_tokens": used.accepted_tokens,
            "rejected_prediction_tokens": used.drafted_tokens.saturating_sub(used.accepted_tokens),
        },
    })
}

/// Null if the model's server returned none.
fn logprobs(tokens: &[TokenLogprobs]) -> Value {
    if tokens.is_empty() {
        return Value::Null;
    }
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut entry = logprob(&token.own);
            entry["top_logprobs"] = token.top_logprobs.iter().map(logprob).collect();
            entry
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

fn logprob(token: &TokenLogprob) -> Value {
    json!({ "token": token.token, "logprob": token.logprob, "bytes": token.token.as_bytes() })
}
