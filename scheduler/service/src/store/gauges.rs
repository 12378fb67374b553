//! Nodes as shown to users, and cluster-wide numbers for the metrics page.

use std::collections::BTreeMap;

use cfq_proto::http::NodeView;
use cfq_proto::ids::BootId;
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
    /// Number of jobs that have not ended, without the queued ones of paused tasks, and of dead letters of tasks that
    /// have not ended, by state.
    pub jobs: BTreeMap<String, i64>,
    /// Name of each node whose machine is not revoked, and the time since its last heartbeat, in s.
    pub nodes: Vec<(String, f64)>,
    /// Devices of the live nodes, each with the name of its node.
    pub devices: Vec<(String, Device)>,
    /// Models of the live nodes, each with the name of its node.
    pub models: Vec<(String, ModelState)>,
    /// Time since the creation of the oldest queued job of a task that is not paused, in s; zero if none is queued.
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
                      n.last_seen between now() - $1::float8 * interval '1 millisecond'
                                      and now() + $1::float8 * interval '1 millisecond' as "alive!",
                      n.cordoned_at is not null as "cordoned!",
                      (select count(*) from jobs j where j.node = n.id and j.state = 'running') as "running!",
                      (select count(*) from jobs j where j.node = n.id and j.state = 'placed') as "placed!"
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
                    cordoned: r.cordoned,
                    devices: r.devices.0,
                    ledger: r.ledger.0,
                    last_seen: r.last_seen,
                    running: u32::try_from(r.running).unwrap_or(u32::MAX),
                    placed: u32::try_from(r.placed).unwrap_or(u32::MAX),
                })
            })
            .collect()
    }

    /// Reads the numbers for the metrics page.
    pub async fn gauges(&self) -> Result<Gauges, StoreError> {
        let jobs = self.jobs_of_open_tasks().await?;
        let mut gauges = Gauges {
            tasks: self.open_tasks_by_state().await?,
            jobs: jobs.into_iter().map(|(state, n)| (state.to_string(), n as i64)).collect(),
            oldest_queued_job_s: self.oldest_queued_job().await?.map_or(0.0, |job| job.age_s),
            ..Gauges::default()
        };
        let nodes = sqlx::query!(
            r#"select id, extract(epoch from now() - last_seen)::float8 as "age!" from nodes
               where not exists (select from machines where name = nodes.id and revoked_at is not null)
               order by id"#
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
            r#"select coalesce((select n_dead_tup from pg_stat_user_tables where relname = 'jobs'), 0) as "dead!",
                      (select count(*) from questions where state = 'open') as "questions!""#
        )
        .fetch_one(&self.pool)
        .await
        .doing("reading gauges")?;
        (gauges.dead_job_tuples, gauges.open_questions) = (rest.dead, rest.questions);
        Ok(gauges)
    }

    /// Number of tasks that have not ended, by state.
    pub(super) async fn open_tasks_by_state(&self) -> Result<BTreeMap<String, i64>, StoreError> {
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
    pub(super) async fn open_jobs_by_state(&self) -> Result<BTreeMap<String, i64>, StoreError> {
        let jobs = sqlx::query!(
            r#"select state, count(*) as "count!" from jobs where state in ('queued', 'placed', 'running', 'dead')
               group by state"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("counting jobs")?;
        Ok(jobs.into_iter().map(|row| (row.state, row.count)).collect())
    }
}
