//! What a drive needs of the scheduler, for the one task whose lease it holds.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::blob::Carried;
use cfq_proto::ids::JobId;
use cfq_proto::job::{Completion, JobRequest, JobView, Prompt};
use cfq_proto::looping::{Artifact, Step};
use cfq_proto::messages::WarmUp;
use tokio::task::AbortHandle;

/// Why a drive ends before the task rests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The task is somebody else's now, or cancelled: drop everything.
    #[error("the lease is lost")]
    Lost,
    /// Its job has waited for a place for `slot_wait`, and may for long: whoever has a slot uses it for another task.
    #[error("its job {job} waits for a place")]
    Waits { job: JobId },
    /// The scheduler and this runner disagree about what is legal, or a record cannot be read: a bug on one side. The task is
    /// given up with the reason, which counts against it, so that it cannot go round for ever.
    #[error("the task cannot be driven: {reason}")]
    Refused { reason: String },
}

/// What will be asked next, as far as a text says that is written so far. It reads files: not for an async thread.
pub type Foresee = Arc<dyn Fn(&str) -> Option<WarmUp> + Send + Sync>;

/// Ends with this.
#[derive(Debug)]
pub struct Following(AbortHandle);

impl Following {
    pub fn new(follows: AbortHandle) -> Self {
        Self(follows)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Every call waits until there is an answer, and publishes only under a live lease.
pub trait TaskPort: Send + Sync + 'static {
    /// Returns the database's time once the step is committed.
    fn commit(&self, seq: i32, step: Step, active_ms: u64) -> impl Future<Output = Result<i64, Stopped>> + Send;
    /// Makes the job, or returns the one that is there.
    fn job(&self, seq: i32, request: JobRequest) -> impl Future<Output = Result<JobView, Stopped>> + Send;
    /// How a job that was made stands now.
    fn look(&self, job: JobId) -> impl Future<Output = Result<JobView, Stopped>> + Send;
    /// Reads along what a job writes, and passes on what can be foreseen from it.
    fn follow(&self, job: JobId, foresee: Foresee) -> Following;
    fn drop_job(&self, job: JobId) -> impl Future<Output = Result<(), Stopped>> + Send;
    /// Returns when some job of the task may have changed, at the latest after `at_most`.
    fn changed(&self, at_most: Duration) -> impl Future<Output = ()> + Send;
    fn send_artifact(&self, artifact: Artifact) -> impl Future<Output = Result<Carried<Artifact>, Stopped>> + Send;
    fn send_prompt(&self, prompt: Prompt) -> impl Future<Output = Result<Carried<Prompt>, Stopped>> + Send;
    fn completion(&self, carried: Carried<Completion>) -> impl Future<Output = Result<Completion, Stopped>> + Send;
    /// Returns once the lease is live: asked before what has an effect outside the records.
    fn live(&self) -> impl Future<Output = Result<(), Stopped>> + Send;
    /// The work moved.
    fn progressed(&self);
}
