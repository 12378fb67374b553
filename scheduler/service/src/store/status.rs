//! The state of the whole cluster, for users.

use std::collections::BTreeMap;

use cfq_proto::http::{ClusterStatus, QueuedJob};
use cfq_proto::ids::TaskNumber;
use cfq_proto::job::JobState;

use super::columns::parse;
use super::error::Doing;
use super::job_list::WAITS_FOR_CAPACITY;
use super::{Store, StoreError};

/// Time after the start of the scheduler in which nodes and runners register and are not missed yet, in s.
const REGISTRATION_S: f64 = 15.0;

impl Store {
    /// The state of the cluster. `uptime_s` and `not_ready` are those of the process that answers; if it is ready,
    /// `not_ready` names a missing runner or node.
    pub async fn cluster_status(&self, uptime_s: f64, not_ready: Option<&str>) -> Result<ClusterStatus, StoreError> {
        let mut status = ClusterStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s,
            not_ready: None,
            tasks: BTreeMap::new(),
            unacknowledged_failures: count(self.count_unacknowledged_failures().await?),
            jobs: self.jobs_of_open_tasks().await?,
            oldest_queued_job: self.oldest_queued_job().await?,
            nodes_alive: 0,
            nodes_unreachable: Vec::new(),
            runners_alive: self.count_live_runners().await?,
        };
        for (state, tasks) in self.open_tasks_by_state().await? {
            status.tasks.insert(parse("task state", &state)?, count(tasks));
        }
        let nodes = sqlx::query!(
            r#"select id, last_seen between now() - $1::float8 * interval '1 millisecond'
                                        and now() + $1::float8 * interval '1 millisecond' as "alive!"
               from nodes
               where not exists (select from machines where name = nodes.id and revoked_at is not null)
               order by id"#,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("counting nodes")?;
        for node in nodes {
            if node.alive {
                status.nodes_alive += 1;
            } else {
                status.nodes_unreachable.push(parse("node", &node.id)?);
            }
        }
        let missing = match (status.runners_alive, status.nodes_alive) {
            _ if uptime_s < REGISTRATION_S => None,
            (0, _) => Some("no runner sends heartbeats, so no task is executed: see `cfq logs --process runner`"),
            (_, 0) => Some("no node sends heartbeats, so no model is called: see `cfq logs --process node`"),
            _ => None,
        };
        status.not_ready = not_ready.or(missing).map(str::to_owned);
        Ok(status)
    }

    /// Number of jobs that have not ended, and of dead letters, by state. The dead jobs of ended tasks
    /// and the queued jobs of paused tasks are left out.
    pub(super) async fn jobs_of_open_tasks(&self) -> Result<BTreeMap<JobState, u64>, StoreError> {
        let mut jobs = BTreeMap::new();
        for (state, n) in self.open_jobs_by_state().await? {
            jobs.insert(parse("job state", &state)?, count(n));
        }
        let row = sqlx::query!(
            r#"select (select count(*) from jobs j join tasks t on t.id = j.task
                       where j.state = 'dead' and t.state not in ('merged', 'accepted', 'reviewed', 'failed', 'cancelled', 'call')) as "dead!",
                      (select count(*) from tasks t join jobs j on j.task = t.id
                       where t.state = 'paused' and j.state = 'queued') as "paused!""#
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting jobs")?;
        jobs.insert(JobState::Dead, count(row.dead));
        let queued = jobs.get(&JobState::Queued).copied().unwrap_or(0);
        jobs.insert(JobState::Queued, queued.saturating_sub(count(row.paused)));
        jobs.retain(|_, n| *n > 0);
        Ok(jobs)
    }

    /// The first queued job of the tasks that are not paused. The ids of jobs are in the order of their creation.
    pub(super) async fn oldest_queued_job(&self) -> Result<Option<QueuedJob>, StoreError> {
        let oldest = sqlx::query!(
            r#"select t.number, extract(epoch from now() - j.created_at)::float8 as "age!",
                      coalesce(nullif(j.placement, ''), $1) as "reason!"
               from jobs j join tasks t on t.id = j.task
               where j.state = 'queued' and t.state in ('ready', 'running', 'call') order by j.id limit 1"#,
            WAITS_FOR_CAPACITY
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the oldest queued job")?;
        Ok(oldest.map(|row| QueuedJob { task: TaskNumber(row.number), age_s: row.age.max(0.0), reason: row.reason }))
    }

    async fn count_live_runners(&self) -> Result<u32, StoreError> {
        let alive = sqlx::query_scalar!(
            r#"select count(*) as "alive!" from runners
               where last_seen between now() - $1::float8 * interval '1 millisecond'
                                   and now() + $1::float8 * interval '1 millisecond'"#,
            self.lease_ttl_ms()
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting runners")?;
        Ok(u32::try_from(alive).unwrap_or(u32::MAX))
    }
}

fn count(rows: i64) -> u64 {
    u64::try_from(rows).unwrap_or(0)
}
