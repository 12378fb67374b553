//! A task: the user's specification, its priority, and its states.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::finite;
use crate::ids::{ArtifactId, IdError};
use crate::label::Label;
use crate::model::ModelId;
use crate::task_ref::{TaskName, TaskRef};

/// Priority of a task. P0 is scheduled first; a waiting task of lower priority rises with its age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
pub enum Priority {
    /// Highest priority.
    P0,
    /// Priority above the default.
    P1,
    /// Default priority.
    #[default]
    P2,
    /// Lowest priority.
    P3,
}

impl Priority {
    /// Returns the priority's number in SQL; 0 is the highest priority.
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

/// Role of an agent in the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Agent {
    /// The creator.
    Alpha,
    /// The critic.
    Beta,
}

impl Agent {
    /// Both roles, the creator first.
    pub const ALL: [Self; 2] = [Self::Alpha, Self::Beta];

    /// Returns the role's name in JSON and SQL.
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

/// Example that the creator should follow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CodeExample {
    /// Heading above the code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The code.
    pub code: String,
}

/// Model of a role and its sampling parameters. Absent fields are taken from the configuration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentBinding {
    /// Model of the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    /// Model that is called instead if `model` cannot answer: no node can call it, its calls fail, the prompt does not fit
    /// its context, or its answers cannot be parsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<ModelId>,
    /// Softmax temperature; 0 is greedy.
    #[serde(deserialize_with = "finite::optional", skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Seed of the random numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Maximum length of the output, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Guarantees bit-identical text for the same seed, whatever else the node computes at the same time. With some
    /// weight formats, the model then generates more slowly. Only for models that a node runs itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
    /// Instructions of the user for this role, added to its prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
}

/// Models and sampling parameters of both roles.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentBindings {
    /// Model and sampling parameters of the creator.
    pub alpha: AgentBinding,
    /// Model and sampling parameters of the critic.
    pub beta: AgentBinding,
}

impl AgentBindings {
    /// Returns the model and sampling parameters of `agent`.
    pub fn of(&self, agent: Agent) -> &AgentBinding {
        match agent {
            Agent::Alpha => &self.alpha,
            Agent::Beta => &self.beta,
        }
    }

    /// The models and fallbacks of both roles.
    pub fn models(&self) -> impl Iterator<Item = &ModelId> {
        [&self.alpha, &self.beta].into_iter().flat_map(|binding| binding.model.iter().chain(&binding.fallback))
    }

    /// Returns the model and sampling parameters of `agent`, for modification.
    pub fn of_mut(&mut self, agent: Agent) -> &mut AgentBinding {
        match agent {
            Agent::Alpha => &mut self.alpha,
            Agent::Beta => &mut self.beta,
        }
    }
}

/// How thoroughly the critic reviews a change that was not made by the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
// schemars writes documented variants as `oneOf` with descriptions, which some MCP clients do not read.
#[allow(missing_docs)]
pub enum ReviewDepth {
    Quick,
    #[default]
    Standard,
    Comprehensive,
}

impl ReviewDepth {
    /// All depths, the fastest first.
    pub const ALL: [Self; 3] = [Self::Quick, Self::Standard, Self::Comprehensive];

    /// Returns the depth's name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Standard => "standard",
            Self::Comprehensive => "comprehensive",
        }
    }

    /// Number of calls of the critic, each with its own subject.
    pub fn passes(self) -> u32 {
        match self {
            Self::Quick | Self::Standard => 1,
            Self::Comprehensive => 3,
        }
    }
}

impl fmt::Display for ReviewDepth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ReviewDepth {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|depth| depth.as_str() == text).ok_or(IdError {
            kind: "review depth",
            text: text.to_owned(),
            expected: "quick, standard or comprehensive",
        })
    }
}

/// A change to review: the commits from [`TaskSpec::base`] to `head`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReviewRequest {
    /// Full commit id of the change, in the repository or of an artifact of an earlier task.
    pub head: String,
    /// Id of the artifact whose commit is `head`, if the repository may lack that commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact: Option<ArtifactId>,
    /// `quick`: one call that looks only for defects that must be fixed. `standard`: one call, as in the loop.
    /// `comprehensive`: the checks of the project, then one call each about correctness, security, and tests with
    /// maintainability.
    #[serde(default)]
    pub depth: ReviewDepth,
}

