//! [`TaskPort`] over NATS. Every request is sent only while the lease is live, and is repeated with the same body until
//! it is answered. While the lease is suspended (no heartbeat was answered in time), requests wait; once it is lost,
//! they return [`Stopped::LeaseLost`].

use std::sync::Arc;
use std::time::Duration;

use cfq_link::lease::{LeaseHandle, LeaseStatus};
use cfq_link::{LinkError, blobs, clock};
use cfq_proto::blob::Payload;
use cfq_proto::ids::JobId;
use cfq_proto::job::{Completion, JobRequest, JobView, Prompt};
use cfq_proto::loop_step::{Artifact, Step};
use cfq_proto::messages::{
    ActivityReport, FenceReply, JobCancel, JobGet, JobReply, JobSubmit, MainGet, MainReply, MainState, StepReply,
    StepRequest, TaskFence, UnavailableReason,
};
use cfq_proto::subject;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use super::RunnerContext;
use super::follow::follow_tokens;
use crate::driver::{DriveError, FollowGuard, MainQuery, PrefillPredictor, Stopped, TaskPort};

/// Wait before a request is repeated after a failure, for example because the scheduler has no leader or no database.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Connection of one task's driver to the scheduler.
pub(super) struct NatsTaskPort {
    pub context: Arc<RunnerContext>,
    pub fence: TaskFence,
    pub lease: LeaseHandle,
    /// Notified when a job of the task changed.
    pub job_changed: Arc<Notify>,
}

/// Outcome of a request, according to its reply.
enum ReplyOutcome<T> {
    Done(T),
    /// The fence is stale: the lease is lost.
    Stale,
    /// The scheduler cannot answer now, with the reason.
    Retry(UnavailableReason),
}

impl NatsTaskPort {
    /// Repeats the request until `interpret` returns an outcome other than `Retry` for its reply.
    async fn request<Q, A, T>(
        &self,
        verb: &str,
        body: &Q,
        interpret: impl Fn(A) -> Result<ReplyOutcome<T>, Stopped>,
    ) -> Result<T, Stopped>
    where
        Q: Serialize + Sync,
        A: DeserializeOwned,
    {
        let subject = subject::runner(&self.context.config.runner, verb);
        loop {
            self.wait_for_lease().await?;
            match self.context.session.request::<Q, A>(&subject, body).await {
                Ok(reply) => match interpret(reply)? {
                    ReplyOutcome::Done(value) => return Ok(value),
                    ReplyOutcome::Stale => return Err(Stopped::LeaseLost),
                    ReplyOutcome::Retry(reason) => tracing::debug!(verb, %reason, "scheduler unavailable, retrying"),
                },
                Err(error @ LinkError::TooLarge { .. }) => {
                    return Err(Stopped::CannotDrive(DriveError::TooLarge { error: error.to_string() }));
                }
                Err(LinkError::NoReply { .. }) => tracing::debug!(verb, "no reply, retrying"),
                Err(error) => {
                    tracing::warn!(verb, %error, cause = ?std::error::Error::source(&error), "request failed, retrying")
                }
            }
            tokio::time::sleep(RETRY_INTERVAL + clock::jitter(RETRY_INTERVAL / 2)).await;
        }
    }

    /// Uploads a value as a blob if it is too large for a message; a small value stays inline.
    async fn upload<T: Serialize>(&self, value: T) -> Result<Payload<T>, Stopped> {
        self.wait_for_lease().await?;
        let subject = subject::runner(&self.context.config.runner, "blob_put");
        blobs::put(&self.context.session, &subject, self.fence.lease, value).await.map_err(blob_failed)
    }

    /// Returns the value of a payload; downloads it if it is stored as a blob.
    pub async fn fetch<T: DeserializeOwned>(&self, payload: Payload<T>) -> Result<T, Stopped> {
        fetch_payload(&self.context, &self.lease, payload).await
    }
}

/// Returns the value of a payload; a blob is downloaded while `lease` is live. Needs no fence, because the grant, which
/// contains the fence, may itself be a blob.
pub(super) async fn fetch_payload<T: DeserializeOwned>(
    context: &RunnerContext,
    lease: &LeaseHandle,
    payload: Payload<T>,
) -> Result<T, Stopped> {
    let subject = subject::runner(&context.config.runner, "blob_get");
    blobs::get(&context.session, &subject, lease.id(), payload).await.map_err(blob_failed)
}

fn refused_by_scheduler(reason: String) -> Stopped {
    Stopped::CannotDrive(DriveError::RefusedByScheduler { reason })
}

fn job_outcome(reply: JobReply) -> Result<ReplyOutcome<JobView>, Stopped> {
    Ok(match reply {
        JobReply::Job { job } => ReplyOutcome::Done(job),
        JobReply::Stale => ReplyOutcome::Stale,
        JobReply::Refused { reason } => return Err(refused_by_scheduler(reason.to_string())),
        JobReply::Unavailable { reason } => ReplyOutcome::Retry(reason),
    })
}

/// Converts the error of a failed blob request. The usual cause is a lease that just ended, which the lease keeper
/// reports as well.
fn blob_failed(error: LinkError) -> Stopped {
    Stopped::CannotDrive(DriveError::Blob { error: error.to_string() })
}

