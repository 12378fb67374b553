//! The bodies of replies: `chat.completion` and its chunks, and `text_completion`, whose chunks have the same form.

use cfq_proto::job::{Completion, FinishReason, PromptForm, TokenLogprob, TokenLogprobs, Usage};
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
    pub form: PromptForm,
    /// The functions that the model may call.
    pub tools: Tools,
}

impl ReplyHead {
    /// The body of a reply that is not streamed.
    pub fn whole(&self, completion: &Completion) -> Value {
        match self.form {
            PromptForm::Chat => self.whole_chat(completion),
            PromptForm::Text => {
                let logprobs = text_logprobs(&completion.logprobs);
                let mut body = self.text(&completion.text, logprobs, Some(finish_reason(completion.finish, &[])));
                body["usage"] = usage(&completion.usage);
                body
            }
        }
    }

    fn whole_chat(&self, completion: &Completion) -> Value {
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

    /// The first chunk of a stream, which has no text; `None` if the form has no such chunk.
    pub fn first_chunk(&self) -> Option<Value> {
        (self.form == PromptForm::Chat).then(|| self.chunk(json!({ "role": "assistant", "content": "" }), None))
    }

    /// A chunk with text.
    pub fn text_chunk(&self, text: &str) -> Value {
        match self.form {
            PromptForm::Chat => self.chunk(json!({ "content": text }), None),
            PromptForm::Text => self.with_usage_field(self.text(text, Value::Null, None)),
        }
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
        let reason = Some(finish_reason(finish, calls));
        match self.form {
            PromptForm::Chat => self.chunk(json!({}), reason),
            PromptForm::Text => self.with_usage_field(self.text("", Value::Null, reason)),
        }
    }

    /// The chunk with the usage, after all others.
    pub fn usage_chunk(&self, used: &Usage) -> Value {
        let mut chunk = match self.form {
            PromptForm::Chat => self.chunk(json!({}), None),
            PromptForm::Text => self.text("", Value::Null, None),
        };
        chunk["choices"] = json!([]);
        chunk["usage"] = usage(used);
        chunk
    }

    fn chunk(&self, delta: Value, finish_reason: Option<&'static str>) -> Value {
        self.with_usage_field(json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason }],
        }))
    }

    /// A body or a chunk of a text reply.
    fn text(&self, text: &str, logprobs: Value, finish_reason: Option<&'static str>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{ "index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason }],
        })
    }

    /// If the client asked for the usage, all chunks but the last one have it as null.
    fn with_usage_field(&self, mut chunk: Value) -> Value {
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

/// Log probabilities in the form of text replies: one list for each property. Null if the model's server returned none.
fn text_logprobs(tokens: &[TokenLogprobs]) -> Value {
    if tokens.is_empty() {
        return Value::Null;
    }
    let (mut names, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut offset = 0;
    for token in tokens {
        names.push(json!(token.own.token));
        values.push(json!(token.own.logprob));
        // The token itself is always among them.
        let entries = token.top_logprobs.iter().chain([&token.own]);
        top.push(entries.map(|entry| (entry.token.clone(), json!(entry.logprob))).collect::<Value>());
        offsets.push(json!(offset));
        offset += token.own.token.chars().count();
    }
    json!({ "tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets })
}

#[cfg(test)]
mod tests;
