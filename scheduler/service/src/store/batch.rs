//! Submission of tasks that refer to other tasks or start later: one transaction writes all tasks of the batch with their
//! edges, or none. A single task with predecessors is a batch of one.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{TaskId, TaskKey, TaskNumber};
use cfq_proto::task::TaskState;
use cfq_proto::task_ref::TaskRef;
use cfq_scheduler_core::{Predecessor, StartState, start_state};
use sqlx::PgConnection;

use super::acknowledge::acknowledge_failure;
use super::columns::{AsJson, parse, pg_text};
use super::dependencies::{
    first_waiting_for, insert_edges, lock_newest_retries, lock_predecessors, lock_retries, take_over_edges,
};
use super::error::Doing;
use super::labels::insert_labels;
use super::submit::{NewTask, Submitted, agent_names};
use super::{Store, StoreError, limited, roll_back};

impl Store {
    /// Creates all tasks, or finds those that an earlier submission with the same idempotency keys created. Each task
    /// must come after those of the batch that it refers to. Returns one result for each task, or a single refusal, in
    /// which case nothing was written.
    pub async fn submit_batch(&self, tasks: &[NewTask]) -> Result<Vec<Submitted>, StoreError> {
        if let Some(existing) = self.find_batch(tasks).await? {
            return Ok(existing);
        }
        match limited("writing tasks", self.insert_batch(tasks)).await? {
            Some(results) => Ok(results),
            // A concurrent request with the same key was committed first.
            None => Ok(self.find_batch(tasks).await?.unwrap_or_else(|| vec![Submitted::TooLate])),
        }
    }

    /// The tasks of an earlier submission with the same keys; `None` if there is none.
    async fn find_batch(&self, tasks: &[NewTask]) -> Result<Option<Vec<Submitted>>, StoreError> {
        let mut found = Vec::with_capacity(tasks.len());
        for task in tasks.iter().filter(|task| task.key.is_some()) {
            match limited("finding the task of an idempotency key", self.find_by_key(task)).await? {
                Submitted::TooLate => return Ok(None),
                reused @ Submitted::KeyReused { .. } => return Ok(Some(vec![reused])),
                existing => found.push(existing),
            }
        }
        Ok(Some(found).filter(|found| !found.is_empty()))
    }

    /// `None` if a task with one of the idempotency keys exists.
    async fn insert_batch(&self, tasks: &[NewTask]) -> Result<Option<Vec<Submitted>>, StoreError> {
        let mut tx = self.begin().await?;
        if tasks.iter().any(|task| task.spec.retry_of.is_some()) {
            lock_retries(&mut tx).await?;
        }
        let keys: Vec<TaskKey> = tasks.iter().flat_map(|task| task.spec.after.iter().filter_map(existing)).collect();
        let mut known = lock_predecessors(&mut tx, &keys).await?;
        let retries = lock_newest_retries(&mut tx, &mut known).await?;
        let is_new = |key: TaskKey| tasks.iter().any(|task| TaskKey::Id(task.id) == key);
        // Before the first insert, because numbers of tasks that are rolled back are not used again.
        if let Some(key) = keys.into_iter().find(|key| known.find(*key).is_none() && !is_new(*key)) {
            return roll_back(tx, Some(vec![Submitted::UnknownTask { field: "after", key }])).await;
        }
        let mut results = Vec::with_capacity(tasks.len());
        for task in tasks {
            let mut predecessors = Vec::new();
            for key in task.spec.after.iter().filter_map(existing) {
                let found = known.find(key);
                // A task that was retried is replaced by the retry.
                let retry = found.and_then(|(id, _)| known.find(TaskKey::Id(*retries.get(&id)?)));
                match retry.or(found) {
                    Some(found) if predecessors.contains(&found) => {}
                    Some(found) => predecessors.push(found),
                    None => return roll_back(tx, Some(vec![Submitted::UnknownTask { field: "after", key }])).await,
                }
            }
            predecessors.sort_by_key(|(_, task): &(TaskId, Predecessor)| task.number);
            let retried = match task.spec.retry_of.as_ref().and_then(existing) {
                None => None,
                Some(key) => match lock_retried(&mut tx, key).await? {
                    Ok(retried) => Some(retried),
                    Err(refusal) => return roll_back(tx, Some(vec![refusal])).await,
                },
            };
            let (ids, states): (Vec<TaskId>, Vec<Predecessor>) = predecessors.into_iter().unzip();
            if let Some(retried) = retried
                && let Some(number) = first_waiting_for(&mut tx, retried, &ids).await?
            {
                return roll_back(tx, Some(vec![Submitted::RetryCycle { number }])).await;
            }
            let start = start_state(&states, is_past_or_absent(&mut tx, task.spec.run_at).await?);
            if task.spec.deadline.is_some() && is_past_or_absent(&mut tx, task.spec.deadline).await? {
                return roll_back(tx, Some(vec![Submitted::TooLate])).await;
            }
            let Some(number) = insert_task(&mut tx, task, &start, retried, None).await? else {
                return roll_back(tx, None).await;
            };
            insert_edges(&mut tx, task.id, &ids).await?;
            if let Some(retried) = retried {
                take_over_edges(&mut tx, retried, task.id).await?;
                acknowledge_failure(&mut tx, retried).await?;
            }
            known.insert(task.id, Predecessor { number, state: start.state() });
            tx.report(task.id);
            let warning = match &start {
                StartState::Blocked { reason, needs_user: true } => Some(format!("{number} is {reason}")),
                StartState::Blocked { .. } | StartState::Queued | StartState::Ready => None,
            };
            results.push(Submitted::Created { id: task.id, number, state: start.state(), warning });
        }
        cfq_link::failpoint::hit("scheduler.submit.before_commit");
        tx.commit().await.doing("writing tasks")?;
        cfq_link::failpoint::hit("scheduler.submit.after_commit");
        Ok(Some(results))
    }
}

