//! Edges between tasks. A submit locks the predecessors before it reads their states, so a predecessor that ends at the
//! same moment is either seen as ended or marks the new edge. An end only marks edges: it neither waits for the locks of
//! dependents nor reads them, however many there are. The leader's sweep then computes their states.

use std::collections::BTreeMap;

use cfq_proto::http::LinkedTask;
use cfq_proto::ids::{TaskId, TaskKey, TaskNumber};
use cfq_proto::task::TaskState;
use cfq_scheduler_core::Predecessor;
use sqlx::PgConnection;

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Maximum number of dependents that a view of a task lists.
const MAX_LISTED_DEPENDENTS: i64 = 100;

/// Tasks that were locked by [`lock_predecessors`], and those that were inserted since.
#[derive(Debug, Default)]
pub(super) struct KnownTasks {
    by_id: BTreeMap<TaskId, Predecessor>,
    ids: BTreeMap<TaskNumber, TaskId>,
}

impl KnownTasks {
    /// Adds a task.
    pub fn insert(&mut self, id: TaskId, task: Predecessor) {
        self.by_id.insert(id, task);
        self.ids.insert(task.number, id);
    }

    /// The task that `key` names; `None` if it does not exist.
    pub fn find(&self, key: TaskKey) -> Option<(TaskId, Predecessor)> {
        let id = match key {
            TaskKey::Id(id) => id,
            TaskKey::Number(number) => *self.ids.get(&number)?,
        };
        Some((id, *self.by_id.get(&id)?))
    }
}

/// Locks these tasks `for share` until the transaction ends, in the order of their numbers, so that none of them ends
/// meanwhile. Waits until a transaction that ends one of them has committed.
pub(super) async fn lock_predecessors(
    connection: &mut PgConnection,
    keys: &[TaskKey],
) -> Result<KnownTasks, StoreError> {
    let (mut ids, mut numbers) = (Vec::new(), Vec::new());
    for key in keys {
        match key {
            TaskKey::Id(id) => ids.push(id.0),
            TaskKey::Number(number) => numbers.push(number.0),
        }
    }
    // The states are those of the locked rows: Postgres reads a row again after it has waited for its lock.
    let rows = sqlx::query!(
        r#"select id, number, state from tasks where (id = any($1) or number = any($2)) and state <> 'call'
           order by number for share"#,
        &ids,
        &numbers
    )
    .fetch_all(connection)
    .await
    .doing("locking the predecessors of a task")?;
    let mut known = KnownTasks::default();
    for row in rows {
        let state = parse("task state", &row.state)?;
        known.insert(TaskId(row.id), Predecessor { number: TaskNumber(row.number), state });
    }
    Ok(known)
}

/// The newest retry of each of these tasks that failed or was cancelled and was retried. The retries are locked like
/// predecessors and added to `known`.
pub(super) async fn lock_newest_retries(
    connection: &mut PgConnection,
    known: &mut KnownTasks,
) -> Result<BTreeMap<TaskId, TaskId>, StoreError> {
    let failed = |task: &Predecessor| matches!(task.state, TaskState::Failed | TaskState::Cancelled);
    let ids: Vec<uuid::Uuid> = known.by_id.iter().filter(|(_, task)| failed(task)).map(|(id, _)| id.0).collect();
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = sqlx::query!(
        r#"with recursive chain (first, id) as (
               select id, id from tasks where id = any($1)
               union
               select chain.first, r.id from chain join tasks r on r.retry_of = chain.id
           )
           select first as "first!", id as "id!" from chain
           where first <> id and not exists (select from tasks r where r.retry_of = chain.id)"#,
        &ids
    )
    .fetch_all(&mut *connection)
    .await
    .doing("finding the retries of predecessors")?;
    let retries: BTreeMap<TaskId, TaskId> = rows.into_iter().map(|row| (TaskId(row.first), TaskId(row.id))).collect();
    let keys: Vec<TaskKey> = retries.values().map(|id| TaskKey::Id(*id)).collect();
    let locked = lock_predecessors(connection, &keys).await?;
    for (id, task) in locked.by_id {
        known.insert(id, task);
    }
    Ok(retries)
}

