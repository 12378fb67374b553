//! A task: what a user asks for, and the states it goes through.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;
use crate::model::ModelId;

/// P0 goes first; lower ones age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
pub enum Priority {
    P0,
    P1,
    #[default]
    P2,
    P3,
}

impl Priority {
    pub fn as_i16(self) -> i16 {
        match self {
            Self::P0 => 0,
            Self::P1 => 1,
            Self::P2 => 2,
            Self::P3 => 3,
        }
    }
}

impl TryFrom<i16> for Priority {
    type Error = IdError;
    fn try_from(n: i16) -> Result<Self, IdError> {
        match n {
            0 => Ok(Self::P0),
            1 => Ok(Self::P1),
            2 => Ok(Self::P2),
            3 => Ok(Self::P3),
            other => Err(IdError { kind: "priority", text: other.to_string(), expected: "P0, P1, P2 or P3" }),
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "P{}", self.as_i16())
    }
}

impl FromStr for Priority {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        match text.to_ascii_uppercase().as_str() {
            "P0" | "0" => Ok(Self::P0),
            "P1" | "1" => Ok(Self::P1),
            "P2" | "2" => Ok(Self::P2),
            "P3" | "3" => Ok(Self::P3),
            _ => Err(IdError { kind: "priority", text: text.to_owned(), expected: "P0, P1, P2 or P3" }),
        }
    }
}

/// The two sides of the loop. `alpha` creates, `beta` criticises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Agent {
    Alpha,
    Beta,
}

impl Agent {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alpha => "alpha",
            Self::Beta => "beta",
        }
    }
}

impl fmt::Display for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Agent {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        match text {
            "alpha" => Ok(Self::Alpha),
            "beta" => Ok(Self::Beta),
            _ => Err(IdError { kind: "agent", text: text.to_owned(), expected: "alpha or beta" }),
        }
    }
}

/// An example the creator should follow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CodeExample {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    pub code: String,
}

/// Which model plays a role, and how it samples. Absent fields come from the configuration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentBinding {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Longest output, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// The same text for the same seed whatever else its node computes, at the price of slower kernels where a format has no
    /// tiles; for models that a node runs itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentBindings {
    pub alpha: AgentBinding,
    pub beta: AgentBinding,
}

impl AgentBindings {
    pub fn of(&self, agent: Agent) -> &AgentBinding {
        match agent {
            Agent::Alpha => &self.alpha,
            Agent::Beta => &self.beta,
        }
    }

    pub fn of_mut(&mut self, agent: Agent) -> &mut AgentBinding {
        match agent {
            Agent::Alpha => &mut self.alpha,
            Agent::Beta => &mut self.beta,
        }
    }
}

/// What a user submits: the dual-agent task specification with where to work and how long to try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskSpec {
    /// What to do, in the user's words.
    pub description: String,
    /// Programming language of the result, for example `python`.
    #[serde(default)]
    pub language: String,
    /// Files of the repository that belong in the prompt, relative to its root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context_files: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<CodeExample>,
    /// Absolute path of a git repository the runner can read.
    pub repo: String,
    /// The commit to start from; the client fills in HEAD's at submit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    #[serde(default)]
    pub agents: AgentBindings,
    /// Score out of 100 at which the loop is done; default 85.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    /// At most this many reviews; default 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_iterations: Option<u32>,
    /// Limit of working time in minutes, from the first token, without waits; default 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_minutes: Option<f64>,
    #[serde(default)]
    pub priority: Priority,
    /// Wall-clock limit, seconds since 1970. Once it has passed no model is asked any more: the task escalates with what is
    /// there, or fails if no runner has begun it. An answer given later lifts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<i64>,
}

/// Where a task stands. The last four are terminal and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// Accepted, held back (its time has not come).
    Queued,
    /// A predecessor is not done, or failed.
    Blocked,
    /// A runner may take it.
    Ready,
    /// A runner holds its lease.
    Running,
    /// It converged, but could not be merged or delivered; a question is open; no lease is held.
    WaitingOnHuman,
    Paused,
    /// The loop gave up; a question is open; no lease is held.
    Escalated,
    /// Done: converged, merged and delivered.
    Merged,
    /// Done: accepted by a human, as best effort or although it could not be merged or delivered.
    Accepted,
    Failed,
    Cancelled,
}

impl TaskState {
    pub const ALL: [Self; 11] = [
        Self::Queued,
        Self::Blocked,
        Self::Ready,
        Self::Running,
        Self::WaitingOnHuman,
        Self::Paused,
        Self::Escalated,
        Self::Merged,
        Self::Accepted,
        Self::Failed,
        Self::Cancelled,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Blocked => "blocked",
            Self::Ready => "ready",
            Self::Running => "running",
            Self::WaitingOnHuman => "waiting_on_human",
            Self::Paused => "paused",
            Self::Escalated => "escalated",
            Self::Merged => "merged",
            Self::Accepted => "accepted",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn is_terminal(self) -> bool {
        match self {
            Self::Merged | Self::Accepted | Self::Failed | Self::Cancelled => true,
            Self::Queued
            | Self::Blocked
            | Self::Ready
            | Self::Running
            | Self::WaitingOnHuman
            | Self::Paused
            | Self::Escalated => false,
        }
    }

    /// True where nothing happens until a human acts, or ever again: what `submit --watch` waits for.
    pub fn is_resting(self) -> bool {
        self.is_terminal() || matches!(self, Self::Escalated | Self::WaitingOnHuman | Self::Paused)
    }
}

impl fmt::Display for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for TaskState {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|s| s.as_str() == text).ok_or(IdError {
            kind: "task state",
            text: text.to_owned(),
            expected: "queued, blocked, ready, running, waiting_on_human, paused, escalated, merged, accepted, failed or cancelled",
        })
    }
}
