//! Interface between a task's driver and the scheduler, for the one task whose lease the driver holds.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::blob::Payload;
use cfq_proto::ids::JobId;
use cfq_proto::job::{Completion, JobRequest, JobView, Prompt};
use cfq_proto::loop_step::{Artifact, Step};
use cfq_proto::messages::PrefillHint;
use tokio::task::AbortHandle;

/// Reason why a driver stops before its task waits for a human or ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The task has another lease holder or is cancelled: drop all work on it.
    #[error("the lease is lost")]
    LeaseLost,
    /// The job was not placed within `slot_wait` and may wait longer. The driver stops, so that its slot is free for
    /// another task.
    #[error("job {job} is waiting for placement")]
    WaitingForPlacement { job: JobId },
    /// The scheduler and this runner disagree about which step is valid, or a record cannot be parsed: a bug on one of
    /// the two sides. The task is abandoned with the reason. That counts as a failure of the task, so that it is not
    /// retried forever.
    #[error("the task cannot be driven: {reason}")]
    Refused { reason: String },
}

/// Predicts the next prompt from the part of a reply that is generated so far. The function reads files: do not call it
/// on an async thread.
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

/// Requests that a driver sends to the scheduler. Every call waits for its reply, and sends only while the lease is
/// live.
pub trait TaskPort: Send + Sync + 'static {
    /// Commits a step. Returns its commit time, in seconds since 1970 on the database's clock.
    fn commit_step(&self, seq: i32, step: Step, active_ms: u64) -> impl Future<Output = Result<i64, Stopped>> + Send;
    /// Submits a job, or returns the existing one with the same `seq`, role and `n`.
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
    /// Returns once the lease is live. Called before every effect outside the database (commits, refs, branches).
    fn wait_for_lease(&self) -> impl Future<Output = Result<(), Stopped>> + Send;
    /// Records that the work on the task made progress.
    fn record_progress(&self);
}