/// Specification of a task as submitted: the work to do, the repository, the models and the limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskSpec {
    /// What to do, as the user wrote it.
    pub description: String,
    /// Programming language of the result, for example `python`.
    #[serde(default)]
    pub language: String,
    /// Paths of repository files to include in the prompt, relative to the repository's root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context_files: Vec<String>,
    /// Requirements on the result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<String>,
    /// Examples for the creator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<CodeExample>,
    /// Absolute path of a git repository the runner can read.
    pub repo: String,
    /// Commit to start from; the client fills in HEAD at submission. With `review`: the commit before the change;
    /// required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Change that the critic reviews, and nothing else: the creator is not called, and nothing is merged. The
    /// description says what the change should do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub review: Option<ReviewRequest>,
    /// Models of both roles.
    #[serde(default)]
    pub agents: AgentBindings,
    /// Coverage that the tests of the result must reach, if a check of the project writes a coverage report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<CoverageTarget>,
    /// Minimum score, out of 100, for convergence; default 85.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    /// Maximum number of reviews; default 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_iterations: Option<u32>,
    /// Maximum working time in minutes, counted from the first token and without waits; default 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_minutes: Option<f64>,
    /// Scheduling priority.
    #[serde(default)]
    pub priority: Priority,
    /// Wall-clock deadline, in seconds since 1970. After the deadline no model is called: the task escalates with the
    /// result so far, or fails if no runner has started it. A later answer by a human removes the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<i64>,
    /// Predecessors: the task starts after all of them have ended as merged, accepted or reviewed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<TaskRef>,
    /// Earliest start, in seconds since 1970: the task is queued until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_at: Option<i64>,
    /// Failed or cancelled task that this task retries. The tasks that wait for that one then wait for this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_of: Option<TaskRef>,
    /// Labels, by which users select tasks; at most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<Label>,
    /// Name by which other tasks of the same batch refer to this task; refused outside a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<TaskName>,
}

/// Lines that tests must execute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CoverageTarget {
    /// Percentage of the lines, from 1 to 100.
    pub percent: u8,
    /// Files whose lines count, as paths in the repository; empty: all files of the reports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
}

impl TaskSpec {
    /// A task with this description in the repository at this path; every other field has its default.
    pub fn new(description: impl Into<String>, repo: impl Into<String>) -> Self {
        Self {
            description: description.into(),
            language: String::new(),
            context_files: Vec::new(),
            constraints: Vec::new(),
            examples: Vec::new(),
            repo: repo.into(),
            base: None,
            review: None,
            agents: AgentBindings::default(),
            coverage: None,
            threshold: None,
            max_iterations: None,
            timeout_minutes: None,
            priority: Priority::default(),
            deadline: None,
            after: Vec::new(),
            run_at: None,
            retry_of: None,
            labels: Vec::new(),
            name: None,
        }
    }
}

/// State of a task. The last five are terminal and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// Submitted, but not to be started yet.
    Queued,
    /// Waits for a predecessor task that is not done or has failed.
    Blocked,
    /// Waits for a runner.
    Ready,
    /// A runner holds the task's lease.
    Running,
    /// Converged, but could not be merged or delivered; a question is open, no lease is held.
    WaitingOnHuman,
    /// Paused by a human.
    Paused,
    /// The loop cannot continue by itself; a question is open, no lease is held.
    Escalated,
    /// Done: converged, merged and delivered.
    Merged,
    /// Done: accepted by a human, as best effort or although it could not be merged or delivered.
    Accepted,
    /// Done: the task asked only for the review of a change, and the review is complete.
    Reviewed,
    /// Ended without an accepted result.
    Failed,
    /// Cancelled by a client.
    Cancelled,
}

impl TaskState {
    /// All states.
    pub const ALL: [Self; 12] = [
        Self::Queued,
        Self::Blocked,
        Self::Ready,
        Self::Running,
        Self::WaitingOnHuman,
        Self::Paused,
        Self::Escalated,
        Self::Merged,
        Self::Accepted,
        Self::Reviewed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Returns the state's name in JSON and SQL.
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
            Self::Reviewed => "reviewed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// True if a task in this state never changes again.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Merged | Self::Accepted | Self::Reviewed | Self::Failed | Self::Cancelled => true,
            Self::Queued
            | Self::Blocked
            | Self::Ready
            | Self::Running
            | Self::WaitingOnHuman
            | Self::Paused
            | Self::Escalated => false,
        }
    }

    /// True if the task has ended or waits for a human, so that no runner works on it; `submit --watch` ends in these
    /// states.
    pub fn is_settled(self) -> bool {
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
            expected: "queued, blocked, ready, running, waiting_on_human, paused, escalated, merged, accepted, reviewed, failed or cancelled",
        })
    }
}
