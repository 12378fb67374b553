//! Registration of nodes, and their rows as the planner reads them.

use std::collections::BTreeSet;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::JobState;
use cfq_proto::messages::NodeRegistration;
use cfq_proto::node::Ledger;
use cfq_scheduler_core::{self as core, UnreportedEnd};
use sqlx::types::Json;

use super::columns::{AsJson, parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, LeaderHint};
use super::tasks::lock_task;
use super::{Store, StoreError, roll_back};

/// Result of a node's registration.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisteredNode {
    /// Whether the node's boot id differs from the last registered one.
    pub new_boot: bool,
    pub hints: Vec<Hint>,
}

/// How the earlier boot of a node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeStop {
    /// The node was draining.
    Clean,
    /// The machine was restarted, so no job is suspected.
    MachineRestarted,
    /// The process ended without draining, for example because it crashed.
    Unexpected,
}

/// Whether both boots of the machine are known and differ.
pub(super) fn is_other_machine_boot(before: &Option<String>, now: &Option<String>) -> bool {
    before.as_ref().zip(now.as_ref()).is_some_and(|(before, now)| before != now)
}

impl Store {
    /// Writes the node's row. Jobs that earlier boots of the node hold are released at once.
    ///
    /// `None` if a later boot of the node is alive: this registration arrived late, or two processes use the same name.
    /// Boot ids are ordered by start time. A clock that was set back breaks this order, so a later boot prevents a
    /// registration only while it sends heartbeats.
    pub async fn register_node(&self, registration: &NodeRegistration) -> Result<Option<RegisteredNode>, StoreError> {
        let node = &registration.node;
        let before = sqlx::query!(
            r#"select boot, machine_boot, coalesce((ledger->>'draining')::boolean, false) as "draining!"
               from nodes where id = $1"#,
            node.as_str()
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding a node")?;
        let written = sqlx::query!(
            r#"insert into nodes (id, boot, version, devices, ledger, machine_boot) values ($1, $2, $3, $4, $5, $7)
               on conflict (id) do update set boot = excluded.boot, version = excluded.version, devices = excluded.devices,
                   ledger = excluded.ledger, machine_boot = excluded.machine_boot, last_seen = now(), exclusions = '{}'
               where nodes.boot <= excluded.boot
                  or nodes.last_seen not between now() - $6::float8 * interval '1 millisecond'
                                             and now() + $6::float8 * interval '1 millisecond'"#,
            node.as_str(),
            registration.boot.0,
            pg_text(&registration.version),
            AsJson(&registration.devices) as _,
            AsJson(&registration.ledger) as _,
            self.lease_ttl_ms(),
            registration.machine_boot.as_deref().map(pg_text)
        )
        .execute(&self.pool)
        .await
        .doing("writing a node")?;
        if written.rows_affected() == 0 {
            return Ok(None);
        }
        let stop = match &before {
            Some(before) if before.draining => NodeStop::Clean,
            Some(before) if is_other_machine_boot(&before.machine_boot, &registration.machine_boot) => {
                self.withdraw_suspicions_of_boot(BootId(before.boot)).await?;
                NodeStop::MachineRestarted
            }
            Some(_) | None => NodeStop::Unexpected,
        };
        let mut hints = self.release_jobs_of_earlier_boot(node, registration.boot, stop).await?;
        hints.push(Hint::Leader(LeaderHint::Node(node.clone())));
        Ok(Some(RegisteredNode { new_boot: before.map(|before| before.boot) != Some(registration.boot.0), hints }))
    }

    async fn release_jobs_of_earlier_boot(
        &self,
        node: &NodeId,
        boot: BootId,
        stop: NodeStop,
    ) -> Result<Vec<Hint>, StoreError> {
        let held = sqlx::query!(
            r#"select id, task, lease as "lease!" from jobs
               where node = $1 and node_boot <> $2 and state in ('placed', 'running')"#,
            node.as_str(),
            boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the jobs of an earlier boot")?;
        let mut hints = Vec::new();
        for row in held {
            let released =
                self.release_old_job(node, boot, stop, TaskId(row.task), JobId(row.id), LeaseId(row.lease)).await;
            hints.extend(self.skip_faulty_row("job", row.id, released)?);
        }
        Ok(hints)
    }

    async fn release_old_job(
        &self,
        node: &NodeId,
        boot: BootId,
        stop: NodeStop,
        task: TaskId,
        job: JobId,
        lease: LeaseId,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, vec![]).await };
        let state = sqlx::query_scalar!(
            "select state from jobs where id = $1 and lease = $2 and node_boot <> $3 for update",
            job.0,
            lease.0,
            boot.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let (end, reason) = match stop {
            NodeStop::Clean => (UnreportedEnd::Infrastructure, format!("{node} was restarted")),
            NodeStop::MachineRestarted => {
                (UnreportedEnd::Infrastructure, format!("the machine of {node} was restarted"))
            }
            NodeStop::Unexpected => (UnreportedEnd::NodeLost, format!("{node} stopped unexpectedly and was restarted")),
        };
        let hints = match state.map(|s| parse::<JobState>("job state", &s)).transpose()? {
            Some(JobState::Running) => self.end_lost_attempt(&mut tx, &task, job, end, &reason).await?,
            Some(JobState::Placed) => {
                let reason = format!("{reason} before it accepted the job");
                self.end_lost_attempt(&mut tx, &task, job, end, &reason).await?
            }
            Some(JobState::Queued | JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled)
            | None => return roll_back(tx, vec![]).await,
        };
        tx.commit().await.doing("releasing the jobs of an earlier boot")?;
        Ok(hints)
    }

    /// All nodes, for the planner. A row that cannot be read is omitted and logged; the node overwrites it with its
    /// next registration, or with the next heartbeat that reports a change.
    pub async fn core_nodes(&self) -> Result<Vec<core::Node>, StoreError> {
        self.read_core_nodes(None).await
    }

    /// Those of these nodes that are registered, as [`Self::core_nodes`] reads them.
    pub async fn core_nodes_of(&self, nodes: &BTreeSet<NodeId>) -> Result<Vec<core::Node>, StoreError> {
        let ids: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        self.read_core_nodes(Some(&ids)).await
    }

    async fn read_core_nodes(&self, ids: Option<&[String]>) -> Result<Vec<core::Node>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, boot, ledger as "ledger: Json<serde_json::Value>", (extract(epoch from last_seen) * 1000)::bigint as "seen_ms!",
                      exclusions as "exclusions: Json<serde_json::Value>"
               from nodes where $1::text[] is null or id = any($1)"#,
            ids as _
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the nodes")?;
        let mut nodes = Vec::new();
        for r in rows {
            let ledger = serde_json::from_value::<Ledger>(r.ledger.0);
            let (id, ledger) = match (r.id.parse::<NodeId>(), ledger) {
                (Ok(id), Ok(ledger)) => (id, ledger),
                (_, ledger) => {
                    tracing::error!(node = r.id, error = ?ledger.err(), "cannot read a node's row; it is ignored");
                    continue;
                }
            };
            // Unreadable exclusions are dropped. Exclusions only save requests: without them a node may be asked once
            // more and refuse again.
            let exclusions = serde_json::from_value(r.exclusions.0).unwrap_or_default();
            nodes.push(core::Node { id, boot: BootId(r.boot), ledger, seen_ms: r.seen_ms, exclusions });
        }
        Ok(nodes)
    }
}
