//! Messages from and to runners.

use serde::{Deserialize, Serialize};

use super::{RefusedReason, TaskFence, UnavailableReason};
use crate::blob::Payload;
use crate::ids::{BootId, JobId, LeaseId, LeaseRequestId, RunnerId, TaskId, TaskNumber};
use crate::job::{JobRequest, JobView};
use crate::loop_step::{Artifact, Step, StepRecord};
use crate::task::TaskSpec;

/// Registration of one boot of a runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunnerRegistration {
    /// Name of the runner; the subject must contain the same name.
    pub runner: RunnerId,
    /// Id of this start of the runner process.
    pub boot: BootId,
    /// cfq version of the runner.
    pub version: String,
    /// Identifies the current start of the runner's machine; `None` if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_boot: Option<String>,
    /// Id of the lock on the credentials file that this process holds; `None` if it holds none. No two live processes
    /// hold the same lock, so a later boot with the same lock proves that the process of the earlier boot has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_lock: Option<String>,
    /// Number of tasks that the runner drives at the same time. Older runners send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
}

/// Command of the scheduler to a runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerCommand {
    /// A task is ready: request a lease.
    #[serde(alias = "work_waits")]
    TaskReady,
    /// A job changed: get its current state with [`JobGet`].
    JobChanged {
        /// Task of the job.
        task: TaskId,
        /// The job.
        job: JobId,
    },
    /// The runner no longer holds the lease (task cancelled, or lease expired): stop the task and drop its state.
    Cancel {
        /// Fence of the runner's attempt at the task.
        fence: TaskFence,
    },
}

/// Request for the lease of a ready task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The sender's boot.
    pub boot: BootId,
    /// Id of the request. A repeated request with the same id gets the same grant, so that no grant is lost with its
    /// reply. Older runners send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<LeaseRequestId>,
}

/// Everything a runner needs to resume a task after its last committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Number of the task.
    pub number: TaskNumber,
    /// The specification with every default filled in: base, models, threshold, limits.
    pub spec: TaskSpec,
    /// Time of submission, in seconds since 1970.
    pub created_at: i64,
    /// All committed steps, in order; the next `seq` is their count. Artifacts larger than
    /// [`crate::blob::MAX_INLINE_BYTES`] are blobs.
    pub steps: Vec<StepRecord>,
    /// The artifact that the task reviews and the earlier ones on which it is based, oldest first; empty if it reviews
    /// none. The runner may lack their commits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reviewed: Vec<Artifact>,
}

/// Reply to [`LeaseRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LeaseReply {
    /// The runner now holds the lease of a task.
    Granted {
        /// Id of the lease. It is also given here, outside the grant, because a grant that is stored as a blob is
        /// fetched under this lease.
        lease: LeaseId,
        /// The task, with everything needed to resume it.
        grant: Payload<Grant>,
    },
    /// No task is ready.
    None,
    /// No lease can be granted now: the runner asks again.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}

/// Request to commit one step of the loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Index of the step, from 0.
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
    /// The step is committed in Postgres, by this request or by an earlier one with the same body. The runner may act
    /// on the step only after this reply.
    Committed {
        /// Time of the commit, in seconds since 1970 on the database's clock.
        at: i64,
        /// Number of the pull request; present only for the step `PrOpened`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pr: Option<i64>,
        /// True if the task was released with this step, because it was paused, or because a task of P0 waits for its
        /// slot: the runner stops, and keeps no state of the task. It need not release the task.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        release: bool,
    },
    /// The step is a merge, and another task was merged since the merge was planned: the runner plans it again.
    MainMoved,
    /// The lease, the attempt or `seq` is not the current one: the runner stops and drops the task.
    Stale,
    /// The step is illegal in the loop's state or can never be written: a bug in the runner or the scheduler. The task
    /// is unchanged.
    Illegal {
        /// Why it is illegal.
        reason: String,
    },
    /// The step cannot be written now: the runner repeats the request.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}

/// Request to submit a job: it creates the job, or returns the existing job with the same (task, seq, role, n); `n` is
/// [`JobRequest::n`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobSubmit {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Index of the loop step that this job is for, from 0.
    pub seq: i32,
    /// The model call.
    pub request: JobRequest,
}

/// Request for the state of a submitted job. Unlike a repeated [`JobSubmit`], it does not send the prompt again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobGet {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// The job.
    pub job: JobId,
}

/// Reply to [`JobSubmit`] and [`JobGet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobReply {
    /// The current state of the job.
    Job {
        /// The job.
        job: JobView,
    },
    /// The runner's attempt is not the current one.
    Stale,
    /// The job can never be written or read.
    Refused {
        /// Why the job can never be written or read.
        reason: RefusedReason,
    },
    /// The job cannot be written or read now: the runner repeats the request.
    Unavailable {
        /// Why the request cannot be carried out now.
        reason: UnavailableReason,
    },
}

/// Request to cancel a job, for example because a limit was reached; the job's state becomes cancelled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobCancel {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// The job.
    pub job: JobId,
}

/// What a runner does for a task, if it is no model call and takes longer than about two seconds. Only for users:
/// nothing depends on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivityReport {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Index of the step that the runner commits next.
    pub seq: i32,
    /// What it does, as text that continues a sentence: `running the check ...`.
    pub activity: String,
}

/// Release of a task by its runner, because the runner drains or the task waits for a job. The task changes from
/// running to ready, and no loss is counted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Release {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Job that the task waits for: the task is not granted again until a node has accepted this job, or the job has
    /// ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<JobId>,
}

/// Release of a task that the runner cannot continue. It counts as a loss: the task changes from running to ready, or,
/// after too many losses, to failed with this reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Abandon {
    /// Fence of the runner's attempt at the task.
    pub fence: TaskFence,
    /// Why the runner cannot continue the task.
    pub reason: String,
}
