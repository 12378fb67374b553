//! Dead letters: jobs that are parked because they would otherwise be retried without end. A user can look at what
//! happened in each attempt, and requeue the job while its task has not ended.
//!
//! The loop of a task escalates when its job becomes a dead letter. Requeueing the job then also answers the open
//! question ("retry with the same model"), and the job becomes the call of the loop's next step, so the next runner of
//! the task finds it instead of submitting another one.

use cfq_proto::http::{DeadLetter, DeadLetterDetail};
use cfq_proto::ids::{JobId, TaskId, TaskKey, TaskNumber};
use cfq_proto::job::{JobFailure, JobState};
use cfq_proto::loop_step::{ActionKind, EscalationAction, Step};
use cfq_proto::task::{Agent, TaskState};
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::hints::{Hint, for_changed_job};
use super::jobs::append_job_changed;
use super::step_rejection::StepRejection;
use super::tasks::lock_task;
use super::{Store, StoreError, agent_settings, pause, roll_back, steps};

/// Result of requeueing a dead letter.
#[derive(Debug, Clone, PartialEq)]
pub enum Requeued {
    /// The job is queued, and its task is in `state`.
    Done { number: TaskNumber, state: TaskState, hints: Vec<Hint> },
    /// The job is in `state`, which is not dead.
    NotDead { state: JobState },
    /// The task of the job has ended.
    TaskEnded { number: TaskNumber, state: TaskState },
    /// The task's loop cannot repeat the review that the job is for: it goes on with a new result.
    NotRepeatable { number: TaskNumber },
    /// The task's loop has continued without the job.
    Superseded { number: TaskNumber, state: TaskState },
    /// The answer to the task's question cannot be written as the next step of the loop.
    Refused { number: TaskNumber, rejection: StepRejection },
    /// There is no such job.
    Unknown,
}

struct DeadRow {
    id: uuid::Uuid,
    task: uuid::Uuid,
    number: i64,
    task_state: String,
    role: String,
    model: String,
    attempt: i32,
    losses: i32,
    unaccepted: i32,
    failures: i32,
    failure: Option<Json<JobFailure>>,
    died_at: f64,
}

impl DeadRow {
    fn dead_letter(self) -> Result<DeadLetter, StoreError> {
        Ok(DeadLetter {
            job: JobId(self.id),
            task: TaskId(self.task),
            number: TaskNumber(self.number),
            task_state: parse("task state", &self.task_state)?,
            role: parse("role", &self.role)?,
            model: parse("model", &self.model)?,
            attempts: self.attempt,
            losses: self.losses,
            unaccepted: self.unaccepted,
            failures: self.failures,
            failure: self.failure.map(|f| f.0),
            died_at: self.died_at,
        })
    }
}

/// Selects [`DeadRow`]s of tasks that have not ended, by a condition.
macro_rules! dead_rows {
    ($which:literal, $($argument:expr),*) => {
        sqlx::query_as!(
            DeadRow,
            r#"select j.id, j.task, t.number, t.state as task_state, j.role, j.model, j.attempt, j.losses, j.unaccepted,
                      j.failures, j.failure as "failure: _", extract(epoch from j.updated_at)::float8 as "died_at!"
               from jobs j join tasks t on t.id = j.task
               where j.state = 'dead' and t.state not in ('merged', 'accepted', 'reviewed', 'failed', 'cancelled', 'call') and "# + $which,
            $($argument),*
        )
    };
}

impl Store {
    /// Dead letters of tasks that have not ended, the job that was created last first; those before `before`.
    pub async fn dead_letters(&self, before: Option<JobId>, limit: i64) -> Result<Vec<DeadLetter>, StoreError> {
        let rows =
            dead_rows!("j.id < $1 order by j.id desc limit $2", before.map_or(uuid::Uuid::max(), |job| job.0), limit)
                .fetch_all(&self.pool)
                .await
                .doing("listing dead letters")?;
        rows.into_iter().map(DeadRow::dead_letter).collect()
    }

    /// The dead letter of a task, or the one with this job id; `None` if there is none.
    pub async fn find_dead_letter(&self, key: TaskKey) -> Result<Option<JobId>, StoreError> {
        let (id, number) = match key {
            TaskKey::Id(id) => (Some(id.0), None),
            TaskKey::Number(number) => (None, Some(number.0)),
        };
        let row = dead_rows!("(j.id = $1 or t.id = $1 or t.number = $2) order by j.id desc limit 1", id, number)
            .fetch_optional(&self.pool)
            .await
            .doing("finding a dead letter")?;
        Ok(row.map(|row| JobId(row.id)))
    }

