//! A job: one model call of a task, or of a client of the OpenAI-compatible API.

mod prompt;
mod role;

pub use prompt::{ChatMessage, ChatRole, OutputFormat, Prompt, PromptForm, Sampling};
pub use role::JobRole;

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::blob::Payload;
use crate::finite;
use crate::ids::{IdError, JobId, NodeId, TaskId};
use crate::model::ModelId;
use crate::task::{Agent, Priority};

/// A runner's request for one model call. The task, the index of the loop step, the role and `n` identify the call: a
/// repeated request returns the same job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRequest {
    /// Role that makes the call.
    pub role: Agent,
    /// Index among several calls of the same role for the same step, from 0.
    pub n: i16,
    /// Model to run.
    pub model: ModelId,
    /// Prompt of the call.
    pub prompt: Payload<Prompt>,
    /// Size of the prompt's message contents in bytes, for estimates before the prompt is tokenized.
    pub prompt_bytes: u64,
    /// Prefix hashes of the prompt, see [`crate::prefix`].
    pub prefix: Vec<u64>,
    /// Maximum length of the output, in tokens.
    pub max_tokens: u32,
    /// Whether the runner calls another model if this one cannot answer. Then the job fails as soon as no node can run
    /// it, instead of at the retry ceiling.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_fallback: bool,
}

/// State of a job. The last four are terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for placement, possibly until a backoff has passed.
    Queued,
    /// Published to a node, which has not accepted it yet.
    Placed,
    /// Accepted by a node, which holds the lease of the attempt.
    Running,
    /// Finished: the generated text is complete.
    Done,
    /// Failed permanently, but not because nodes were lost (see `Dead`).
    Failed,
    /// Dead letter: too many attempts were lost with their nodes, or not accepted. The job is kept, with the records of
    /// its attempts.
    Dead,
    /// Cancelled by its task.
    Cancelled,
}

impl JobState {
    /// All states.
    pub const ALL: [Self; 7] =
        [Self::Queued, Self::Placed, Self::Running, Self::Done, Self::Failed, Self::Dead, Self::Cancelled];

    /// Returns the state's name in JSON and SQL.
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

    /// True if a job in this state never changes again.
    pub fn is_terminal(self) -> bool {
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

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its answer, or a stop string or early-stop condition was met.
    Stop,
    /// `max_tokens` or the model's context was reached.
    Length,
}

/// Token counts and times of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Usage {
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Length of the output, in tokens.
    pub output_tokens: u32,
    /// Output tokens that this attempt did not generate but took from the journal of an earlier attempt, from which it
    /// resumed.
    #[serde(skip_serializing_if = "is_zero_u32")]
    pub resumed_tokens: u32,
    /// Output tokens that the output constraint forced; they needed no decode step of their own.
    #[serde(skip_serializing_if = "is_zero_u32")]
    pub forced_tokens: u32,
    /// Time spent evaluating the output constraint, in milliseconds.
    #[serde(skip_serializing_if = "is_zero_u64")]
    pub constraint_ms: u64,
    /// Tokens drafted by prompt lookup.
    #[serde(alias = "guessed_tokens")]
    pub drafted_tokens: u32,
    /// Drafted tokens that were accepted.
    pub accepted_tokens: u32,
    /// Time to first token: from the start of the work on the node to the first sampled token, in milliseconds.
    pub first_token_ms: u64,
    /// Time from the start to the end of the work on the node, in milliseconds.
    pub total_ms: u64,
}

fn is_zero_u32(count: &u32) -> bool {
    *count == 0
}

fn is_zero_u64(ms: &u64) -> bool {
    *ms == 0
}

impl Usage {
    /// Number of tokens that this attempt generated per second, averaged over its total time.
    pub fn tokens_per_second(&self) -> f64 {
        f64::from(self.output_tokens.saturating_sub(self.resumed_tokens)) * 1000.0 / self.total_ms.max(1) as f64
    }
}

/// Tokens that earlier attempts at a job generated; the next attempt resumes after them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct GeneratedTokens {
    /// Fingerprint of the vocabulary; the token ids are meaningless with another vocabulary.
    pub vocabulary: i64,
    /// Token ids, in order.
    pub tokens: Vec<u32>,
}

/// Result of a completed call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Completion {
    /// Generated text.
    pub text: String,
    /// Why the generation ended.
    pub finish: FinishReason,
    /// Token counts and times.
    pub usage: Usage,
    /// One entry per token of this attempt, in order; empty unless requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
}

