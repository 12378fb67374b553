//! Interface between a task's driver and the scheduler, for the one task whose lease the driver holds.

use std::sync::Arc;
use std::time::Duration;

use cfq_convergence::{HistoryError, NotDecidable};
use cfq_proto::blob::Payload;
use cfq_proto::ids::JobId;
use cfq_proto::job::{Completion, JobRequest, JobView, Prompt};
use cfq_proto::loop_step::{Artifact, Step};
use cfq_proto::messages::{MainState, PrefillHint};
use tokio::task::AbortHandle;

/// Reason why a driver stops before its task ends or waits for a human.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The task has another lease holder or is cancelled: drop all work on it.
    #[error("the lease is lost")]
    LeaseLost,
    /// The job was not placed within `slot_wait` and may wait longer. The driver stops, so that its slot is free for
    /// another task.
    #[error("job {job} is waiting for placement")]
    WaitingForPlacement { job: JobId },
    /// The scheduler committed the step, and released the task with it: a user paused it, or a task of P0 gets the slot.
    #[error("the task was released after its step")]
    Released,
    /// The task is abandoned with this reason. That counts as a failure of the task, so that it is not retried forever.
    #[error("the task cannot be driven: {0}")]
    CannotDrive(DriveError),
}

/// Reason why a task cannot be driven. Except for [`DriveError::Blob`], it indicates a bug in the scheduler or in this
/// runner: the two disagree about which step is valid, or a record is not legal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriveError {
    /// The scheduler refused a request for this reason.
    #[error("{reason}")]
    RefusedByScheduler { reason: String },
    /// A message exceeds the maximum size, so a retry does not help; `error` is the text of the link's error.
    #[error("{error}")]
    TooLarge { error: String },
    /// A blob could not be uploaded or downloaded; `error` is the text of the link's error.
    #[error("{error}")]
    Blob { error: String },
    /// The recorded steps do not form a legal history.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The last iteration is not ready for a decision.
    #[error(transparent)]
    NotDecidable(#[from] NotDecidable),
    #[error("the task has not started")]
    NotStarted,
    #[error("there is no artifact")]
    NoArtifact,
    #[error("there is no artifact that can be handed off")]
    NothingToHandOff,
}

/// Question for the main branch of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MainQuery {
    /// Name of the repository in the records.
    pub repository: String,
    /// Base commit of the task.
    pub base: String,
    /// Recorded commit of the mirror's `main`.
    pub after: Option<String>,
}

/// Function that predicts the next prompt from the part of a reply that is generated so far. It reads files: do not
/// call it on an async thread.
pub type PrefillPredictor = Arc<dyn Fn(&str) -> Option<PrefillHint> + Send + Sync>;

/// Guard of a background task that follows a job's tokens. Dropping it aborts the task.
#[derive(Debug)]
pub struct FollowGuard(AbortHandle);

impl FollowGuard {
    /// Guards the task behind `handle`.
    pub fn new(handle: AbortHandle) -> Self {
        Self(handle)
    }
}

impl Drop for FollowGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Requests that a driver sends to the scheduler. Each call sends its request only while the lease is live, and waits
/// for the reply.
pub trait TaskPort: Send + Sync + 'static {
    /// Commits a step. Returns its commit time, in seconds since 1970 on the database's clock.
    fn commit_step(&self, seq: i32, step: Step, active_ms: u64) -> impl Future<Output = Result<i64, Stopped>> + Send;
    /// Commits the step `merged`. Returns `None` if the main branch is no longer at the old commit of the last merge
    /// intent: the merge must be planned again.
    fn commit_merge(
        &self,
        seq: i32,
        step: Step,
        active_ms: u64,
    ) -> impl Future<Output = Result<Option<i64>, Stopped>> + Send;
    /// Returns the state of a main branch; `None` if no merge into it is recorded.
    fn main_branch(&self, query: MainQuery) -> impl Future<Output = Result<Option<MainState>, Stopped>> + Send;
    /// Submits a job, or returns the existing one with the same `seq`, role and index `n` among the calls for the step.
    fn submit_job(&self, seq: i32, request: JobRequest) -> impl Future<Output = Result<JobView, Stopped>> + Send;
    /// Returns the current state of a submitted job.
    fn get_job(&self, job: JobId) -> impl Future<Output = Result<JobView, Stopped>> + Send;
    /// Follows the tokens of a job and sends the prefill hints that `predictor` derives from them.
    fn follow_job(&self, job: JobId, predictor: PrefillPredictor) -> FollowGuard;
    /// Cancels a job.
    fn cancel_job(&self, job: JobId) -> impl Future<Output = Result<(), Stopped>> + Send;
    /// Returns when a job of the task may have changed, at the latest after `at_most`.
    fn wait_for_change(&self, at_most: Duration) -> impl Future<Output = ()> + Send;
    /// Makes an artifact ready to be sent in a step: inline, or stored as a blob.
    fn send_artifact(&self, artifact: Artifact) -> impl Future<Output = Result<Payload<Artifact>, Stopped>> + Send;
    /// Makes a prompt ready to be sent in a job request: inline, or stored as a blob.
    fn send_prompt(&self, prompt: Prompt) -> impl Future<Output = Result<Payload<Prompt>, Stopped>> + Send;
    /// Returns the completion in `payload`; fetches it first if it is stored as a blob.
    fn load_completion(&self, payload: Payload<Completion>)
    -> impl Future<Output = Result<Completion, Stopped>> + Send;
    /// Waits until the lease is live. Call it before every effect outside the database (commits, refs, branches).
    fn wait_for_lease(&self) -> impl Future<Output = Result<(), Stopped>> + Send;
    /// Reports to users what the runner does before it commits step `seq`. A report may be lost.
    fn report_activity(&self, seq: i32, activity: String) -> impl Future<Output = ()> + Send;
    /// Records that the work on the task made progress.
    fn record_progress(&self);
}