    /// A dead letter with all its attempts; `None` if the job is not dead, or if its task has ended.
    pub async fn dead_letter(&self, job: JobId) -> Result<Option<DeadLetterDetail>, StoreError> {
        let row = dead_rows!("j.id = $1", job.0).fetch_optional(&self.pool).await.doing("reading a dead letter")?;
        let Some(row) = row else { return Ok(None) };
        let attempts = self.attempt_views(job).await?;
        Ok(Some(DeadLetterDetail { summary: row.dead_letter()?, attempts }))
    }

    /// Queues a dead letter again. Its earlier attempts no longer count toward a limit. `by` names the author, for users.
    pub async fn requeue(&self, job: JobId, by: &str) -> Result<Requeued, StoreError> {
        let Some(task) = self.task_of(job).await? else { return Ok(Requeued::Unknown) };
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Requeued::Unknown).await };
        let (number, mut state) = (task.number, task.state);
        // A call that moved to the fallback is replaced by a later job of the same step.
        let row = sqlx::query!(
            r#"select state, seq, role,
                      exists (select from jobs later where later.task = jobs.task and later.seq = jobs.seq
                                and later.role = jobs.role and later.n > jobs.n) as "is_replaced!"
               from jobs where id = $1 for update"#,
            job.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a job")?;
        let Some(row) = row else { return roll_back(tx, Requeued::Unknown).await };
        let job_state: JobState = parse("job state", &row.state)?;
        if job_state != JobState::Dead {
            return roll_back(tx, Requeued::NotDead { state: job_state }).await;
        }
        if state.is_terminal() {
            return roll_back(tx, Requeued::TaskEnded { number, state }).await;
        }
        let mut hints = Vec::new();
        // The step that the job is for: the next one, or the one after the answer to the escalation of this step.
        let seq = if state == TaskState::Escalated {
            let offered = sqlx::query_scalar!(
                r#"select actions as "actions: Json<Vec<ActionKind>>" from questions where task = $1 and state = 'open'"#,
                task.id.0
            )
            .fetch_optional(&mut *tx)
            .await
            .doing("finding a question")?;
            if row.seq + 1 != task.next_seq || !offered.is_some_and(|o| o.0.contains(&ActionKind::SwitchLlm)) {
                return roll_back(tx, Requeued::Superseded { number, state }).await;
            }
            // After an answer, the loop calls the creator next.
            let target_agent: Agent = parse("role", &row.role)?;
            if target_agent != Agent::Alpha {
                return roll_back(tx, Requeued::NotRepeatable { number }).await;
            }
            let action = EscalationAction::SwitchLlm { target_agent, suggested_model: None };
            let step = Step::Resolved { action, by: by.to_owned() };
            match steps::write(&mut tx, &task, None, &step, task.active_ms.max(0) as u64).await? {
                Ok(written) => {
                    hints.extend(written.hints);
                    state = written.to;
                }
                Err(rejection) => return roll_back(tx, Requeued::Refused { number, rejection }).await,
            }
            task.next_seq + 1
        } else if row.seq == task.next_seq && !row.is_replaced {
            row.seq
        } else {
            return roll_back(tx, Requeued::Superseded { number, state }).await;
        };
        sqlx::query!(
            r#"update jobs set state = 'queued', n = case when seq = $2 then n else 0 end, seq = $2,
                      running_ms = case when seq = $2 then running_ms else 0 end, requeued_after = attempt,
                      losses = 0, unaccepted = 0, suspicions = 0, failures = 0, failure = null, node_failures = '{}',
                      first_failure_at = null, no_node_ms = 0, placement = '', updated_at = now()
               where id = $1"#,
            job.0,
            seq
        )
        .execute(&mut *tx)
        .await
        .doing("requeueing a dead letter")?;
        agent_settings::adopt(&mut tx, &[job.0]).await?;
        append_job_changed(&mut tx, &task, job, &format!("requeued by {by}")).await?;
        if task.state == TaskState::Escalated {
            state = pause::pause_if_requested(&mut tx, &task, state, &mut hints).await?;
        }
        cfq_link::failpoint::hit("scheduler.requeue.before_commit");
        tx.commit().await.doing("requeueing a dead letter")?;
        cfq_link::failpoint::hit("scheduler.requeue.after_commit");
        hints.extend(for_changed_job(&task, job));
        Ok(Requeued::Done { number, state, hints })
    }
}
