//! A job: one model call of a task.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::blob::Carried;
use crate::early::Enough;
use crate::ids::{IdError, JobId, NodeId, TaskId};
use crate::model::ModelId;
use crate::task::{Agent, Priority};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    System,
    User,
    Assistant,
}

impl ChatRole {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChatMessage {
    pub role: ChatRole,
    pub content: String,
}

/// How tokens are drawn. The defaults are greedy decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    /// 1 is none.
    pub repetition_penalty: f32,
    /// Taken from a token's score for each time it was written; 0 is none.
    pub frequency_penalty: f32,
    /// Taken from a token's score once it was written at all; 0 is none.
    pub presence_penalty: f32,
    pub seed: u64,
    /// Generation ends before the first of these in the text.
    pub stop: Vec<String>,
    /// Longest output, in tokens.
    pub max_tokens: u32,
    /// The same text to the last bit whatever else the engine computes beside it, also on quantised files: for nothing in
    /// the formats that have tiles, by slower kernels in others (on x86; elsewhere it was not tried).
    pub deterministic: bool,
    /// Guess tokens from the prompt and verify them together. For speed; with `deterministic` never a bit of the text.
    pub prompt_lookup: bool,
    /// What the answer may repeat, as the files that it revises: guessed from like the prompt. It counts neither as prompt nor as
    /// context; in F32 models and with `deterministic` it changes no bit of the text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub previous: String,
    /// What a constraint leaves no choice about is taken up without being drawn, cut into tokens as the tokenizer cuts it.
    #[serde(skip_serializing_if = "is_on")]
    pub jump_forward: bool,
    /// Tell the log probability of each token drawn, and of so many of the best at its place, 20 at most; by an engine that
    /// computes them itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u8>,
    /// An answer of JSON ends, as if it had come to its own end, once one of these holds. Engines that cannot look at it write
    /// on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub enough: Vec<Enough>,
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
            enough: Vec::new(),
        }
    }
}

fn is_on(on: &bool) -> bool {
    *on
}

/// What the text must be.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputFormat {
    #[default]
    Text,
    /// Decoding is constrained to this JSON schema.
    JsonSchema { schema: serde_json::Value },
    /// To a whole match of this regular expression.
    Regex { pattern: String },
    /// To a context-free grammar in Lark's notation.
    Grammar { lark: String },
}

/// What is asked of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prompt {
    pub messages: Vec<ChatMessage>,
    pub sampling: Sampling,
    #[serde(default)]
    pub format: OutputFormat,
}

/// A runner's request for one model call. Unique on (task, seq, role, n): asking again returns the same job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRequest {
    pub role: Agent,
    /// Of several calls of the same role for the same step, from 0.
    pub n: i16,
    pub model: ModelId,
    pub prompt: Carried<Prompt>,
    /// Bytes of the prompt's contents, for estimates before any tokenizer has seen it.
    pub prompt_bytes: u64,
    /// Prefix hashes of the prompt, see [`crate::prefix`].
    pub prefix: Vec<u64>,
    pub max_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for placement (perhaps until a retry's time has come).
    Queued,
    /// Published to a node, not accepted yet.
    Placed,
    /// A node holds its lease.
    Running,
    Done,
    /// The work itself failed for good.
    Failed,
    /// Lost its node too often: parked with the evidence.
    Dead,
    Cancelled,
}

