//! The loop's words: its states, the steps that are committed one by one, and the decisions. Rules over them are in
//! `cfq-convergence`; this module only says what can be written down.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::blob::Carried;
use crate::ids::{ArtifactId, IdError, JobId};
use crate::model::ModelId;
use crate::pr::PrState;
use crate::review::{Finding, Quarantine, ReviewFeedback};
use crate::task::Agent;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoopState {
    #[default]
    Idle,
    Generating,
    Reviewing,
    Revising,
    Converged,
    Escalated,
    Failed,
}

impl LoopState {
    pub const ALL: [Self; 7] =
        [Self::Idle, Self::Generating, Self::Reviewing, Self::Revising, Self::Converged, Self::Escalated, Self::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Generating => "generating",
            Self::Reviewing => "reviewing",
            Self::Revising => "revising",
            Self::Converged => "converged",
            Self::Escalated => "escalated",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for LoopState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for LoopState {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|s| s.as_str() == text).ok_or(IdError {
            kind: "loop state",
            text: text.to_owned(),
            expected: "idle, generating, reviewing, revising, converged, escalated or failed",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EscalationReason {
    MaxIterationsReached,
    StagnationDetected,
    OscillationDetected,
    TimeoutExceeded,
    DangerousOutputDetected,
    Hallucination,
    ScopeDrift,
    Fabrication,
    SameCounts,
    BelowEscalateThreshold,
    AgentError,
    WorkflowError,
}

impl EscalationReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxIterationsReached => "max_iterations_reached",
            Self::StagnationDetected => "stagnation_detected",
            Self::OscillationDetected => "oscillation_detected",
            Self::TimeoutExceeded => "timeout_exceeded",
            Self::DangerousOutputDetected => "dangerous_output_detected",
            Self::Hallucination => "hallucination",
            Self::ScopeDrift => "scope_drift",
            Self::Fabrication => "fabrication",
            Self::SameCounts => "same_counts",
            Self::BelowEscalateThreshold => "below_escalate_threshold",
            Self::AgentError => "agent_error",
            Self::WorkflowError => "workflow_error",
        }
    }
}

impl fmt::Display for EscalationReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name of an action, as offered and as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActionKind {
    SwitchLlm,
    RetryWithConstraints,
    AcceptBestEffort,
    Abort,
    Fail,
}

impl ActionKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SwitchLlm => "switch_llm",
            Self::RetryWithConstraints => "retry_with_constraints",
            Self::AcceptBestEffort => "accept_best_effort",
            Self::Abort => "abort",
            Self::Fail => "fail",
        }
    }
}

/// What is done about an escalation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum EscalationAction {
    SwitchLlm {
        target_agent: Agent,
        /// Absent: the same model tries again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        suggested_model: Option<ModelId>,
    },
    RetryWithConstraints {
        additional_constraints: Vec<String>,
    },
    AcceptBestEffort,
    Abort,
    Fail {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

impl EscalationAction {
    pub fn kind(&self) -> ActionKind {
        match self {
            Self::SwitchLlm { .. } => ActionKind::SwitchLlm,
            Self::RetryWithConstraints { .. } => ActionKind::RetryWithConstraints,
            Self::AcceptBestEffort => ActionKind::AcceptBestEffort,
            Self::Abort => ActionKind::Abort,
            Self::Fail { .. } => ActionKind::Fail,
        }
    }
}

/// One file of an artifact, whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactFile {
    /// Relative to the repository's root, with `/`.
    pub path: String,
    /// `None` removes the file.
    pub content: Option<String>,
}

/// What a creator made in one iteration: its files against the base, and the commit that holds them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Artifact {
    pub id: ArtifactId,
    /// From 1.
    pub iteration: u32,
    /// SHA-256 over the files in path order; equal content has equal hashes, whatever the commit.
    pub content_hash: String,
    /// The commit on the workstream's branch; `None` for a reply that could not be turned into files.
    pub commit: Option<String>,
    pub parent: String,
    /// Seconds since 1970, author and committer date of the commit: recorded, so that the commit can be made again.
    pub commit_time: i64,
    /// Of the commit; for a reply that could not be turned into files, why not.
    pub commit_message: String,
    pub files: Vec<ArtifactFile>,
    /// Unified diff against the base.
    pub diff: String,
    pub job: JobId,
    /// The model that made it.
    pub model: String,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

