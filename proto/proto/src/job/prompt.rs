//! Input of a model call: messages, sampling parameters, output format.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::early_stop::EarlyStop;
use crate::finite;

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
    /// Returns the role's name in JSON.
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
    /// Author of the message.
    pub role: ChatRole,
    /// Text of the message.
    pub content: String,
}

/// Sampling parameters of a call. The defaults select greedy decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Sampling {
    /// Softmax temperature; 0 is greedy.
    #[serde(deserialize_with = "finite::number")]
    pub temperature: f32,
    /// Number of most likely tokens to sample from; `None` for all.
    pub top_k: Option<u32>,
    /// Nucleus sampling: samples from the smallest set of most likely tokens whose cumulative probability is at least
    /// this.
    #[serde(deserialize_with = "finite::optional")]
    pub top_p: Option<f32>,
    /// Minimum probability of a token, as a fraction of the most likely token's probability; less likely tokens are
    /// dropped.
    #[serde(deserialize_with = "finite::optional")]
    pub min_p: Option<f32>,
    /// Penalty for tokens that already occurred: positive logits are divided by it, negative logits multiplied by it; 1
    /// is off.
    #[serde(deserialize_with = "finite::number")]
    pub repetition_penalty: f32,
    /// Penalty subtracted from a token's logit for each time the token was generated; 0 is off.
    #[serde(deserialize_with = "finite::number")]
    pub frequency_penalty: f32,
    /// Penalty subtracted once from a token's logit if the token was generated at all; 0 is off.
    #[serde(deserialize_with = "finite::number")]
    pub presence_penalty: f32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Stop strings: generation ends before the first of them that occurs in the text.
    pub stop: Vec<String>,
    /// Maximum length of the output, in tokens.
    pub max_tokens: u32,
    /// Guarantees bit-identical text whatever else the engine computes at the same time, also for quantized model files
    /// (there tested on x86 only). For weight formats that cfq's own kernels multiply, the guarantee costs nothing; for
    /// others, slower kernels are used.
    pub deterministic: bool,
    /// Enables prompt lookup: tokens are drafted from the prompt and verified together. Drafts change the speed and not
    /// the text; for quantized models, bit-identical text is guaranteed only with `deterministic`.
    pub prompt_lookup: bool,
    /// Text that the answer may repeat, such as the files that the answer revises: tokens are drafted from it like from
    /// the prompt. This text counts towards neither the prompt nor the context. In F32 models, and with
    /// `deterministic`, the generated text is bit-identical with and without it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub previous: String,
    /// Enables jump-forward decoding: text that the constraint forces is appended without sampling, split into tokens
    /// as the tokenizer would split it.
    #[serde(skip_serializing_if = "is_on")]
    pub jump_forward: bool,
    /// Number of most likely alternatives, at most 20, whose log probabilities are returned along with that of each
    /// sampled token; `None` returns no log probabilities. Only engines that compute logits themselves support it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u8>,
    /// Conditions for ending a JSON answer early: it ends, with finish reason `stop`, once one of them holds. Engines
    /// that cannot evaluate the conditions generate the whole answer.
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

/// Constraint on the generated text.
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
    /// Text that matches a context-free grammar.
    Grammar {
        /// The grammar in Lark's notation.
        lark: String,
    },
}

/// What the messages of a prompt are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// A conversation, rendered by the model's chat template up to the beginning of the reply.
    #[default]
    Chat,
    /// One message, whose text the model continues without a chat template.
    Text,
}

impl PromptForm {
    /// True for a conversation.
    pub fn is_chat(&self) -> bool {
        *self == Self::Chat
    }
}

/// Input of a model call.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Prompt {
    /// What the messages are.
    #[serde(default, skip_serializing_if = "PromptForm::is_chat")]
    pub form: PromptForm,
    /// The conversation so far, or the text to continue.
    pub messages: Vec<ChatMessage>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Constraint on the generated text.
    #[serde(default)]
    pub format: OutputFormat,
}
