//! Messages from and to runners.

use serde::{Deserialize, Serialize};

use super::TaskFence;
use crate::blob::Payload;
use crate::ids::{BootId, JobId, LeaseId, RunnerId, TaskId, TaskNumber};
use crate::job::{JobRequest, JobView};
use crate::loop_step::{Step, StepRecord};
use crate::task::TaskSpec;

/// Registration of one boot of a runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunnerRegistration {
    /// Name of the runner; the subject must carry the same one.
    pub runner: RunnerId,
    /// This start of the process.
    pub boot: BootId,
    /// cfq version of the runner.
    pub version: String,
}

/// Command of the scheduler to a runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerCommand {
    /// A task is ready: request a lease.
    #[serde(alias = "work_waits")]
    TaskReady,
    /// A job changed: get it.
    JobChanged {
        /// Task of the job.
        task: TaskId,
        /// The job.
        job: JobId,
    },
    /// The lease is not the runner's any more (task cancelled, lease swept): stop the task and drop its state.
    Cancel {
        /// The attempt.
        fence: TaskFence,
    },
}

/// Request for the lease of a ready task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The sender's boot.
    pub boot: BootId,
}

/// Everything a runner needs to resume a task after its last committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// The attempt.
    pub fence: TaskFence,
    /// Number of the task.
    pub number: TaskNumber,
    /// The specification with every default filled in: base, models, threshold, limits.
    pub spec: TaskSpec,
    /// Time of submission, in seconds since 1970.
    pub created_at: i64,
    /// All committed steps, in order; the next `seq` is their count. Artifacts above the inline limit come as blobs.
    pub steps: Vec<StepRecord>,
}

/// Reply to [`LeaseRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LeaseReply {
    /// The runner holds a task.
    Granted {
        /// The lease; also outside the grant, because a grant that is a blob is fetched under it.
        lease: LeaseId,
        /// The task.
        grant: Payload<Grant>,
    },
    /// No task is ready.
    None,
    /// No lease can be granted now: the runner asks again.
    Unavailable {
        /// Why not now.
        reason: String,
    },
}

/// Request to commit one step of the loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// The attempt.
    pub fence: TaskFence,
    /// Number of steps before this one.
    pub seq: i32,
    /// The step.
    pub step: Step,
    /// Working time of the task up to and including this step, in milliseconds.
    pub active_ms: u64,
}

/// Reply to [`StepRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StepReply {
    /// It is in Postgres, now or already before with the same body. Only now may the runner act on it.
    Committed {
        /// Seconds since 1970, on the database's clock.
        at: i64,
        /// Number of the pull request; with `PrOpened` only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pr: Option<i64>,
    },
    /// Lease, attempt or `seq` are not current: the runner stops and drops the task.
    Stale,
    /// The step is illegal in the loop's state or can never be written: a bug on one side. The task is unchanged.
    Illegal {
        /// Why it is illegal.
        reason: String,
    },
    /// It cannot be written now: the runner repeats it.
    Unavailable {
        /// Why not now.
        reason: String,
    },
}

/// Submits a job: creates it, or returns the existing one for (task, seq, role, n).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SubmitJob {
    /// The runner's attempt at the task.
    pub fence: TaskFence,
    /// Number of steps before the one this job is for.
    pub seq: i32,
    /// The call.
    pub request: JobRequest,
}

/// Gets the state of a submitted job; the prompt is not sent again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GetJob {
    /// The runner's attempt at the task.
    pub fence: TaskFence,
    /// The job.
    pub job: JobId,
}

/// Reply to [`SubmitJob`] and [`GetJob`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobReply {
    /// The job as it is now.
    Job {
        /// The job.
        job: JobView,
    },
    /// The runner's attempt is not the current one.
    Stale,
    /// It can never be written or read.
    Refused {
        /// Why not.
        reason: String,
    },
    /// It cannot be written or read now: the runner repeats the request.
    Unavailable {
        /// Why not now.
        reason: String,
    },
}

/// Cancels a job (a limit was reached): it ends as cancelled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CancelJob {
    /// The runner's attempt at the task.
    pub fence: TaskFence,
    /// The job.
    pub job: JobId,
}

/// Release of a task by its runner: running -> ready, nothing counted. The runner drains, or the task waits for a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Release {
    /// The attempt.
    pub fence: TaskFence,
    /// A job that waits for placement: the task is not granted before the job is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<JobId>,
}

/// Release of a task that the runner cannot drive: running -> ready, counted as a loss, or failed with this reason if
/// that happened too often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Abandon {
    /// The attempt.
    pub fence: TaskFence,
    /// Why the runner cannot drive it.
    pub reason: String,
}
