//! Requests of schedulers to the leader: what it plans for a job. Only the leader knows its plan; every scheduler serves
//! the HTTP API.

use std::time::Duration;

use cfq_link::session::Received;
use cfq_link::{LinkError, Session};
use cfq_proto::http::JobPlan;
use cfq_proto::ids::JobId;
use cfq_proto::subject;
use cfq_scheduler_core::{PlannerState, explain_job};
use serde::{Deserialize, Serialize};

/// Time that a scheduler waits for the leader's reply. The leader answers between two plans.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Request for the plan of one job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExplainRequest {
    job: JobId,
}

/// Reply of the leader.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ExplainReply {
    Plan {
        plan: Box<JobPlan>,
    },
    /// The leader has not read the job's row yet, or the job has ended.
    Unknown,
}

/// Asks the leader for its plan of a job; `None` if it does not have the job in its cache.
pub async fn ask_leader(session: &Session, job: JobId) -> Result<Option<JobPlan>, LinkError> {
    match session.request_within(subject::LEADER_EXPLAIN, &ExplainRequest { job }, REPLY_TIMEOUT).await? {
        ExplainReply::Plan { plan } => Ok(Some(*plan)),
        ExplainReply::Unknown => Ok(None),
    }
}

/// Answers a request from the cache. Returns the job and its plan.
pub async fn answer(state: &PlannerState, request: Received<ExplainRequest>, now_ms: i64) -> Option<(JobId, JobPlan)> {
    let job = match &request.body {
        Ok(body) => body.job,
        Err(error) => {
            tracing::debug!(%error, "unreadable request for a plan ignored");
            return None;
        }
    };
    let plan = explain_job(state, job, now_ms);
    let reply = match plan.clone() {
        Some(plan) => ExplainReply::Plan { plan: Box::new(plan) },
        None => ExplainReply::Unknown,
    };
    if let Err(error) = request.reply(&reply).await {
        tracing::debug!(%job, %error, "plan not sent");
    }
    plan.map(|plan| (job, plan))
}
