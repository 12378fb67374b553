//! Types of what `/v1` reads and returns, for the OpenAPI document. The bodies of replies are built in `reply.rs`, and a
//! test compares them with these types.
#![allow(dead_code, reason = "only the schemas of the types are used")]

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::chat_request::ChatRequest;
use super::parameters::Parameters;
use super::text_request::TextRequest;

/// Body of `POST /v1/chat/completions`.
#[derive(JsonSchema)]
pub struct ChatCompletionRequest {
    #[schemars(flatten)]
    request: ChatRequest,
    #[schemars(flatten)]
    parameters: Parameters,
}

/// Body of `POST /v1/completions`.
#[derive(JsonSchema)]
pub struct TextCompletionRequest {
    #[schemars(flatten)]
    request: TextRequest,
    #[schemars(flatten)]
    parameters: Parameters,
}

/// An error in the form of the OpenAI protocol.
#[derive(Serialize, JsonSchema)]
pub struct OpenAiErrorReply {
    error: OpenAiErrorBody,
}

#[derive(Serialize, JsonSchema)]
struct OpenAiErrorBody {
    /// What to change.
    message: String,
    r#type: String,
    /// The parameter that cannot be used.
    param: Option<String>,
    code: Option<String>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenAiModelList")]
pub struct ModelList {
    /// `list`
    object: String,
    data: Vec<Model>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenAiModel")]
pub struct Model {
    id: String,
    /// `model`
    object: String,
    created: i64,
    owned_by: String,
    /// The model id that the name stands for.
    root: String,
    /// Size of the context, in tokens; null for models behind endpoints and programs.
    max_model_len: Option<u64>,
    /// Whether a node has the model in memory.
    loaded: bool,
}

#[derive(Serialize, JsonSchema)]
pub struct ChatCompletion {
    id: String,
    /// `chat.completion`
    object: String,
    /// Seconds since 1970.
    created: i64,
    model: String,
    choices: Vec<ChatCompletionChoice>,
    usage: CompletionUsage,
}

#[derive(Serialize, JsonSchema)]
struct ChatCompletionChoice {
    index: u32,
    message: ChatCompletionMessage,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`
    finish_reason: String,
}

#[derive(Serialize, JsonSchema)]
struct ChatCompletionMessage {
    /// `assistant`
    role: String,
    content: Option<String>,
    refusal: Option<String>,
    annotations: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCall>,
}

#[derive(Serialize, JsonSchema)]
struct ChatToolCall {
    id: String,
    /// `function`
    r#type: String,
    function: ChatToolCallFunction,
}

#[derive(Serialize, JsonSchema)]
struct ChatToolCallFunction {
    name: String,
    /// The arguments as JSON text.
    arguments: String,
}

#[derive(Serialize, JsonSchema)]
struct ChatLogprobs {
    content: Vec<ChatTokenLogprobs>,
    refusal: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct ChatTokenLogprobs {
    #[serde(flatten)]
    own: ChatTokenLogprob,
    top_logprobs: Vec<ChatTokenLogprob>,
}

#[derive(Serialize, JsonSchema)]
struct ChatTokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// One event of a stream.
#[derive(Serialize, JsonSchema)]
pub struct ChatCompletionChunk {
    id: String,
    /// `chat.completion.chunk`
    object: String,
    /// Seconds since 1970.
    created: i64,
    model: String,
    choices: Vec<ChatCompletionChunkChoice>,
    /// In the last chunk, if the request asks for it; null in the chunks before.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<CompletionUsage>,
}

#[derive(Serialize, JsonSchema)]
struct ChatCompletionChunkChoice {
    index: u32,
    delta: ChatCompletionDelta,
    logprobs: Option<ChatLogprobs>,
    /// In the last chunk of the choice: `stop`, `length` or `tool_calls`.
    finish_reason: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct ChatCompletionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCallDelta>,
}

#[derive(Serialize, JsonSchema)]
struct ChatToolCallDelta {
    index: u32,
    #[serde(flatten)]
    call: ChatToolCall,
}

/// A text completion, or one event of its stream.
#[derive(Serialize, JsonSchema)]
pub struct TextCompletion {
    id: String,
    /// `text_completion`
    object: String,
    /// Seconds since 1970.
    created: i64,
    model: String,
    choices: Vec<TextCompletionChoice>,
    /// In a stream only in the last event, and only if the request asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<CompletionUsage>,
}

#[derive(Serialize, JsonSchema)]
struct TextCompletionChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    /// `stop` or `length`; null in all events of a stream but the last one of the choice.
    finish_reason: Option<String>,
}

/// Lists with one entry for each token.
#[derive(Serialize, JsonSchema)]
struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The most likely tokens, and the token itself.
    top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Position of the token in the text, in characters.
    text_offset: Vec<u64>,
}

#[derive(Serialize, JsonSchema)]
struct CompletionUsage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

#[derive(Serialize, JsonSchema)]
struct PromptTokensDetails {
    /// Tokens whose KV cache existed before.
    cached_tokens: u32,
}

#[derive(Serialize, JsonSchema)]
struct CompletionTokensDetails {
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
}
