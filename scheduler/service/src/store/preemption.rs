//! Preemption of tasks: the leader names a victim in its row, and the victim's next step releases it. The core decides
//! (`cfq_scheduler_core::preemptions`).

use cfq_proto::ids::{ApiTokenId, TaskId, TaskNumber};
use cfq_proto::task::TaskState;
use cfq_scheduler_core::{ApiTokenQueue, Preemption, RunningTask};
use sqlx::PgConnection;

use super::columns::parse;
use super::error::Doing;
use super::leader::{Leadership, lock_leader_row};
use super::tasks::{TaskRow, move_task};
use super::token_queues::{order, priority, token_queues};
use super::{Store, StoreError};

/// Maximum number of tasks of one token that preempt at the same time. So many ready tasks are read beyond the free slots.
const MAX_PREEMPTING_TASKS: i64 = 64;

/// The tasks that the decision compares.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskQueue {
    /// Number of free slots of the live runners. A runner of an earlier version, which does not report its slots, counts
    /// as full.
    pub free_slots: usize,
    /// The first ready tasks of each token; empty if no task of P0 is ready.
    pub queues: Vec<ApiTokenQueue>,
    pub running: Vec<RunningTask>,
}

impl Store {
    /// Reads what the decision about preemptions needs. The rows may change at once: each name is a compare-and-set.
    pub async fn task_queue(&self) -> Result<TaskQueue, StoreError> {
        let free_slots = sqlx::query_scalar!(
            r#"select coalesce(sum(greatest(0, coalesce(slots, 0)
                      - (select count(*) from tasks where tasks.runner = runners.id and lease is not null))), 0)::bigint as "free!"
               from runners
               where last_seen between now() - $1::float8 * interval '1 millisecond'
                                   and now() + $1::float8 * interval '1 millisecond'"#,
            self.lease_ttl_ms()
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting free slots")?;
        // The queues matter only if a task of P0 is ready.
        let is_urgent = sqlx::query_scalar!(
            r#"select exists (select from tasks where state = 'ready' and waits_for is null and priority = 0) as "urgent!""#
        )
        .fetch_one(&self.pool)
        .await
        .doing("finding ready tasks of P0")?;
        let skipped = self.shared.row_backoff.rows();
        let queues = match is_urgent {
            true => {
                let (depth, others) = (free_slots.saturating_add(MAX_PREEMPTING_TASKS), free_slots.saturating_add(1));
                token_queues(&self.pool, &skipped, depth, others).await?
            }
            false => Vec::new(),
        };
        let running = sqlx::query!(
            r#"select id, api_token, number, priority, loop_state, preempted_by,
                      case when $2 then
                          (select (extract(epoch from g.granted_at) * 1000000)::bigint from tasks g
                           where g.api_token = tasks.api_token and g.granted_at is not null
                           order by g.granted_at desc limit 1) end as token_granted_us,
                      (extract(epoch from order_key) * 1000000)::bigint as "key_us!"
               from tasks where state = 'running' and id <> all($1)"#,
            &skipped,
            is_urgent
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the running tasks")?;
        let running = running.into_iter().map(|r| {
            Ok(RunningTask {
                id: TaskId(r.id),
                token: ApiTokenId(r.api_token),
                token_granted_us: r.token_granted_us,
                priority: priority(r.priority)?,
                order: order(r.key_us, r.number),
                loop_state: parse("loop state", &r.loop_state)?,
                preempted_by: r.preempted_by.map(TaskId),
            })
        });
        Ok(TaskQueue {
            free_slots: usize::try_from(free_slots).unwrap_or(0),
            queues,
            running: running.collect::<Result<_, StoreError>>()?,
        })
    }

    /// Names a victim, or withdraws its name. False if the victim or the waiting task has changed since they were read.
    pub async fn set_preemption(&self, leadership: Leadership, change: &Preemption) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let done = sqlx::query!(
            r#"update tasks set preempted_by = $2
               where id = $1 and state = 'running' and preempted_by is not distinct from $3
                 and ($2::uuid is null
                      or exists (select from tasks by where by.id = $2 and by.state = 'ready' and by.waits_for is null))"#,
            change.victim.0,
            change.by.map(|task| task.0),
            change.before.map(|task| task.0)
        )
        .execute(&mut *tx)
        .await
        .doing("naming a task to preempt")?;
        tx.commit().await.doing("naming a task to preempt")?;
        Ok(done.rows_affected() == 1)
    }
}

/// Releases a running, locked task with the step that was just written, if a ready task has named it as its victim. This
/// counts as no loss, and the task keeps its place in the order.
pub(super) async fn release_if_preempted(connection: &mut PgConnection, task: &TaskRow) -> Result<bool, StoreError> {
    let by = sqlx::query_scalar!(
        r#"select by.number from tasks victim join tasks by on by.id = victim.preempted_by
           where victim.id = $1 and by.state = 'ready' and by.waits_for is null"#,
        task.id.0
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("finding the task that preempts another")?;
    let Some(by) = by.map(TaskNumber) else { return Ok(false) };
    let reason = format!("preempted by {by} (P0), continues when a runner slot is free");
    move_task(connection, task, TaskState::Ready, &reason).await
}
