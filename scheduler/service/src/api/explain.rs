//! `GET /explain/{key}`: why a task or a job waits, or where it runs. What only the leader knows is asked of the leader;
//! if it does not answer, the reply says so and has what the database knows.

use axum::Json;
use axum::extract::{Path, State};
use cfq_proto::http::Explanation;
use cfq_proto::ids::{IdError, JobId, TaskId, TaskKey};
use cfq_proto::task::TaskState;

use super::Api;
use super::error::ApiError;
use crate::leader::ask_leader;

/// Maximum number of jobs of one task for which the leader is asked.
const MAX_PLANNED_JOBS: usize = 4;

pub async fn explain(State(api): State<Api>, Path(key): Path<String>) -> Result<Json<Explanation>, ApiError> {
    let (task, job) = find(&api, &key).await?;
    let mut explanation = api.store.explanation(task, job).await?.ok_or_else(|| unknown(&key))?;
    if explanation.task.state == TaskState::Paused {
        // The leader plans no job of a paused task.
        return Ok(Json(explanation));
    }
    let open = explanation.jobs.iter_mut().filter(|job| !job.state.is_terminal());
    for job in open.take(MAX_PLANNED_JOBS) {
        let Some(session) = api.link.get() else {
            explanation.warning = no_answer("this scheduler is not connected to NATS");
            break;
        };
        match ask_leader(session, job.id).await {
            Ok(Some(plan)) => job.plan = Some(plan),
            Ok(None) => explanation.warning = no_answer("it has not read this job yet"),
            Err(error) => {
                tracing::debug!(%error, "leader did not answer a request for a plan");
                explanation.warning = no_answer("no scheduler leads, or it is busy");
                break;
            }
        }
    }
    Ok(Json(explanation))
}

fn no_answer(cause: &str) -> String {
    format!(
        "the leader did not answer ({cause}), so this shows only what is recorded in the database; run the command \
         again in a few seconds"
    )
}

/// The task that `key` names, or the job and its task.
async fn find(api: &Api, key: &str) -> Result<(TaskId, Option<JobId>), ApiError> {
    let parsed: TaskKey = key.parse().map_err(|_: IdError| {
        let message = format!("key: {key:?} is neither a task number such as t42 nor the id of a task or job");
        ApiError::invalid("key", message)
    })?;
    if let Some(task) = api.store.find_task(parsed).await? {
        return Ok((task, None));
    }
    match parsed {
        TaskKey::Number(number) => {
            let call = api.store.find_call(number).await?;
            Ok((call.ok_or_else(|| unknown(key))?, None))
        }
        TaskKey::Id(id) => {
            let job = JobId(id.0);
            let task = api.store.find_task_of_job(job).await?.ok_or_else(|| unknown(key))?;
            Ok((task, Some(job)))
        }
    }
}

fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!("there is no task or job {key}: `cfq ls` lists all tasks, and `cfq jobs` the jobs"))
}
