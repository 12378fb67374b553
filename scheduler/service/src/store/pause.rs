//! Pause and resume of tasks by users. The state is part of the task's row, so a pause lasts until a resume, whatever is
//! restarted. [`cfq_scheduler_core::pause()`] and [`cfq_scheduler_core::resume()`] decide; the lock on the task's row
//! orders them with grants, steps and cancels.

use cfq_proto::ids::{JobId, TaskId, TaskNumber};
use cfq_proto::job::JobState;
use cfq_proto::label::Label;
use cfq_proto::task::TaskState;
use cfq_scheduler_core::{PauseDecision, PauseFacts, ResumeDecision, ResumeFacts, StartState, pauses_after_step};
use sqlx::PgConnection;

use super::attempts::{self, AttemptOutcome};
use super::columns::{parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, LeaderHint, for_cancelled_job, for_cancelled_task};
use super::jobs::{append_job_changed, leave_node};
use super::starts::start_of;
use super::tasks::{TaskRow, lock_task, move_task};
use super::transaction::Run;
use super::{Store, StoreError, roll_back};

/// What a paused task's jobs wait for, shown to users.
const PAUSED_JOB: &str = "the task is paused";

/// Result of a pause.
#[derive(Debug, Clone, PartialEq)]
pub enum PauseOutcome {
    Done {
        number: TaskNumber,
        hints: Vec<Hint>,
    },
    /// The task is paused after the step that its runner executes.
    AfterStep {
        number: TaskNumber,
    },
    /// The task is in `state`, and is paused or will be paused after the running step; nothing changed.
    Already {
        number: TaskNumber,
        state: TaskState,
    },
    /// A task in this state cannot be paused.
    Refused {
        number: TaskNumber,
        state: TaskState,
    },
    /// There is no such task.
    Unknown,
}

/// Result of a resume.
#[derive(Debug, Clone, PartialEq)]
pub enum ResumeOutcome {
    /// The task is in `state` now.
    Done { number: TaskNumber, state: TaskState, hints: Vec<Hint> },
    /// The pause that was requested is withdrawn. The task is in `state`.
    Withdrawn { number: TaskNumber, state: TaskState },
    /// The task is in `state` and is not paused; nothing changed.
    NotPaused { number: TaskNumber, state: TaskState },
    /// There is no such task.
    Unknown,
}

impl Store {
    /// Pauses a task, at once or after the running step. `by` names the author and the reason; it is shown to users.
    pub async fn pause(&self, task: TaskId, by: &str, run: Run) -> Result<PauseOutcome, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, PauseOutcome::Unknown).await };
        let waits_for_job = sqlx::query_scalar!(
            r#"select exists (select from jobs where task = $1 and state in ('queued', 'placed', 'running')) as "waits!""#,
            task.id.0
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a task's jobs")?;
        let (number, state) = (task.number, task.state);
        let facts = PauseFacts { state, waits_for_job, is_requested: task.pause_requested.is_some() };
        let reason = format!("paused by {by}");
        let outcome = match cfq_scheduler_core::pause(facts) {
            PauseDecision::Now => {
                let mut hints = pause_task(&mut tx, &task, &reason).await?;
                hints.extend(for_cancelled_task(&task));
                PauseOutcome::Done { number, hints }
            }
            PauseDecision::AfterStep => {
                request_pause(&mut tx, &task, Some(&reason)).await?;
                PauseOutcome::AfterStep { number }
            }
            PauseDecision::Already => return roll_back(tx, PauseOutcome::Already { number, state }).await,
            PauseDecision::Refused => return roll_back(tx, PauseOutcome::Refused { number, state }).await,
        };
        cfq_link::failpoint::hit("scheduler.pause.before_commit");
        tx.finish(run, "pausing a task").await?;
        cfq_link::failpoint::hit("scheduler.pause.after_commit");
        Ok(outcome)
    }

    /// Resumes a paused task, or withdraws a pause that has not taken effect. `by` names the author, for users.
    pub async fn resume(&self, task: TaskId, by: &str, run: Run) -> Result<ResumeOutcome, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, ResumeOutcome::Unknown).await };
        let (number, state) = (task.number, task.state);
        let (start, waiting_reason) = start_of(&mut tx, task.id).await?;
        let (state, hints) = match cfq_scheduler_core::resume(resume_facts(&mut tx, &task, &start).await?) {
            ResumeDecision::To(to) => {
                let reason = if to == start.state() && to != TaskState::Ready {
                    waiting_reason
                } else {
                    format!("resumed by {by}")
                };
                move_task(&mut tx, &task, to, &reason).await?;
                let mut hints = resume_jobs(&mut tx, task.id).await?;
                if to == TaskState::Ready {
                    hints.push(Hint::TaskReady);
                }
                (to, hints)
            }
            ResumeDecision::Withdraw => {
                request_pause(&mut tx, &task, None).await?;
                tx.finish(run, "withdrawing a pause").await?;
                return Ok(ResumeOutcome::Withdrawn { number, state });
            }
            ResumeDecision::NotPaused => return roll_back(tx, ResumeOutcome::NotPaused { number, state }).await,
        };
        cfq_link::failpoint::hit("scheduler.resume.before_commit");
        tx.finish(run, "resuming a task").await?;
        cfq_link::failpoint::hit("scheduler.resume.after_commit");
        Ok(ResumeOutcome::Done { number, state, hints })
    }
}

