//! Raises the priority of tasks for which several others wait. Only the predecessors of new edges are counted, and the
//! walk from an edge to its predecessors ends at tasks that were raised before: their predecessors were, too. So the cost
//! of a sweep depends on the number of new edges, not on that of all tasks.

use cfq_proto::event::EventBody;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::task::Priority;
use cfq_scheduler_core::{BOTTLENECK_DEPENDENTS, bottleneck_priority};

use super::error::Doing;
use super::events::append;
use super::hints::{Hint, LeaderHint};
use super::leader::{Leadership, lock_leader_row};
use super::tasks::lock_task;
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

/// Maximum number of tasks that one sweep raises.
const MAX_RAISED_PER_SWEEP: i64 = 50;

impl Store {
    /// Raises the open tasks for which at least [`BOTTLENECK_DEPENDENTS`] tasks wait, among those for which one of
    /// `dependents` waits.
    pub(super) async fn raise_bottlenecks(
        &self,
        leadership: Leadership,
        dependents: &[uuid::Uuid],
    ) -> Result<Vec<Hint>, StoreError> {
        if dependents.is_empty() {
            return Ok(vec![]);
        }
        let found = sqlx::query_scalar!(
            r#"with recursive ancestors (id) as (
                   select d.predecessor from task_dependencies d
                   where d.task = any($1) and (select t.ended_at is null from tasks t where t.id = d.task)
                   union
                   select d.predecessor from ancestors a join task_dependencies d on d.task = a.id
                   where (select t.ended_at is null and not t.is_bottleneck from tasks t where t.id = a.id)
               )
               select t.id from ancestors a cross join lateral (
                   select id, number from tasks
                   where id = a.id and ended_at is null and not is_bottleneck and id <> all($3)
               ) as t cross join lateral (
                   select count(*) as open from (
                       with recursive waiting (id) as (
                           select d.task from task_dependencies d
                           where d.predecessor = a.id and (select o.ended_at is null from tasks o where o.id = d.task)
                           union
                           select d.task from waiting w join task_dependencies d on d.predecessor = w.id
                           where (select o.ended_at is null from tasks o where o.id = d.task)
                       )
                       select id from waiting limit $2
                   ) as first
               ) as counted
               where counted.open >= $2
               order by t.number limit $4"#,
            dependents,
            BOTTLENECK_DEPENDENTS as i64,
            &self.shared.row_backoff.rows(),
            MAX_RAISED_PER_SWEEP
        )
        .fetch_all(&self.pool);
        let found = limited("finding bottlenecks", async { found.await.doing("finding bottlenecks") }).await?;
        let mut hints = Vec::new();
        for task in found {
            let raised = limited("raising a bottleneck", self.raise_bottleneck(leadership, TaskId(task))).await;
            hints.extend(self.skip_faulty_row("task", task, raised)?);
        }
        Ok(hints)
    }

    async fn raise_bottleneck(&self, leadership: Leadership, task: TaskId) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let Some(task) = lock_task(&mut tx, task).await?.filter(|task| !task.state.is_terminal()) else {
            return roll_back(tx, vec![]).await;
        };
        let before = sqlx::query_scalar!("select priority from tasks where id = $1 and not is_bottleneck", task.id.0)
            .fetch_optional(&mut *tx)
            .await
            .doing("raising a bottleneck")?;
        let Some(before) = before else { return roll_back(tx, vec![]).await };
        let from = Priority::try_from(before)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: before.to_string() })?;
        let to = bottleneck_priority(from);
        sqlx::query!(
            r#"update tasks set is_bottleneck = true, priority = $2,
                      order_key = greatest(base + ($2::smallint - 1) * interval '10 minutes',
                                           least(base + $2::smallint * interval '10 minutes',
                                                 deadline - interval '10 minutes'))
               from (select greatest(created_at, run_at) as base from tasks where id = $1) as created
               where id = $1"#,
            task.id.0,
            to.as_i16()
        )
        .execute(&mut *tx)
        .await
        .doing("raising a bottleneck")?;
        let jobs = sqlx::query_scalar!(
            "update jobs set priority = $2 where task = $1 and state = 'queued' and priority <> $2 returning id",
            task.id.0,
            to.as_i16()
        )
        .fetch_all(&mut *tx)
        .await
        .doing("raising the jobs of a bottleneck")?;
        let reason = format!("at least {BOTTLENECK_DEPENDENTS} tasks wait for this one");
        append(&mut tx, task.id, &EventBody::PriorityChanged { from, to, reason }).await?;
        tx.commit().await.doing("raising a bottleneck")?;
        tracing::info!(task = %task.number, %from, %to, "bottleneck raised");
        Ok(jobs.into_iter().map(|job| Hint::Leader(LeaderHint::Job(JobId(job)))).collect())
    }
}
