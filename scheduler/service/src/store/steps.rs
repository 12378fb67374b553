//! Commits the steps of a task's loop. Each commit is a compare-and-set on (attempt, lease, seq). `cfq-convergence`
//! decides whether the step is legal. All effects on the task's other rows are in the same transaction. The runner
//! continues from a step only after the reply `Committed`.

use cfq_convergence::{Facts, task_state_after, transition};
use cfq_proto::blob::{BlobHash, BlobRef, Payload};
use cfq_proto::event::EventBody;
use cfq_proto::ids::{LeaseId, RunnerId, TaskId};
use cfq_proto::loop_step::{Decided, Decision, EscalationReason, LoopState, Step, StepRecord};
use cfq_proto::messages::{StepReply, StepRequest, UnavailableReason};
use cfq_proto::task::TaskState;
use cfq_scheduler_core::{may_be_preempted, pauses_after_step};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::AsJson;
use super::error::Doing;
use super::events::append;
use super::hints::{Hint, for_cancelled_task};
use super::jobs::cancel_jobs;
use super::preemption::release_if_preempted;
use super::step_rejection::StepRejection;
use super::tasks::{TaskRow, lock_task, move_task};
use super::{Store, StoreError, blobs, effects, pause, project, roll_back};

/// A step that is written but not committed yet.
pub(super) struct WrittenStep {
    /// Time of the step, in s since 1970.
    pub at: i64,
    /// Number of the pull request that the step opened.
    pub pr: Option<i64>,
    /// The task's state after the step.
    pub to: TaskState,
    pub loop_state: LoopState,
    pub hints: Vec<Hint>,
}

impl Store {
    /// Commits the next step of a task that the runner holds. A repeated request gets the same reply.
    pub async fn commit_step(
        &self,
        runner: &RunnerId,
        request: &StepRequest,
    ) -> Result<(StepReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, request.fence.task).await? else {
            return roll_back(tx, (StepReply::Stale, vec![])).await;
        };
        if request.seq < task.next_seq {
            let reply = reply_to_repeat(&mut tx, request).await?;
            return roll_back(tx, (reply, vec![])).await;
        }
        if request.seq != task.next_seq || !task.is_held_by(runner, &request.fence) {
            return roll_back(tx, (StepReply::Stale, vec![])).await;
        }
        if matches!(request.step, Step::Resolved { .. } | Step::Cancelled { .. }) {
            let reason = format!("a `{}` step is written only by the scheduler, for a client", request.step.kind());
            return roll_back(tx, (StepReply::Illegal { reason }, vec![])).await;
        }
        if let Step::Generated { artifact: Payload::Blob(blob) } = &request.step
            && !blobs::has(&mut tx, &blob.hash, task.id).await?
        {
            let reason = UnavailableReason::MissingBlob { hash: blob.hash.clone() };
            return roll_back(tx, (StepReply::Unavailable { reason }, vec![])).await;
        }
        if is_call_error(&request.step) && has_requeued_job(&mut tx, &task).await? {
            let hints = pause::make_ready(&mut tx, &task, "its call was requeued").await?;
            tx.commit().await.doing("releasing a task whose call was requeued")?;
            return Ok((StepReply::Stale, hints));
        }
        let mut written =
            match write(&mut tx, &task, Some(request.fence.lease), &request.step, request.active_ms).await? {
                Ok(written) => written,
                Err(StepRejection::MainMoved { repository }) => {
                    tracing::info!(task = %task.number, repository, "another task was merged first");
                    return roll_back(tx, (StepReply::MainMoved, vec![])).await;
                }
                Err(rejection) => {
                    let (seq, step) = (request.seq, request.step.kind());
                    tracing::warn!(task = %task.number, seq, step, %rejection, "step refused");
                    return roll_back(tx, (StepReply::Illegal { reason: rejection.to_string() }, vec![])).await;
                }
            };
        let release = match &task.pause_requested {
            Some(reason) if pauses_after_step(written.to) => {
                written.hints.extend(pause::pause_task(&mut tx, &task, reason).await?);
                written.hints.extend(for_cancelled_task(&task));
                true
            }
            Some(_) | None => {
                let is_preempted = written.to == TaskState::Running
                    && may_be_preempted(written.loop_state)
                    && release_if_preempted(&mut tx, &task).await?;
                if is_preempted {
                    written.hints.push(Hint::TaskReady);
                }
                is_preempted
            }
        };
        if release {
            mark_released(&mut tx, request).await?;
        }
        cfq_link::failpoint::hit("scheduler.step.before_commit");
        tx.commit().await.doing("committing a step")?;
        cfq_link::failpoint::hit("scheduler.step.after_commit");
        Ok((StepReply::Committed { at: written.at, pr: written.pr, release }, written.hints))
    }
}

/// Whether the step may be the consequence of a failed call: an escalation, or the failure of a task that reviews a change.
fn is_call_error(step: &Step) -> bool {
    let Step::Decided { decided: Decided { decision, .. }, .. } = step else { return false };
    matches!(decision, Decision::Escalate { reason: EscalationReason::AgentError, .. } | Decision::Fail { .. })
}

/// Whether a user requeued the call of the next step after it had failed. The runner that escalates has not seen this
/// yet, so the task goes to a runner that reads the job again.
async fn has_requeued_job(connection: &mut PgConnection, task: &TaskRow) -> Result<bool, StoreError> {
    sqlx::query_scalar!(
        r#"select exists (select from jobs where task = $1 and seq = $2 and requeued_after > 0
                                             and state in ('queued', 'placed', 'running')) as "requeued!""#,
        task.id.0,
        task.next_seq
    )
    .fetch_one(connection)
    .await
    .doing("finding a requeued call")
}