impl TaskPort for NatsTaskPort {
    async fn commit_step(&self, seq: i32, step: Step, active_ms: u64) -> Result<i64, Stopped> {
        let request = StepRequest { fence: self.fence, seq, step, active_ms };
        self.request("step", &request, |reply| match reply {
            StepReply::Committed { release: true, .. } => Err(Stopped::Released),
            StepReply::Committed { at, .. } => Ok(ReplyOutcome::Done(at)),
            StepReply::Stale => Ok(ReplyOutcome::Stale),
            StepReply::MainMoved => Err(refused_by_scheduler("the step is not a merge".to_owned())),
            StepReply::Illegal { reason } => Err(refused_by_scheduler(reason)),
            StepReply::Unavailable { reason } => Ok(ReplyOutcome::Retry(reason)),
        })
        .await
    }

    async fn commit_merge(&self, seq: i32, step: Step, active_ms: u64) -> Result<Option<i64>, Stopped> {
        let request = StepRequest { fence: self.fence, seq, step, active_ms };
        self.request("step", &request, |reply| match reply {
            StepReply::Committed { release: true, .. } => Err(Stopped::Released),
            StepReply::Committed { at, .. } => Ok(ReplyOutcome::Done(Some(at))),
            StepReply::MainMoved => Ok(ReplyOutcome::Done(None)),
            StepReply::Stale => Ok(ReplyOutcome::Stale),
            StepReply::Illegal { reason } => Err(refused_by_scheduler(reason)),
            StepReply::Unavailable { reason } => Ok(ReplyOutcome::Retry(reason)),
        })
        .await
    }

    async fn main_branch(&self, query: MainQuery) -> Result<Option<MainState>, Stopped> {
        let MainQuery { repository, base, after } = query;
        let request = MainGet { fence: self.fence, repository, base, after };
        let state = self.request("main_get", &request, |reply| match reply {
            MainReply::Main { state } => Ok(ReplyOutcome::Done(Some(state))),
            MainReply::NoMerge => Ok(ReplyOutcome::Done(None)),
            MainReply::Stale => Ok(ReplyOutcome::Stale),
            MainReply::Refused { reason } => Err(refused_by_scheduler(reason.to_string())),
            MainReply::Unavailable { reason } => Ok(ReplyOutcome::Retry(reason)),
        });
        match state.await? {
            Some(state) => self.fetch(state).await.map(Some),
            None => Ok(None),
        }
    }

    async fn submit_job(&self, seq: i32, request: JobRequest) -> Result<JobView, Stopped> {
        let request = JobSubmit { fence: self.fence, seq, request };
        self.request("job_submit", &request, job_outcome).await
    }

    async fn get_job(&self, job: JobId) -> Result<JobView, Stopped> {
        let request = JobGet { fence: self.fence, job };
        self.request("job_get", &request, job_outcome).await
    }

    fn follow_job(&self, job: JobId, predictor: PrefillPredictor) -> FollowGuard {
        FollowGuard::new(tokio::spawn(follow_tokens(self.context.clone(), job, predictor)).abort_handle())
    }

    async fn cancel_job(&self, job: JobId) -> Result<(), Stopped> {
        let request = JobCancel { fence: self.fence, job };
        self.request("job_cancel", &request, |reply| match reply {
            FenceReply::Committed => Ok(ReplyOutcome::Done(())),
            FenceReply::Stale => Ok(ReplyOutcome::Stale),
            FenceReply::Refused { reason } => Err(refused_by_scheduler(reason.to_string())),
            FenceReply::Unavailable { reason } => Ok(ReplyOutcome::Retry(reason)),
        })
        .await
    }

    async fn wait_for_change(&self, at_most: Duration) {
        tokio::select! {
            () = self.job_changed.notified() => {}
            () = tokio::time::sleep(at_most) => {}
        }
    }

    async fn send_artifact(&self, artifact: Artifact) -> Result<Payload<Artifact>, Stopped> {
        self.upload(artifact).await
    }

    async fn send_prompt(&self, prompt: Prompt) -> Result<Payload<Prompt>, Stopped> {
        self.upload(prompt).await
    }

    async fn load_completion(&self, payload: Payload<Completion>) -> Result<Completion, Stopped> {
        self.fetch(payload).await
    }

    async fn wait_for_lease(&self) -> Result<(), Stopped> {
        match self.lease.settled().await {
            LeaseStatus::Lost => Err(Stopped::LeaseLost),
            LeaseStatus::Live | LeaseStatus::Suspended => Ok(()),
        }
    }

    async fn report_activity(&self, seq: i32, activity: String) {
        if self.lease.status() != LeaseStatus::Live {
            return;
        }
        let subject = subject::runner(&self.context.config.runner, "activity");
        let report = ActivityReport { fence: self.fence, seq, activity };
        if let Err(error) = self.context.session.request::<_, FenceReply>(&subject, &report).await {
            tracing::debug!(%error, "cannot report an activity");
        }
    }

    fn record_progress(&self) {
        self.lease.record_step();
    }
}
