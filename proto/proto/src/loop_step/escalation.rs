//! Escalations: why a loop stops for a human, and the actions that the human may choose from.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ModelId;
use crate::task::Agent;

/// Why a loop escalates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EscalationReason {
    /// The maximum number of reviews was reached.
    MaxIterationsReached,
    /// The score stopped improving.
    StagnationDetected,
    /// An artifact repeats the content of an earlier iteration.
    OscillationDetected,
    /// The working-time limit (`timeout_minutes`) or the deadline was reached.
    TimeoutExceeded,
    /// The dangerous-code check quarantined the artifact.
    DangerousOutputDetected,
    /// The review refers to things that do not exist.
    Hallucination,
    /// The result exceeds the task's scope.
    ScopeDrift,
    /// The review makes up findings.
    Fabrication,
    /// The findings no longer change.
    SameCounts,
    /// The score is far below the threshold.
    BelowEscalateThreshold,
    /// A role's calls failed or its replies were unusable.
    AgentError,
    /// An action of the loop other than a model call failed (for example a git operation), or too many runners lost the
    /// task.
    WorkflowError,
}

impl EscalationReason {
    /// Returns the reason's name in JSON.
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

/// Kind of an [`EscalationAction`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActionKind {
    /// Retry with another model.
    SwitchLlm,
    /// Retry with additional constraints.
    RetryWithConstraints,
    /// Accept the best artifact.
    AcceptBestEffort,
    /// Cancel the task.
    Abort,
    /// Fail the task.
    Fail,
}

impl ActionKind {
    /// Returns the action's name in JSON and on the command line.
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

/// A human's answer to an escalation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum EscalationAction {
    /// Retry with another model.
    SwitchLlm {
        /// Role whose model is replaced.
        target_agent: Agent,
        /// The new model; `None` to retry with the role's current model.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        suggested_model: Option<ModelId>,
    },
    /// Retry with additional constraints.
    RetryWithConstraints {
        /// Constraints to append to those of the task.
        additional_constraints: Vec<String>,
    },
    /// Accept the best artifact.
    AcceptBestEffort,
    /// Cancel the task.
    Abort,
    /// Fail the task.
    Fail {
        /// Reason for the failure, as text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

impl EscalationAction {
    /// Returns the kind of the action, without its arguments.
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