/// Inserts the edges of a new task.
pub(super) async fn insert_edges(
    connection: &mut PgConnection,
    task: TaskId,
    predecessors: &[TaskId],
) -> Result<(), StoreError> {
    let predecessors: Vec<uuid::Uuid> = predecessors.iter().map(|id| id.0).collect();
    sqlx::query!(
        "insert into task_dependencies (task, predecessor) select $1, predecessor from unnest($2::uuid[]) as predecessor",
        task.0,
        &predecessors
    )
    .execute(connection)
    .await
    .doing("writing the predecessors of a task")?;
    Ok(())
}

/// Lets no other transaction create retries until this one ends. Two of them could each add one half of a cycle, or wait
/// for each other's locks, because a retry locks the retried task in another way than predecessors.
pub(super) async fn lock_retries(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query!("select pg_advisory_xact_lock(hashtextextended('retry with predecessors', 0))")
        .execute(connection)
        .await
        .doing("waiting for other retries")?;
    Ok(())
}

/// The first of these tasks that waits for `retried`, directly or indirectly. A retry of it must not wait for that task,
/// because the task will wait for the retry. The caller has called [`lock_retries`].
pub(super) async fn first_waiting_for(
    connection: &mut PgConnection,
    retried: TaskId,
    tasks: &[TaskId],
) -> Result<Option<TaskNumber>, StoreError> {
    if tasks.is_empty() {
        return Ok(None);
    }
    let tasks: Vec<uuid::Uuid> = tasks.iter().map(|id| id.0).collect();
    let number = sqlx::query_scalar!(
        r#"with recursive waiting (id) as (
               select $1::uuid
               union
               select d.task from task_dependencies d join waiting on d.predecessor = waiting.id
           )
           select number from tasks where id = any($2) and id in (select id from waiting) order by number limit 1"#,
        retried.0,
        &tasks
    )
    .fetch_optional(connection)
    .await
    .doing("comparing the predecessors of a retry")?;
    Ok(number.map(TaskNumber))
}

/// Lets the open tasks that wait for `retried` wait for `retry` instead.
pub(super) async fn take_over_edges(
    connection: &mut PgConnection,
    retried: TaskId,
    retry: TaskId,
) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update task_dependencies set predecessor = $2, due = true
           where predecessor = $1 and task <> $2
             and exists (select from tasks where tasks.id = task_dependencies.task and tasks.ended_at is null)"#,
        retried.0,
        retry.0
    )
    .execute(connection)
    .await
    .doing("moving the dependents of a task to its retry")?;
    Ok(())
}

/// Marks the edges to the dependents of a task that ends in this transaction. Marked edges are written too, so that a
/// sweep which clears a mark waits for this transaction.
pub(super) async fn mark_dependents(connection: &mut PgConnection, ended: TaskId) -> Result<(), StoreError> {
    sqlx::query!("update task_dependencies set due = true where predecessor = $1", ended.0)
        .execute(connection)
        .await
        .doing("marking the dependents of a task")?;
    Ok(())
}

/// Predecessors of a task, in the order of their numbers.
pub(super) async fn predecessors(connection: &mut PgConnection, task: TaskId) -> Result<Vec<Predecessor>, StoreError> {
    let rows = sqlx::query!(
        r#"select p.number, p.state from task_dependencies d join tasks p on p.id = d.predecessor
           where d.task = $1 order by p.number"#,
        task.0
    )
    .fetch_all(connection)
    .await
    .doing("reading the predecessors of a task")?;
    rows.into_iter()
        .map(|row| Ok(Predecessor { number: TaskNumber(row.number), state: parse("task state", &row.state)? }))
        .collect()
}

impl Store {
    /// Predecessors of a task, and the open tasks that wait for it directly.
    pub(super) async fn linked_tasks(&self, task: TaskId) -> Result<(Vec<LinkedTask>, Vec<LinkedTask>), StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let before = predecessors(&mut connection, task).await?;
        let before = before.into_iter().map(|task| LinkedTask { number: task.number, state: task.state }).collect();
        let rows = sqlx::query!(
            r#"select t.number, t.state from task_dependencies d join tasks t on t.id = d.task
               where d.predecessor = $1 and t.ended_at is null order by t.number limit $2"#,
            task.0,
            MAX_LISTED_DEPENDENTS
        )
        .fetch_all(&mut *connection)
        .await
        .doing("reading the dependents of a task")?;
        let mut dependents = Vec::new();
        for row in rows {
            let state: TaskState = parse("task state", &row.state)?;
            dependents.push(LinkedTask { number: TaskNumber(row.number), state });
        }
        Ok((before, dependents))
    }
}