/// Log probabilities at one position of the output, before penalties, temperature and constraint are applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenLogprobs {
    /// The token that was generated at this position.
    #[serde(flatten)]
    pub own: TokenLogprob,
    /// The most likely tokens, most likely first. Empty where the constraint forced the token: the model was not
    /// evaluated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top_logprobs: Vec<TokenLogprob>,
}

/// Log probability of one token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenLogprob {
    /// The token as text; if the token is only part of a character, the text is a replacement character.
    pub token: String,
    /// Natural logarithm of the probability; 0 where the constraint forced the token.
    #[serde(deserialize_with = "finite::number")]
    pub logprob: f32,
}

/// Why a model call produced no text. The variant states whether a retry can help.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobFailure {
    /// The endpoint or engine is down or overloaded, or the connection broke: the call is retried later or on another
    /// node, with backoff.
    #[error("{reason}")]
    Unavailable {
        /// What failed, as text.
        reason: String,
    },
    /// The prompt does not fit the model's context.
    #[error("the prompt and the reply need {need} tokens together, but the model's context has {have}")]
    TooLong {
        /// Tokens needed for the prompt and the reply.
        need: u64,
        /// Tokens of the model's context.
        have: u64,
    },
    /// The call was rejected, and a retry would be rejected too: bad request, unknown model, wrong key.
    #[error("{reason}")]
    Rejected {
        /// Why the call was rejected, as text.
        reason: String,
    },
    /// The engine failed during the call, for example because memory ran out or the logits were not finite numbers.
    #[error("{reason}")]
    Engine {
        /// What failed in the engine, as text.
        reason: String,
    },
}

impl JobFailure {
    /// True if a retry can help.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::Engine { .. } => true,
            Self::TooLong { .. } | Self::Rejected { .. } => false,
        }
    }
}

/// Result of one attempt at a job on its node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Outcome {
    /// The call is complete.
    Done {
        /// Text that the call generated.
        completion: Payload<Completion>,
    },
    /// The call failed.
    Failed {
        /// Why the call failed.
        failure: JobFailure,
    },
    /// The attempt was cancelled, or the node drains or yields. A release counts neither as a failure nor as a loss of
    /// the job.
    Released {
        /// Why the attempt was released.
        reason: ReleaseReason,
    },
}

/// Why a node released an attempt. An attempt whose lease was lost is not reported at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum ReleaseReason {
    /// The scheduler cancelled the attempt.
    Cancelled,
    /// The node is stopping.
    Drained,
    /// The node yields the GPU to another program.
    Yielded {
        /// Program and device, such as `game on cuda:0`.
        to: String,
    },
    /// The text of another build, with a reason that this build does not know.
    Other(String),
}

/// Texts of [`ReleaseReason`]s. They are stored and sent, so they cannot be changed.
const CANCELLED: &str = "cancelled by the scheduler";
const DRAINED: &str = "its node stops";
const YIELDED: &str = "its node yields to ";

impl fmt::Display for ReleaseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled => f.write_str(CANCELLED),
            Self::Drained => f.write_str(DRAINED),
            Self::Yielded { to } => write!(f, "{YIELDED}{to}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<ReleaseReason> for String {
    fn from(reason: ReleaseReason) -> Self {
        reason.to_string()
    }
}

impl From<String> for ReleaseReason {
    fn from(text: String) -> Self {
        match text.as_str() {
            CANCELLED => Self::Cancelled,
            DRAINED => Self::Drained,
            _ => match text.strip_prefix(YIELDED) {
                Some(to) => Self::Yielded { to: to.to_owned() },
                None => Self::Other(text),
            },
        }
    }
}

/// A job as its runner sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Id of the job.
    pub id: JobId,
    /// Task of the job.
    pub task: TaskId,
    /// Index of the loop step that this job is for, from 0.
    pub seq: i32,
    /// Role that makes the call.
    pub role: Agent,
    /// Index among several calls of the same role for the same step, from 0.
    pub n: i16,
    /// State of the job.
    pub state: JobState,
    /// Number of the current attempt, from 1; 0 before the first placement.
    pub attempt: i32,
    /// Model of the call.
    pub model: ModelId,
    /// Node of the current attempt, if it is placed.
    pub node: Option<NodeId>,
    /// Priority, taken from the task.
    pub priority: Priority,
    /// Time that nodes worked on the job in all attempts, in milliseconds; it counts towards the task's time limit.
    /// Work before the task's first token is not included.
    pub running_ms: u64,
    /// Generated text; present only in state `Done`.
    pub completion: Option<Payload<Completion>>,
    /// The last failure, also while the job waits for a retry.
    pub failure: Option<JobFailure>,
}