/// What `cfq-convergence` decided after an iteration, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Decision {
    Converged,
    /// Feedback to send is derived from the findings and the review of this iteration.
    Revise,
    Escalate {
        reason: EscalationReason,
        available_actions: Vec<ActionKind>,
    },
    /// The endpoint stayed down beyond the ceiling, or somebody said so.
    Fail {
        reason: String,
    },
}

/// A decision with the figures it was made from, so that it can be replayed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Decided {
    pub decision: Decision,
    /// In words, for people.
    pub why: String,
    /// Iteration of the best artifact so far, if any may be returned.
    pub best_iteration: Option<u32>,
    /// Its score out of 100.
    pub best_score: Option<f64>,
}

/// One durable step of a task's loop, in the order they were committed. `seq` is its index from 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Step {
    /// idle -> generating.
    Started {
        base: String,
        branch: String,
    },
    /// The creator's reply is durable and committed to the branch; the state stays.
    Generated {
        artifact: Carried<Artifact>,
    },
    /// The engine's own checks. -> reviewing, unless dangerous (then only an escalation may follow).
    Checked {
        iteration: u32,
        findings: Vec<Finding>,
        quarantine: Option<Quarantine>,
    },
    /// A critic's report; the state stays reviewing.
    Reviewed {
        iteration: u32,
        review: ReviewFeedback,
        job: JobId,
        model: String,
    },
    /// reviewing -> converged, revising, escalated or failed; generating/revising -> escalated or failed.
    Decided {
        iteration: u32,
        decided: Decided,
    },
    /// Written by the scheduler for a client: escalated -> revising, generating, converged, idle or failed; for a hand-off that
    /// is held, converged -> converged or idle.
    Resolved {
        action: EscalationAction,
        by: String,
    },
    /// The internal pull request exists; its number is in the answer to this step.
    PrOpened {
        head: String,
        base: String,
        branch: String,
    },
    PrMoved {
        to: PrState,
        why: String,
    },
    /// Recorded before the mirror's main moves from `old` to `new`.
    MergeIntent {
        old: String,
        new: String,
        commit_time: i64,
    },
    Merged {
        commit: String,
    },
    /// The branch in the user's repository.
    Delivered {
        branch: String,
        commit: String,
    },
    /// The hand-off cannot end by itself, because the result is unmerged or undelivered: the state stays converged, the task
    /// waits for a human.
    HandOffHeld {
        why: String,
        available_actions: Vec<ActionKind>,
    },
    /// converged -> idle; the task is merged or accepted.
    HandedOff {
        /// In words, for people: where the result is, and what was not done with it.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
    /// Written by the scheduler for a client: any active state -> idle.
    Cancelled {
        by: String,
    },
}

impl Step {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Started { .. } => "started",
            Self::Generated { .. } => "generated",
            Self::Checked { .. } => "checked",
            Self::Reviewed { .. } => "reviewed",
            Self::Decided { .. } => "decided",
            Self::Resolved { .. } => "resolved",
            Self::PrOpened { .. } => "pr_opened",
            Self::PrMoved { .. } => "pr_moved",
            Self::MergeIntent { .. } => "merge_intent",
            Self::Merged { .. } => "merged",
            Self::Delivered { .. } => "delivered",
            Self::HandOffHeld { .. } => "hand_off_held",
            Self::HandedOff { .. } => "handed_off",
            Self::Cancelled { .. } => "cancelled",
        }
    }
}

/// A committed step as it is handed to whoever takes the task over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepRecord {
    pub seq: i32,
    pub step: Step,
    /// Working time of the task up to and with this step, in milliseconds: without waiting for placement or a human.
    pub active_ms: u64,
    /// Seconds since 1970, on the database's clock.
    pub at: i64,
}
