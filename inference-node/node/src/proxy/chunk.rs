//! One chunk of the stream of a completion, or a whole completion.

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
pub(super) struct Chunk {
    #[serde(default)]
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Option<RemoteUsage>,
    pub(super) error: Option<Value>,
}

#[derive(Deserialize)]
pub(super) struct Choice {
    #[serde(default)]
    pub(super) index: u32,
    /// New part of the message, in an event of a stream.
    pub(super) delta: Option<Message>,
    /// Whole message, in the reply of a server that does not stream.
    pub(super) message: Option<Message>,
    /// Text of a text completion, or a new part of it.
    pub(super) text: Option<String>,
    pub(super) finish_reason: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Message {
    pub(super) content: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) role: Option<Value>,
    /// Reasoning of the model, in llama.cpp and others. It is not part of the reply's text.
    pub(super) reasoning_content: Option<Value>,
    /// The same in Ollama, vLLM and others.
    pub(super) reasoning: Option<Value>,
    pub(super) tool_calls: Option<Value>,
}

impl Message {
    /// Whether the model has generated something that is not part of the reply's text.
    pub(super) fn has_other_output(&self) -> bool {
        let reasoning = [&self.reasoning_content, &self.reasoning].into_iter().flatten();
        let calls = self.tool_calls.as_ref().and_then(Value::as_array);
        reasoning.filter_map(Value::as_str).any(|text| !text.is_empty()) || calls.is_some_and(|calls| !calls.is_empty())
    }
}

#[derive(Deserialize)]
pub(super) struct RemoteUsage {
    #[serde(default)]
    pub(super) prompt_tokens: u32,
    #[serde(default)]
    pub(super) completion_tokens: u32,
    pub(super) prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
pub(super) struct PromptDetails {
    #[serde(default)]
    pub(super) cached_tokens: Option<u32>,
}