/// Pauses a locked task and ends its lease. Its running jobs are queued again with what they generated so far; this
/// counts neither as a loss nor as a failure.
pub(super) async fn pause_task(
    connection: &mut PgConnection,
    task: &TaskRow,
    reason: &str,
) -> Result<Vec<Hint>, StoreError> {
    move_task(connection, task, TaskState::Paused, reason).await?;
    let live = sqlx::query!(
        r#"select id, state, attempt, lease, node from jobs
           where task = $1 and state in ('queued', 'placed', 'running') order by id for update"#,
        task.id.0
    )
    .fetch_all(&mut *connection)
    .await
    .doing("finding a task's jobs")?;
    let mut hints = Vec::new();
    for job in live {
        let id = JobId(job.id);
        if parse::<JobState>("job state", &job.state)? != JobState::Queued {
            attempts::end_current(connection, id, AttemptOutcome::Released, PAUSED_JOB).await?;
            leave_node(connection, id, JobState::Queued).await?;
            append_job_changed(connection, task, id, PAUSED_JOB).await?;
        }
        hints.extend(for_cancelled_job(id, job.attempt, job.lease, job.node.as_deref())?);
    }
    sqlx::query!(
        "update jobs set placement = $2, updated_at = now() where task = $1 and state = 'queued'",
        task.id.0,
        PAUSED_JOB
    )
    .execute(connection)
    .await
    .doing("pausing a task's jobs")?;
    Ok(hints)
}

/// Makes a task that its runner does not execute any more ready again, or pauses it if that was requested.
pub(super) async fn make_ready(
    connection: &mut PgConnection,
    task: &TaskRow,
    reason: &str,
) -> Result<Vec<Hint>, StoreError> {
    if let Some(requested) = &task.pause_requested {
        return pause_task(connection, task, requested).await;
    }
    move_task(connection, task, TaskState::Ready, reason).await?;
    Ok(vec![Hint::TaskReady])
}

/// Pauses a task that a human's decision has moved to the state `to`, if a pause was requested before the question.
/// Returns the task's state.
pub(super) async fn pause_if_requested(
    connection: &mut PgConnection,
    task: &TaskRow,
    to: TaskState,
    hints: &mut Vec<Hint>,
) -> Result<TaskState, StoreError> {
    let Some(requested) = task.pause_requested.as_ref().filter(|_| pauses_after_step(to)) else { return Ok(to) };
    let moved = TaskRow { state: to, ..task.clone() };
    hints.extend(pause_task(connection, &moved, requested).await?);
    Ok(TaskState::Paused)
}

/// Stores or withdraws (`None`) the request to pause a task, and the reason of a running task for users.
async fn request_pause(connection: &mut PgConnection, task: &TaskRow, request: Option<&str>) -> Result<(), StoreError> {
    let request = request.map(pg_text);
    let shown = request.as_ref().map(|by| format!("will be paused after the running step: {by}")).unwrap_or_default();
    sqlx::query!(
        r#"update tasks set pause_requested = $2, updated_at = now(),
                  reason = case when state = 'running' then $3 else reason end
           where id = $1"#,
        task.id.0,
        request,
        shown
    )
    .execute(connection)
    .await
    .doing("requesting the pause of a task")?;
    Ok(())
}

impl Store {
    /// The first `limit` tasks after this number for which a pause is requested that has not taken effect yet, with all
    /// these labels.
    pub async fn tasks_with_requested_pause(
        &self,
        labels: &[Label],
        after: TaskNumber,
        limit: i64,
    ) -> Result<Vec<(TaskId, TaskNumber)>, StoreError> {
        let mut labels: Vec<&str> = labels.iter().map(Label::as_str).collect();
        labels.sort_unstable();
        labels.dedup();
        let found = sqlx::query!(
            r#"select id, number from tasks t
               where pause_requested is not null and state in ('running', 'waiting_on_human', 'escalated') and number > $1
                 and (select count(*) from task_labels l where l.task = t.id and l.label = any($2))
                     = cardinality($2::text[])
               order by number limit $3"#,
            after.0,
            &labels as &[&str],
            limit
        )
        .fetch_all(&self.pool)
        .await
        .doing("listing requested pauses")?;
        Ok(found.into_iter().map(|row| (TaskId(row.id), TaskNumber(row.number))).collect())
    }
}

async fn resume_facts(
    connection: &mut PgConnection,
    task: &TaskRow,
    start: &StartState,
) -> Result<ResumeFacts, StoreError> {
    let has_open_question = sqlx::query_scalar!(
        r#"select exists (select from questions where task = $1 and state = 'open') as "open!""#,
        task.id.0
    )
    .fetch_one(connection)
    .await
    .doing("finding a question")?;
    Ok(ResumeFacts {
        state: task.state,
        is_requested: task.pause_requested.is_some(),
        has_open_question,
        has_open_predecessors: matches!(start, StartState::Blocked { .. }),
        is_before_start: *start == StartState::Queued,
    })
}

/// Lets the planner place the queued jobs of a task that was paused. The time of the pause counts neither as time
/// without a node nor toward the retry ceiling.
async fn resume_jobs(connection: &mut PgConnection, task: TaskId) -> Result<Vec<Hint>, StoreError> {
    let queued = sqlx::query_scalar!(
        r#"update jobs set placement = '', no_node_ms = 0, first_failure_at = null, node_failures = '{}', updated_at = now()
           where task = $1 and state = 'queued' returning id"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("resuming a task's jobs")?;
    Ok(queued.into_iter().map(|job| Hint::Leader(LeaderHint::Job(JobId(job)))).collect())
}