/// Notes that the task was released with the step of this request, for repeats of the request.
async fn mark_released(connection: &mut PgConnection, request: &StepRequest) -> Result<(), StoreError> {
    sqlx::query!("update steps set released = true where task = $1 and seq = $2", request.fence.task.0, request.seq)
        .execute(connection)
        .await
        .doing("releasing a task with its step")?;
    Ok(())
}

/// The reply to a step whose number is already committed: `Committed` if the committed step is the same and of the same
/// attempt (so the first reply was lost), else `Stale`.
async fn reply_to_repeat(connection: &mut PgConnection, request: &StepRequest) -> Result<StepReply, StoreError> {
    let row = sqlx::query!(
        r#"select step as "step: Json<Step>", pr, released, extract(epoch from at)::bigint as "at!" from steps
           where task = $1 and seq = $2 and attempt = $3 and lease = $4"#,
        request.fence.task.0,
        request.seq,
        request.fence.attempt,
        request.fence.lease.0
    )
    .fetch_optional(connection)
    .await
    .doing("finding a step")?;
    Ok(match row {
        Some(row) if row.step.0 == request.step => {
            StepReply::Committed { at: row.at, pr: row.pr, release: row.released }
        }
        Some(_) | None => StepReply::Stale,
    })
}

/// Writes the next step of a locked task and all its effects, or returns why it is illegal.
pub(super) async fn write(
    connection: &mut PgConnection,
    task: &TaskRow,
    lease: Option<LeaseId>,
    step: &Step,
    active_ms: u64,
) -> Result<Result<WrittenStep, StepRejection>, StoreError> {
    let facts = facts(connection, task.id).await?;
    let loop_state = match transition(task.loop_state, facts, step) {
        Ok(state) => state,
        Err(illegal) => return Ok(Err(illegal.into())),
    };
    let to = task_state_after(facts, step);
    if to != task.state && !cfq_scheduler_core::task_transition_allowed(task.state, to) {
        return Ok(Err(StepRejection::TaskState { from: task.state, to }));
    }
    let at = sqlx::query_scalar!(
        r#"insert into steps (task, seq, attempt, lease, kind, step, active_ms) values ($1, $2, $3, $4, $5, $6, $7)
           returning extract(epoch from at)::bigint as "at!""#,
        task.id.0,
        task.next_seq,
        task.attempt,
        lease.map(|l| l.0),
        step.kind(),
        AsJson(step) as _,
        i64::try_from(active_ms).unwrap_or(i64::MAX)
    )
    .fetch_one(&mut *connection)
    .await
    .doing("writing a step")?;
    sqlx::query!(
        r#"update tasks set loop_state = $2, next_seq = next_seq + 1, active_ms = $3, losses = 0, lease_request = null,
                  unreceived = 0
           where id = $1"#,
        task.id.0,
        loop_state.as_str(),
        i64::try_from(active_ms).unwrap_or(i64::MAX)
    )
    .execute(&mut *connection)
    .await
    .doing("advancing a task")?;
    let projection = match project::project(connection, task, step).await? {
        Ok(projection) => projection,
        Err(rejection) => return Ok(Err(rejection)),
    };
    let event = EventBody::StepCommitted { seq: task.next_seq, step: projection.step, loop_state };
    append(connection, task.id, &event).await?;
    let mut hints = Vec::new();
    if to != task.state {
        let reason = effects::reason(task, step);
        move_task(connection, task, to, &reason).await?;
        effects::update_questions(connection, task, step, projection.decided.as_ref()).await?;
        if to != TaskState::Ready && to != TaskState::Running {
            hints.extend(cancel_jobs(connection, task, &reason).await?);
            effects::close_pr(connection, task, to).await?;
        }
        if to == TaskState::Ready {
            hints.push(Hint::TaskReady);
        }
    }
    Ok(Ok(WrittenStep { at, pr: projection.pr, to, loop_state, hints }))
}

/// Collects the [`Facts`] about the committed steps without reading any artifact.
async fn facts(connection: &mut PgConnection, task: TaskId) -> Result<Facts, StoreError> {
    let rows = sqlx::query_scalar!(
        r#"select case when kind in ('generated', 'reviewed') then null else step end as "step: Json<Step>"
           from steps where task = $1 and kind <> 'reviewed' order by seq"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("reading a task's steps")?;
    // The facts do not depend on an artifact's contents, so a placeholder replaces it.
    let generated = Step::Generated { artifact: Payload::Blob(BlobRef { hash: BlobHash::of(&[]), size: 0 }) };
    Ok(Facts::of(rows.iter().map(|step| step.as_ref().map_or(&generated, |s| &s.0))))
}

impl TaskRow {
    /// Whether the task has a running loop, which a cancel has to end with a step.
    pub(super) fn has_loop(&self) -> bool {
        match self.loop_state {
            LoopState::Idle | LoopState::Failed => false,
            LoopState::Generating
            | LoopState::Reviewing
            | LoopState::Revising
            | LoopState::Converged
            | LoopState::Escalated => true,
        }
    }
}

/// All committed steps, in order.
pub(super) async fn committed_steps(
    connection: &mut PgConnection,
    task: TaskId,
) -> Result<Vec<StepRecord>, StoreError> {
    let rows = sqlx::query!(
        r#"select seq, step as "step: Json<Step>", active_ms, extract(epoch from at)::bigint as "at!"
           from steps where task = $1 order by seq"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("reading a task's steps")?;
    Ok(rows
        .into_iter()
        .map(|r| StepRecord { seq: r.seq, step: r.step.0, active_ms: r.active_ms.max(0) as u64, at: r.at })
        .collect())
}
