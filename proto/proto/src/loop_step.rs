//! The loop of a task: its states, the steps that are committed one by one, and the decisions. The rules are in
//! `cfq-convergence`; this module only defines the stored data.

mod escalation;

pub use escalation::{ActionKind, EscalationAction, EscalationReason};

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::blob::Payload;
use crate::ids::{ArtifactId, IdError, JobId};
use crate::pr::PrState;
use crate::review::{CheckRun, Finding, Quarantine, ReviewFeedback};
use crate::task::ReviewDepth;

/// State of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoopState {
    /// The loop has not started, or has ended.
    #[default]
    Idle,
    /// The creator generates the first artifact, or generates it again.
    Generating,
    /// The artifact is checked and reviewed.
    Reviewing,
    /// The creator revises the artifact.
    Revising,
    /// The artifact is good enough; the hand-off (merge and delivery) follows.
    Converged,
    /// A human must decide.
    Escalated,
    /// The loop failed.
    Failed,
}

impl LoopState {
    /// All states.
    pub const ALL: [Self; 7] =
        [Self::Idle, Self::Generating, Self::Reviewing, Self::Revising, Self::Converged, Self::Escalated, Self::Failed];

    /// Returns the state's name in JSON and SQL.
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

/// One file of an artifact, with its whole content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactFile {
    /// Path relative to the repository's root, with `/` as separator.
    pub path: String,
    /// New content; `None` removes the file.
    pub content: Option<String>,
    /// Encoding of the file in the repository.
    #[serde(default, skip_serializing_if = "FileEncoding::is_utf8")]
    pub encoding: FileEncoding,
    /// Whether the file is executable; `None` if it keeps the mode that it has in the base, or is new and not
    /// executable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<bool>,
}

/// Encoding of a text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileEncoding {
    /// UTF-8.
    #[default]
    Utf8,
    /// Windows-1252, by the table of the Encoding Standard, in which each byte is a character. Used for every file that
    /// is not UTF-8, so that the bytes that no edit replaces are kept.
    Windows1252,
}

impl FileEncoding {
    /// True for the encoding that is left out of messages.
    fn is_utf8(&self) -> bool {
        *self == Self::Utf8
    }
}

impl ArtifactFile {
    /// A file in UTF-8 with the mode that it has in the base.
    pub fn text(path: impl Into<String>, content: impl Into<String>) -> Self {
        Self { path: path.into(), content: Some(content.into()), encoding: FileEncoding::Utf8, executable: None }
    }

    /// The removal of a file.
    pub fn removed(path: impl Into<String>) -> Self {
        Self { path: path.into(), content: None, encoding: FileEncoding::Utf8, executable: None }
    }
}

/// The files to check and review in one iteration, the creator's result or the change under review: those that differ
/// from the base, and the commit that holds them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Artifact {
    /// Id of the artifact.
    pub id: ArtifactId,
    /// Number of the iteration, from 1.
    pub iteration: u32,
    /// SHA-256 over the files in path order; equal content has equal hashes, whatever the commit.
    pub content_hash: String,
    /// Commit on the task's branch; `None` for a reply that could not be parsed into files.
    pub commit: Option<String>,
    /// Parent of the commit.
    pub parent: String,
    /// Author and committer date of the commit, in seconds since 1970; recorded so that the commit can be recreated.
    pub commit_time: i64,
    /// Message of the commit; if the reply could not be parsed into files, the reason for that.
    pub commit_message: String,
    /// Changed files.
    pub files: Vec<ArtifactFile>,
    /// Unified diff against the base.
    pub diff: String,
    /// Files of `diff`, counted from 0 in its order, whose lines are decoded as Windows-1252, because they are not UTF-8
    /// in the base or in the artifact.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows_1252_in_diff: Vec<u32>,
    /// Job that generated the artifact; nil for a change under review.
    pub job: JobId,
    /// Model that generated the artifact; `commit ID` for a change under review.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the reply.
    pub output_tokens: u32,
}

/// Decision of `cfq-convergence` after an iteration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Decision {
    /// The loop converges: the artifact is good enough.
    Converged,
    /// The critic has reviewed the change in every pass of its depth, which is all that the task asks for.
    ReviewComplete,
    /// The creator revises the artifact; the feedback to the creator is derived from the findings and the review of
    /// this iteration.
    Revise,
    /// A human must decide.
    Escalate {
        /// Why the loop escalates.
        reason: EscalationReason,
        /// Actions the human may choose from.
        available_actions: Vec<ActionKind>,
    },
    /// The loop fails: an endpoint was down for longer than the retry ceiling, or a human failed the task.
    Fail {
        /// Why the loop failed, as text.
        reason: String,
    },
}

