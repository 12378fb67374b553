//! What the database knows about why a task or a job waits.

use cfq_proto::http::{Explanation, JobExplanation, TaskExplanation, TaskWait};
use cfq_proto::ids::{JobId, QuestionId, TaskId, TaskNumber};
use cfq_proto::job::JobFailure;
use cfq_proto::task::TaskState;
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::tasks::CALL;
use super::token_queues::{priority, queue_place};
use super::{Store, StoreError};

/// Maximum number of ready tasks of a token that are counted before a task.
const MAX_COUNTED_TASKS: i64 = 100_000;
/// Maximum number of jobs that are listed for a task.
const MAX_LISTED_JOBS: i64 = 16;

impl Store {
    /// The task of a job; `None` if there is no such job.
    pub async fn find_task_of_job(&self, job: JobId) -> Result<Option<TaskId>, StoreError> {
        self.task_of(job).await
    }

    /// Explains a task with its jobs that have not ended (or the last job, if all have), or with this job. The plans of
    /// the jobs are missing. `None` if there is no such task.
    pub async fn explanation(&self, task: TaskId, job: Option<JobId>) -> Result<Option<Explanation>, StoreError> {
        let Some(task) = self.task_explanation(task).await? else { return Ok(None) };
        let jobs = self.job_explanations(task.id, job).await?;
        Ok(Some(Explanation { task, jobs, warning: String::new() }))
    }

    async fn task_explanation(&self, task: TaskId) -> Result<Option<TaskExplanation>, StoreError> {
        let row = sqlx::query!(
            r#"select number, state, priority, reason, waits_for,
                      (select by.number from tasks by where by.id = tasks.preempted_by and tasks.state = 'running') as preempted_by,
                      (select questions.id from questions where questions.task = tasks.id and questions.state = 'open') as question
               from tasks where id = $1"#,
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading a task")?;
        let Some(row) = row else { return Ok(None) };
        let state = if row.state == CALL { TaskState::Running } else { parse("task state", &row.state)? };
        let waits_for = match state {
            TaskState::Ready => match row.waits_for {
                Some(job) => Some(TaskWait::Job { job: JobId(job) }),
                None => Some(self.slot_wait(task).await?),
            },
            TaskState::Queued => Some(TaskWait::Time),
            TaskState::Blocked => Some(TaskWait::Predecessor),
            TaskState::WaitingOnHuman | TaskState::Escalated => {
                Some(TaskWait::Human { question: row.question.map(QuestionId) })
            }
            TaskState::Paused => Some(TaskWait::Resume),
            TaskState::Running
            | TaskState::Merged
            | TaskState::Accepted
            | TaskState::Reviewed
            | TaskState::Failed
            | TaskState::Cancelled => None,
        };
        Ok(Some(TaskExplanation {
            id: task,
            number: TaskNumber(row.number),
            state,
            priority: priority(row.priority)?,
            reason: row.reason,
            waits_for,
            preempted_by: row.preempted_by.map(TaskNumber),
        }))
    }

    /// The position of a ready task in the order in which tasks are granted, and the slots of the live runners.
    async fn slot_wait(&self, task: TaskId) -> Result<TaskWait, StoreError> {
        let place = queue_place(&self.pool, task, MAX_COUNTED_TASKS).await?;
        let runners = sqlx::query!(
            r#"select count(*) as "runners!", coalesce(sum(greatest(held, slots)), 0)::bigint as "slots!",
                      coalesce(sum(greatest(0, slots - held)), 0)::bigint as "free!"
               from (select coalesce(slots, 0) as slots,
                            (select count(*) from tasks where tasks.runner = runners.id and lease is not null) as held
                     from runners
                     where last_seen between now() - $1::float8 * interval '1 millisecond'
                                         and now() + $1::float8 * interval '1 millisecond') as live"#,
            self.lease_ttl_ms()
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting the slots of the runners")?;
        let count = |n: i64| u64::try_from(n).unwrap_or(0);
        Ok(TaskWait::RunnerSlot {
            before: place.map_or(0, |place| place.before),
            slots: count(runners.slots),
            free: count(runners.free),
            runners: count(runners.runners),
            running_tasks_limit: place.filter(|place| !place.share.has_room()).and_then(|place| place.share.limit),
        })
    }

    async fn job_explanations(&self, task: TaskId, only: Option<JobId>) -> Result<Vec<JobExplanation>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, role, model, priority, state, attempt, node, placement, failure as "failure: Json<JobFailure>"
               from jobs where task = $1
                 and case when $2::uuid is not null then id = $2
                     else state in ('queued', 'placed', 'running')
                          or id = (select max(last.id::text)::uuid from jobs last where last.task = $1
                                   and not exists (select from jobs open where open.task = $1
                                                   and open.state in ('queued', 'placed', 'running'))) end
               order by id limit $3"#,
            task.0,
            only.map(|job| job.0),
            MAX_LISTED_JOBS
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading a task's jobs")?;
        let mut jobs = Vec::with_capacity(rows.len());
        for row in rows {
            let id = JobId(row.id);
            jobs.push(JobExplanation {
                id,
                role: parse("role", &row.role)?,
                model: parse("model", &row.model)?,
                priority: priority(row.priority)?,
                state: parse("job state", &row.state)?,
                attempt: row.attempt,
                node: row.node.as_deref().map(|node| parse("node", node)).transpose()?,
                placement: row.placement,
                failure: row.failure.map(|failure| failure.0),
                attempts: self.attempt_views(id).await?,
                plan: None,
            });
        }
        Ok(jobs)
    }
}