impl JobState {
    pub const ALL: [Self; 7] =
        [Self::Queued, Self::Placed, Self::Running, Self::Done, Self::Failed, Self::Dead, Self::Cancelled];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Placed => "placed",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn is_over(self) -> bool {
        match self {
            Self::Done | Self::Failed | Self::Dead | Self::Cancelled => true,
            Self::Queued | Self::Placed | Self::Running => false,
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|s| s.as_str() == text).ok_or(IdError {
            kind: "job state",
            text: text.to_owned(),
            expected: "queued, placed, running, done, failed, dead or cancelled",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended, or a stop string was met.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

/// What a generation cost and how fast it went.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Of those, found in the prefix cache.
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// Of those, written by an earlier attempt on a node that was lost, and taken over from its journal.
    #[serde(skip_serializing_if = "is_none")]
    pub resumed_tokens: u32,
    /// Of the output, tokens that the constraint left no choice about: they took no step of their own.
    #[serde(skip_serializing_if = "is_none")]
    pub forced_tokens: u32,
    /// What keeping to the constraint cost, in milliseconds.
    #[serde(skip_serializing_if = "takes_none")]
    pub constraint_ms: u64,
    /// Tokens that prompt lookup guessed, and those of them that were right.
    pub guessed_tokens: u32,
    pub accepted_tokens: u32,
    /// From start of the work on the node to the first token that was drawn, in milliseconds.
    pub first_token_ms: u64,
    /// From start of the work on the node to the end, in milliseconds.
    pub total_ms: u64,
}

fn is_none(tokens: &u32) -> bool {
    *tokens == 0
}

fn takes_none(ms: &u64) -> bool {
    *ms == 0
}

impl Usage {
    /// Tokens a second that this attempt wrote, from its start to its end.
    pub fn rate(&self) -> f64 {
        f64::from(self.output_tokens.saturating_sub(self.resumed_tokens)) * 1000.0 / self.total_ms.max(1) as f64
    }
}

/// What earlier attempts at a job wrote, as tokens, so that the next one goes on from there.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Written {
    /// Names the vocabulary the tokens are of: with another one they mean nothing.
    pub vocabulary: i64,
    pub tokens: Vec<u32>,
}

/// Finished text with its figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Completion {
    pub text: String,
    pub finish: FinishReason,
    pub usage: Usage,
    /// Where they were asked for: a place each for the tokens of this attempt, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
}

/// A token of the text and what the model thought of it, before penalties, temperature and constraint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenLogprobs {
    #[serde(flatten)]
    pub own: TokenLogprob,
    /// The best at this place, best first. None where the constraint left no choice: nothing was asked of the model there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenLogprob {
    /// As text; a token may hold a part of a character, which reads as a replacement character.
    pub token: String,
    /// Natural logarithm; 0 where the constraint left no choice.
    pub logprob: f32,
}

/// Why a model call did not produce text. The kind says what a retry can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobFailure {
    /// The endpoint or engine is down, overloaded or broke off: try again later or elsewhere (N12's ladder).
    #[error("{reason}")]
    Unavailable { reason: String },
    /// The prompt does not fit the model's context.
    #[error("the prompt needs {need} tokens with the reply, the model's context has {have}")]
    TooLong { need: u64, have: u64 },
    /// Asking again would answer the same: bad request, unknown model, wrong key.
    #[error("{reason}")]
    Rejected { reason: String },
    /// The engine failed in the middle: out of memory, a numeric fault.
    #[error("{reason}")]
    Engine { reason: String },
}

impl JobFailure {
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::Engine { .. } => true,
            Self::TooLong { .. } | Self::Rejected { .. } => false,
        }
    }
}

/// How one attempt at a job ended on its node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Outcome {
    Done {
        completion: Carried<Completion>,
    },
    Failed {
        failure: JobFailure,
    },
    /// The node was told to stop, or drains: nothing is counted against the job.
    Released {
        reason: String,
    },
}

/// A job as the runner that asked for it sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub id: JobId,
    pub task: TaskId,
    pub seq: i32,
    pub role: Agent,
    pub n: i16,
    pub state: JobState,
    pub attempt: i32,
    pub model: ModelId,
    pub node: Option<NodeId>,
    pub priority: Priority,
    /// Time nodes worked on it, all attempts, in milliseconds, without what lies before the task's first token: what counts
    /// to the task's limit.
    pub running_ms: u64,
    /// With `Done`.
    pub completion: Option<Carried<Completion>>,
    /// The last failure, also while it waits to be tried again.
    pub failure: Option<JobFailure>,
}