/// A decision as it is recorded: with its explanation and the best artifact so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Decided {
    /// The decision.
    pub decision: Decision,
    /// Explanation of the decision as text, for users.
    #[serde(alias = "why")]
    pub explanation: String,
    /// Iteration of the best artifact so far, among those that are committed, checked, and not quarantined except by
    /// failed checks of the project; `None` if there is none.
    pub best_iteration: Option<u32>,
    /// Score of the artifact of `best_iteration`, out of 100.
    pub best_score: Option<f64>,
}

/// One durable step of a task's loop. The steps of a task are committed in order ([`StepRecord::seq`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Step {
    /// The loop started: idle -> generating.
    Started {
        /// Commit to start from.
        base: String,
        /// Branch of the workstream.
        branch: String,
        /// Depth of the review, if the task reviews a change that exists; `None` for the loop of creator and critic.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        review_depth: Option<ReviewDepth>,
    },
    /// The creator has replied, or the change to review was read; the state does not change. The artifact is stored, and
    /// it is committed to the branch if the reply could be parsed into files.
    Generated {
        /// The artifact.
        artifact: Payload<Artifact>,
    },
    /// cfq's own checks ran. The state changes from generating or revising to reviewing. Exception: dangerous output
    /// leaves the state unchanged, and only an escalation may follow.
    Checked {
        /// Iteration of the artifact.
        iteration: u32,
        /// Findings of the checks.
        findings: Vec<Finding>,
        /// Why the artifact is neither reviewed nor merged; `None` if it may be.
        quarantine: Option<Quarantine>,
        /// Checks of the project that ran to their end; absent in steps of earlier builds.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ran: Vec<CheckRun>,
    },
    /// A critic reviewed the artifact; the state stays reviewing.
    Reviewed {
        /// Iteration of the artifact.
        iteration: u32,
        /// The review; if the critic reviews a change several times, together with the earlier ones.
        review: ReviewFeedback,
        /// Job that generated the review.
        job: JobId,
        /// Model of the critic.
        model: String,
    },
    /// The loop's next state was decided: reviewing -> converged, revising, escalated, failed or, of a review, idle;
    /// generating, revising -> escalated or failed.
    Decided {
        /// Iteration that the decision is about.
        iteration: u32,
        /// The decision.
        decided: Decided,
    },
    /// A human answered the open question; the scheduler writes this step for a client. After an escalation: escalated
    /// -> revising, generating, converged, idle or failed. If the hand-off was held: converged -> converged or idle.
    Resolved {
        /// The answer.
        action: EscalationAction,
        /// Client that sent the answer.
        by: String,
    },
    /// The internal pull request was opened; the reply to the request that commits this step has the number of the pull
    /// request.
    PrOpened {
        /// Commit at the head of the branch.
        head: String,
        /// Commit the branch is based on.
        base: String,
        /// Name of the branch to merge.
        branch: String,
    },
    /// The pull request changed its state.
    PrMoved {
        /// State after the change.
        to: PrState,
        /// Reason for the change, as text.
        #[serde(alias = "why")]
        reason: String,
    },
    /// Intent to merge, recorded before the repository's main branch in cfq moves from `old` to `new`.
    MergeIntent {
        /// Commit of the main branch before the merge.
        old: String,
        /// Commit of the main branch after the merge.
        new: String,
        /// Date of the merge commit, in seconds since 1970.
        commit_time: i64,
        /// Path of the repository, without symbolic links. Older runners send none.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        repository: String,
        /// Message of the merge commit.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        message: String,
        /// Checks of the project that ran on the merge; none if its files were checked before.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ran: Vec<CheckRun>,
    },
    /// The repository's main branch in cfq holds the result.
    Merged {
        /// Commit of the merge.
        commit: String,
    },
    /// The result is a branch in the user's repository.
    Delivered {
        /// Name of the branch.
        branch: String,
        /// Commit at the head of the branch.
        commit: String,
    },
    /// The hand-off cannot end without a human, because the result could not be merged or delivered: the state stays
    /// converged, and the task waits for the human.
    HandOffHeld {
        /// What prevents the hand-off.
        #[serde(alias = "why")]
        reason: String,
        /// Actions the human may choose from.
        available_actions: Vec<ActionKind>,
    },
    /// The hand-off is complete: converged -> idle; the task is merged or accepted.
    HandedOff {
        /// Where the result is and, if it was not merged or not delivered, why not; as text for users.
        #[serde(default, alias = "why", skip_serializing_if = "String::is_empty")]
        reason: String,
    },
    /// The task was cancelled; the scheduler writes this step for a client: any active state -> idle.
    Cancelled {
        /// Client that cancelled the task.
        by: String,
    },
}

impl Step {
    /// Returns the name of the step's kind in JSON.
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

/// A committed step, as a runner receives it with the lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepRecord {
    /// Index of the step, from 0.
    pub seq: i32,
    /// The step.
    pub step: Step,
    /// Working time of the task up to and including this step, in milliseconds, without waits for placement or a human.
    pub active_ms: u64,
    /// Time of the commit, in seconds since 1970 on the database's clock.
    pub at: i64,
}
