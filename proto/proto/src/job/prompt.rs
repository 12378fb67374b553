//! Input of a model call: messages, sampling parameters, output format.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::early_stop::EarlyStop;

/// Author of a chat message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    /// Instructions for the whole conversation.
    System,
    /// The caller.
    User,
    /// The model.
    Assistant,
}

impl ChatRole {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One message of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChatMessage {
    /// Author.
    pub role: ChatRole,
    /// Text.
    pub content: String,
}

/// Sampling parameters of a call. The defaults are greedy decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Sampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Samples among this many most likely tokens.
    pub top_k: Option<u32>,
    /// Samples among the most likely tokens with at least this cumulative probability.
    pub top_p: Option<f32>,
    /// Drops tokens less likely than this share of the most likely one.
    pub min_p: Option<f32>,
    /// Divisor of the positive logits (factor of the negative ones) of tokens that occurred; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit once it was generated at all; 0 is off.
    pub presence_penalty: f32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Generation ends before the first of these in the text.
    pub stop: Vec<String>,
    /// Maximum length of the output, in tokens.
    pub max_tokens: u32,
    /// Bit-identical text whatever else the engine computes at the same time, also for quantised files. It costs
    /// nothing in formats that have tiles and uses slower kernels in others (on x86; other processors are untested).
    pub deterministic: bool,
    /// Drafts tokens from the prompt and verifies them together. Only for speed; with `deterministic` the text is
    /// bit-identical.
    pub prompt_lookup: bool,
    /// Text that the answer may repeat, such as the files it revises: tokens are drafted from it like from the prompt.
    /// It counts neither as prompt nor as context; in F32 models and with `deterministic` the text is bit-identical.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub previous: String,
    /// Appends tokens that the constraint forces without sampling them, in the tokenizer's own segmentation.
    #[serde(skip_serializing_if = "is_on")]
    pub jump_forward: bool,
    /// Returns the log probability of each sampled token and of this many most likely alternatives, at most 20. Only
    /// engines that compute logits themselves support it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u8>,
    /// A JSON answer ends, with finish reason `stop`, once one of these conditions holds. Engines that cannot evaluate
    /// them generate the whole answer.
    #[serde(alias = "enough", skip_serializing_if = "Vec::is_empty")]
    pub early_stop: Vec<EarlyStop>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            stop: Vec::new(),
            max_tokens: 1024,
            deterministic: false,
            prompt_lookup: true,
            previous: String::new(),
            jump_forward: true,
            logprobs: None,
            early_stop: Vec::new(),
        }
    }
}

fn is_on(on: &bool) -> bool {
    *on
}

/// Constraint on the text.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputFormat {
    /// No constraint.
    #[default]
    Text,
    /// JSON that is valid under a schema.
    JsonSchema {
        /// The JSON schema.
        schema: serde_json::Value,
    },
    /// Text that matches a regular expression as a whole.
    Regex {
        /// The regular expression.
        pattern: String,
    },
    /// A sentence of a context-free grammar.
    Grammar {
        /// The grammar in Lark's notation.
        lark: String,
    },
}

/// Input of a model call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prompt {
    /// The conversation so far.
    pub messages: Vec<ChatMessage>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Constraint on the text.
    #[serde(default)]
    pub format: OutputFormat,
}
