//! Nodes as shown to users, and cluster-wide numbers for the metrics page.

use std::collections::BTreeMap;

use cfq_proto::http::{ClusterStatus, NodeView, QueuedJob};
use cfq_proto::ids::{BootId, TaskNumber};
use cfq_proto::node::{Device, Ledger, ModelState};
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Numbers for the metrics page.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    /// Number of tasks that have not ended, by state.
    pub tasks: BTreeMap<String, i64>,
    /// Number of jobs that have not ended, and of dead jobs, by state.
    pub jobs: BTreeMap<String, i64>,
    /// Name of each node, and the time since its last heartbeat, in s.
    pub nodes: Vec<(String, f64)>,
    /// Devices of the live nodes, each with the name of its node.
    pub devices: Vec<(String, Device)>,
    /// Models of the live nodes, each with the name of its node.
    pub models: Vec<(String, ModelState)>,
    /// Age of the oldest queued job, in s; zero if none is queued.
    pub oldest_queued_job_s: f64,
    /// Number of dead tuples in the `jobs` table.
    pub dead_job_tuples: i64,
    pub open_questions: i64,
}

impl Store {
    /// All nodes, for the API.
    pub async fn node_views(&self) -> Result<Vec<NodeView>, StoreError> {
        let rows = sqlx::query!(
            r#"select n.id, n.boot, n.version, n.devices as "devices: Json<Vec<Device>>", n.ledger as "ledger: Json<Ledger>",
                      extract(epoch from n.last_seen)::float8 as "last_seen!",
                      n.last_seen + $1::float8 * interval '1 millisecond' >= now() as "alive!",
                      (select count(*) from jobs j where j.node = n.id and j.state = 'running') as "running!"
               from nodes n order by n.id"#,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the nodes")?;
        rows.into_iter()
            .map(|r| {
                Ok(NodeView {
                    id: parse("node", &r.id)?,
                    boot: BootId(r.boot),
                    version: r.version,
                    alive: r.alive,
                    devices: r.devices.0,
                    ledger: r.ledger.0,
                    last_seen: r.last_seen,
                    running: u32::try_from(r.running).unwrap_or(u32::MAX),
                })
            })
            .collect()
    }

    /// Reads the numbers for the metrics page.
    pub async fn gauges(&self) -> Result<Gauges, StoreError> {
        let mut gauges = Gauges::default();
        gauges.tasks = self.open_tasks_by_state().await?;
        gauges.jobs = self.open_jobs_by_state().await?;
        let nodes = sqlx::query!(
            r#"select id, extract(epoch from now() - last_seen)::float8 as "age!" from nodes order by id"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("counting nodes")?;
        gauges.nodes.extend(nodes.into_iter().map(|r| (r.id, r.age)));
        let alive = self.node_views().await?.into_iter().filter(|node| node.alive);
        for NodeView { id, devices, ledger, .. } in alive {
            gauges.devices.extend(devices.into_iter().map(|device| (id.to_string(), device)));
            gauges.models.extend(ledger.models.into_iter().map(|model| (id.to_string(), model)));
        }
        let rest = sqlx::query!(
            r#"select coalesce(extract(epoch from now() - min(created_at))::float8, 0) as "oldest!",
                      coalesce((select n_dead_tup from pg_stat_user_tables where relname = 'jobs'), 0) as "dead!",
                      (select count(*) from questions where state = 'open') as "questions!"
               from jobs where state = 'queued'"#
        )
        .fetch_one(&self.pool)
        .await
        .doing("reading gauges")?;
        (gauges.oldest_queued_job_s, gauges.dead_job_tuples, gauges.open_questions) =
            (rest.oldest, rest.dead, rest.questions);
        Ok(gauges)
    }

    /// Number of tasks that have not ended, by state.
    async fn open_tasks_by_state(&self) -> Result<BTreeMap<String, i64>, StoreError> {
        let tasks = sqlx::query!(
            r#"select state, count(*) as "count!" from tasks
               where state in ('queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated')
               group by state"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("counting tasks")?;
        Ok(tasks.into_iter().map(|row| (row.state, row.count)).collect())
    }

    /// Number of jobs that have not ended, and of dead ones, by state.
    async fn open_jobs_by_state(&self) -> Result<BTreeMap<String, i64>, StoreError> {
        let jobs = sqlx::query!(
            r#"select state, count(*) as "count!" from jobs where state in ('queued', 'placed', 'running', 'dead')
               group by state"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("counting jobs")?;
        Ok(jobs.into_iter().map(|row| (row.state, row.count)).collect())
    }

    /// The state of the cluster. `uptime_s` and `not_ready` are those of the process that answers.
    pub async fn cluster_status(&self, uptime_s: f64, not_ready: Option<String>) -> Result<ClusterStatus, StoreError> {
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        let mut status = ClusterStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s,
            not_ready,
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            oldest_queued_job: None,
            nodes_alive: 0,
            nodes_unreachable: Vec::new(),
        };
        for (state, tasks) in self.open_tasks_by_state().await? {
            status.tasks.insert(parse("task state", &state)?, count(tasks));
        }
        for (state, jobs) in self.open_jobs_by_state().await? {
            status.jobs.insert(parse("job state", &state)?, count(jobs));
        }
        // The ids of jobs are in the order of their creation.
        let oldest = sqlx::query!(
            r#"select t.number, extract(epoch from now() - j.created_at)::float8 as "age!",
                      case j.placement when '' then 'waits for free capacity on a node' else j.placement end as "reason!"
               from jobs j join tasks t on t.id = j.task
               where j.state = 'queued' and t.state in ('ready', 'running') order by j.id limit 1"#
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the oldest queued job")?;
        status.oldest_queued_job =
            oldest.map(|row| QueuedJob { task: TaskNumber(row.number), age_s: row.age.max(0.0), reason: row.reason });
        let nodes = sqlx::query!(
            r#"select id, last_seen + $1::float8 * interval '1 millisecond' >= now() as "alive!" from nodes order by id"#,
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
        Ok(status)
    }
}
