//! Schemas of what `/v1` reads and returns, for the OpenAPI document. The bodies of replies are built in `reply.rs`, whose
//! test compares them with these.
#![allow(dead_code, reason = "only the schemas of the types are used")]

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::chat_request::ChatRequest;
use super::parameters::Parameters;
use super::text_request::TextRequest;

/// Body of `POST /v1/chat/completions`.
#[derive(JsonSchema)]
pub struct ChatBody {
    #[schemars(flatten)]
    request: ChatRequest,
    #[schemars(flatten)]
    parameters: Parameters,
}

/// Body of `POST /v1/completions`.
#[derive(JsonSchema)]
pub struct TextBody {
    #[schemars(flatten)]
    request: TextRequest,
    #[schemars(flatten)]
    parameters: Parameters,
}

/// An error in the form of the OpenAI protocol.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenAiErrorReply")]
pub struct ErrorSchema {
    error: ErrorFields,
}

#[derive(Serialize, JsonSchema)]
struct ErrorFields {
    /// What to change.
    message: String,
    r#type: String,
    /// The parameter that cannot be used.
    param: Option<String>,
    code: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub struct ModelListSchema {
    /// `list`
    object: String,
    data: Vec<ModelSchema>,
}

#[derive(Serialize, JsonSchema)]
pub struct ModelSchema {
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
pub struct ChatCompletionSchema {
    id: String,
    /// `chat.completion`
    object: String,
    /// Seconds since 1970.
    created: i64,
    model: String,
    choices: Vec<ChatChoiceSchema>,
    usage: UsageSchema,
}

#[derive(Serialize, JsonSchema)]
struct ChatChoiceSchema {
    index: u32,
    message: MessageSchema,
    logprobs: Option<Value>,
    /// `stop`, `length` or `tool_calls`
    finish_reason: String,
}

#[derive(Serialize, JsonSchema)]
struct MessageSchema {
    /// `assistant`
    role: String,
    content: Option<String>,
    refusal: Option<String>,
    annotations: Vec<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

#[derive(Serialize, JsonSchema)]
pub struct TextCompletionSchema {
    id: String,
    /// `text_completion`
    object: String,
    /// Seconds since 1970.
    created: i64,
    model: String,
    choices: Vec<TextChoiceSchema>,
    usage: UsageSchema,
}

#[derive(Serialize, JsonSchema)]
struct TextChoiceSchema {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobsSchema>,
    /// `stop` or `length`
    finish_reason: String,
}

/// Lists with one entry for each token.
#[derive(Serialize, JsonSchema)]
struct TextLogprobsSchema {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<std::collections::BTreeMap<String, f32>>,
    /// Position of the token in the text, in characters.
    text_offset: Vec<u64>,
}

#[derive(Serialize, JsonSchema)]
struct UsageSchema {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: Value,
    completion_tokens_details: Value,
}