/// The task that a reference names. The API has replaced names within a batch by the ids of the new tasks.
fn existing(task: &TaskRef) -> Option<TaskKey> {
    match task {
        TaskRef::Key(key) => Some(*key),
        TaskRef::Name(_) => None,
    }
}

/// Locks the task that a new task retries, so that no dependent is added to it meanwhile.
async fn lock_retried(connection: &mut PgConnection, key: TaskKey) -> Result<Result<TaskId, Submitted>, StoreError> {
    let (id, number) = match key {
        TaskKey::Id(id) => (Some(id.0), None),
        TaskKey::Number(number) => (None, Some(number.0)),
    };
    let row = sqlx::query!(
        "select id, number, state from tasks where (id = $1 or number = $2) and state <> 'call' for no key update",
        id,
        number
    )
    .fetch_optional(connection)
    .await
    .doing("locking the task to retry")?;
    let Some(row) = row else { return Ok(Err(Submitted::UnknownTask { field: "retry_of", key })) };
    let state: TaskState = parse("task state", &row.state)?;
    Ok(match state {
        TaskState::Failed | TaskState::Cancelled => Ok(TaskId(row.id)),
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running
        | TaskState::WaitingOnHuman
        | TaskState::Paused
        | TaskState::Escalated
        | TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed => Err(Submitted::NotRetriable { number: TaskNumber(row.number), state }),
    })
}

async fn is_past_or_absent(connection: &mut PgConnection, time_s: Option<i64>) -> Result<bool, StoreError> {
    let Some(time_s) = time_s else { return Ok(true) };
    sqlx::query_scalar!(r#"select to_timestamp($1::float8) <= now() as "past!""#, time_s as f64)
        .fetch_one(connection)
        .await
        .doing("comparing a time with the clock")
}

/// Why a task may not start, for users; empty if it may.
pub(super) fn waiting_reason(start: &StartState, run_at_s: Option<i64>) -> String {
    match (start, run_at_s.map(jiff::Timestamp::from_second)) {
        (StartState::Queued, Some(Ok(run_at))) => format!("starts at {run_at}"),
        (StartState::Queued, _) => "starts later".to_owned(),
        (StartState::Blocked { .. } | StartState::Ready, _) => start.reason().to_owned(),
    }
}

/// The schedule that creates a task, and the instant for which it does, in seconds since 1970.
pub(super) struct Firing {
    pub schedule: uuid::Uuid,
    pub scheduled_s: i64,
}

/// Inserts a task and its first event. `None` if the idempotency key, or the instant of the schedule, has a task.
pub(super) async fn insert_task(
    connection: &mut PgConnection,
    task: &NewTask,
    start: &StartState,
    retry_of: Option<TaskId>,
    firing: Option<Firing>,
) -> Result<Option<TaskNumber>, StoreError> {
    let number = sqlx::query_scalar!(
        r#"with new as (
               select to_timestamp($7::float8) as deadline, to_timestamp($13::float8) as run_at,
                      greatest(now(), to_timestamp($13::float8)) + $6::smallint * interval '10 minutes' as key
           )
           insert into tasks (id, idempotency_key, body_hash, spec, title, priority, deadline, state, threshold,
                              max_iterations, next_event, order_key, reason, retry_of, run_at, schedule,
                              scheduled_at, agents_without_model, api_token)
           select $1, $2, $3, $4, $5, $6, deadline, $8, $9, $10, 1,
                  greatest(key - interval '10 minutes', least(key, deadline - interval '10 minutes')), $11, $12, run_at, $14,
                  to_timestamp($15::float8), $16, $17
           from new on conflict do nothing returning number"#,
        task.id.0,
        task.key.as_deref(),
        &task.body_hash,
        AsJson(&task.spec) as _,
        &task.title,
        task.spec.priority.as_i16(),
        task.spec.deadline.map(|s| s as f64),
        start.state().as_str(),
        task.threshold,
        i32::try_from(task.max_iterations).unwrap_or(i32::MAX),
        pg_text(&waiting_reason(start, task.spec.run_at)),
        retry_of.map(|id| id.0),
        task.spec.run_at.map(|s| s as f64),
        firing.as_ref().map(|firing| firing.schedule),
        firing.as_ref().map(|firing| firing.scheduled_s as f64),
        &agent_names(&task.agents_without_model) as &[&str],
        task.token.0
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("writing a task")?;
    let Some(number) = number else { return Ok(None) };
    insert_labels(connection, task.id, TaskNumber(number), &task.spec.labels).await?;
    sqlx::query!(
        "insert into events (task, number, task_seq, body) values ($1, $2, 1, $3)",
        task.id.0,
        number,
        AsJson(&EventBody::TaskSubmitted) as _
    )
    .execute(connection)
    .await
    .doing("appending an event")?;
    Ok(Some(TaskNumber(number)))
}
