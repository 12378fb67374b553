//! [`TaskPort`] over NATS: every request is repeated with the same body until it is answered, and sent only while the
//! lease is live. A suspended lease waits here; a lost one ends the drive.

use std::sync::Arc;
use std::time::Duration;

use cfq_link::lease::{HeldLease, LeaseStatus};
use cfq_link::{LinkError, blobs};
use cfq_proto::blob::Carried;
use cfq_proto::ids::JobId;
use cfq_proto::job::{Completion, JobRequest, JobView, Prompt};
use cfq_proto::looping::{Artifact, Step};
use cfq_proto::messages::{FenceReply, JobAsk, JobDrop, JobLook, JobReply, StepReply, StepRequest, TaskFence};
use cfq_proto::subject;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use super::Shared;
use super::follow::follow;
use crate::driver::{Following, Foresee, Stopped, TaskPort};

/// Between two tries of a request that found no leader or no database.
const AGAIN: Duration = Duration::from_millis(200);

pub(super) struct Cluster {
    pub shared: Arc<Shared>,
    pub fence: TaskFence,
    pub lease: HeldLease,
    pub jobs: Arc<Notify>,
}

/// What an answer means for the asker.
enum Verdict<T> {
    Settled(T),
    Stale,
    Again(String),
}

impl Cluster {
    async fn request<Q, A, T>(
        &self,
        verb: &str,
        body: &Q,
        judge: impl Fn(A) -> Result<Verdict<T>, Stopped>,
    ) -> Result<T, Stopped>
    where
        Q: Serialize + Sync,
        A: DeserializeOwned,
    {
        let subject = subject::runner(&self.shared.config.runner, verb);
        loop {
            self.live().await?;
            match self.shared.session.request::<Q, A>(&subject, body).await {
                Ok(answer) => match judge(answer)? {
                    Verdict::Settled(value) => return Ok(value),
                    Verdict::Stale => return Err(Stopped::Lost),
                    Verdict::Again(reason) => tracing::debug!(verb, reason, "not now"),
                },
                Err(LinkError::NoAnswer { .. }) => tracing::debug!(verb, "no answer"),
                Err(error) => {
                    tracing::warn!(verb, %error, cause = ?std::error::Error::source(&error), "request failed")
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn send<T: Serialize>(&self, value: T) -> Result<Carried<T>, Stopped> {
        self.live().await?;
        let subject = subject::runner(&self.shared.config.runner, "blob_put");
        blobs::put(&self.shared.session, &subject, self.fence.lease, value).await.map_err(refused)
    }

    pub async fn fetch<T: DeserializeOwned>(&self, carried: Carried<T>) -> Result<T, Stopped> {
        fetch(&self.shared, &self.lease, carried).await
    }
}

/// A value under a lease whose fence is not known yet: the grant itself may be a blob.
pub(super) async fn fetch<T: DeserializeOwned>(
    shared: &Shared,
    lease: &HeldLease,
    carried: Carried<T>,
) -> Result<T, Stopped> {
    let subject = subject::runner(&shared.config.runner, "blob_get");
    blobs::get(&shared.session, &subject, lease.id(), carried).await.map_err(refused)
}

fn judge_job(reply: JobReply) -> Result<Verdict<JobView>, Stopped> {
    Ok(match reply {
        JobReply::Job { job } => Verdict::Settled(job),
        JobReply::Stale => Verdict::Stale,
        JobReply::Refused { reason } => return Err(Stopped::Refused { reason }),
        JobReply::Unavailable { reason } => Verdict::Again(reason),
    })
}

/// A blob that is refused: mostly a lease that just ended, which the keeper will say too.
fn refused(error: LinkError) -> Stopped {
    Stopped::Refused { reason: error.to_string() }
}

impl TaskPort for Cluster {
    async fn commit(&self, seq: i32, step: Step, active_ms: u64) -> Result<i64, Stopped> {
        let ask = StepRequest { fence: self.fence, seq, step, active_ms };
        self.request("step", &ask, |reply| match reply {
            StepReply::Committed { at, .. } => Ok(Verdict::Settled(at)),
            StepReply::Stale => Ok(Verdict::Stale),
            StepReply::Illegal { reason } => Err(Stopped::Refused { reason }),
            StepReply::Unavailable { reason } => Ok(Verdict::Again(reason)),
        })
        .await
    }

    async fn job(&self, seq: i32, request: JobRequest) -> Result<JobView, Stopped> {
        let ask = JobAsk { fence: self.fence, seq, request };
        self.request("job", &ask, judge_job).await
    }

    async fn look(&self, job: JobId) -> Result<JobView, Stopped> {
        let ask = JobLook { fence: self.fence, job };
        self.request("job_look", &ask, judge_job).await
    }

    fn follow(&self, job: JobId, foresee: Foresee) -> Following {
        Following::new(tokio::spawn(follow(self.shared.clone(), job, foresee)).abort_handle())
    }

    async fn drop_job(&self, job: JobId) -> Result<(), Stopped> {
        let ask = JobDrop { fence: self.fence, job };
        self.request("job_cancel", &ask, |reply| match reply {
            FenceReply::Committed => Ok(Verdict::Settled(())),
            FenceReply::Stale => Ok(Verdict::Stale),
            FenceReply::Refused { reason } => Err(Stopped::Refused { reason }),
            FenceReply::Unavailable { reason } => Ok(Verdict::Again(reason)),
        })
        .await
    }

    async fn changed(&self, at_most: Duration) {
        tokio::select! {
            () = self.jobs.notified() => {}
            () = tokio::time::sleep(at_most) => {}
        }
    }

    async fn send_artifact(&self, artifact: Artifact) -> Result<Carried<Artifact>, Stopped> {
        self.send(artifact).await
    }

    async fn send_prompt(&self, prompt: Prompt) -> Result<Carried<Prompt>, Stopped> {
        self.send(prompt).await
    }

    async fn completion(&self, carried: Carried<Completion>) -> Result<Completion, Stopped> {
        self.fetch(carried).await
    }

    async fn live(&self) -> Result<(), Stopped> {
        match self.lease.settled().await {
            LeaseStatus::Lost => Err(Stopped::Lost),
            LeaseStatus::Live | LeaseStatus::Suspended => Ok(()),
        }
    }

    fn progressed(&self) {
        self.lease.step();
    }
}
