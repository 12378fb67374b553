//! Registration of nodes, and their rows as the planner reads them.

use std::collections::BTreeSet;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::JobState;
use cfq_proto::messages::NodeRegistration;
use cfq_proto::node::Ledger;
use cfq_scheduler_core::{self as core, UnreportedEnd};
use sqlx::types::Json;

use super::columns::{AsJson, parse, pg_text};
use super::earlier_boot::{BootEnd, EarlierBoot, IdInUse, NewBoot};
use super::error::Doing;
use super::hints::{Hint, LeaderHint};
use super::tasks::lock_task;
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

/// Result of a node's registration.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisteredNode {
    /// The boot that was registered before, if it is another one.
    pub former_boot: Option<BootId>,
    pub hints: Vec<Hint>,
}

/// A job that an earlier boot of its node holds.
struct OldJob {
    job: JobId,
    task: TaskId,
    lease: LeaseId,
    node: NodeId,
    end: BootEnd,
}

impl Store {
    /// Writes the node's row, unless the process of another boot may be alive. Then the jobs that earlier boots of the
    /// node hold are released; a repetition of the registration and the sweep release those that are left.
    pub async fn register_node(
        &self,
        registration: &NodeRegistration,
    ) -> Result<Result<RegisteredNode, IdInUse>, StoreError> {
        let former_boot = match self.write_node(registration).await? {
            Ok(former_boot) => former_boot,
            Err(in_use) => return Ok(Err(in_use)),
        };
        self.withdraw_suspicions_after_restart(&registration.node).await?;
        let mut hints = self.release_jobs_of_earlier_boots(Some(&registration.node)).await?;
        hints.push(Hint::Leader(LeaderHint::Node(registration.node.clone())));
        Ok(Ok(RegisteredNode { former_boot, hints }))
    }

    /// Writes the node's row, and how the boot before ended. Returns the boot before if it is another one.
    async fn write_node(&self, registration: &NodeRegistration) -> Result<Result<Option<BootId>, IdInUse>, StoreError> {
        let NodeRegistration { node, boot, version, devices, ledger, machine_boot, credentials_lock, .. } =
            registration;
        let machine_boot = machine_boot.as_deref().map(pg_text);
        let credentials_lock = credentials_lock.as_deref().map(pg_text);
        let mut tx = self.begin().await?;
        let inserted = sqlx::query!(
            r#"insert into nodes (id, boot, version, devices, ledger, machine_boot, credentials_lock, cordoned_at)
               values ($1, $2, $3, $4, $5, $6, $7,
                       (select revoked_at from machines where name = $1)) on conflict (id) do nothing"#,
            node.as_str(),
            boot.0,
            pg_text(version),
            AsJson(devices) as _,
            AsJson(ledger) as _,
            machine_boot,
            credentials_lock
        )
        .execute(&mut *tx)
        .await
        .doing("writing a node")?;
        if inserted.rows_affected() == 1 {
            tx.commit().await.doing("writing a node")?;
            return Ok(Ok(None));
        }
        // A time too far in the future was written before the database's clock was set back.
        let before = sqlx::query!(
            r#"select boot, machine_boot, credentials_lock,
                      coalesce((ledger->>'draining')::boolean, false) as "is_draining!",
                      exists (select from jobs where node = nodes.id and node_boot = nodes.boot
                                and state in ('placed', 'running')) as "holds_work!",
                      greatest(0, extract(epoch from greatest(
                          case when last_seen < now() + $2::float8 * interval '1 millisecond'
                               then last_seen + $2::float8 * interval '1 millisecond' end,
                          (select max(lease_expires) from jobs
                           where node = nodes.id and node_boot = nodes.boot and state = 'running'
                             and lease_expires < now() + $3::float8 * interval '1 millisecond')
                      ) - clock_timestamp()) * 1000)::bigint as "lease_ms!"
               from nodes where id = $1 for update"#,
            node.as_str(),
            self.lease_ttl_ms(),
            self.longest_lease_ms()
        )
        .fetch_one(&mut *tx)
        .await
        .doing("finding a node")?;
        let before = EarlierBoot {
            boot: BootId(before.boot),
            machine_boot: before.machine_boot,
            credentials_lock: before.credentials_lock,
            is_draining: before.is_draining,
            holds_work: before.holds_work,
            lease_ms: before.lease_ms,
        };
        let new = NewBoot {
            boot: *boot,
            machine_boot: machine_boot.as_deref(),
            credentials_lock: credentials_lock.as_deref(),
        };
        if let Err(in_use) = before.check(new) {
            if before.is_other_machine_boot(new) {
                sqlx::query!("update nodes set restart_seen_at = now() where id = $1", node.as_str())
                    .execute(&mut *tx)
                    .await
                    .doing("writing a node")?;
            }
            tx.commit().await.doing("writing a node")?;
            return Ok(Err(in_use));
        }
        sqlx::query!(
            r#"update nodes set boot = $2, version = $3, devices = $4, ledger = $5, machine_boot = $6,
                      credentials_lock = $7, last_seen = now(), exclusions = '{}', restart_seen_at = null,
                      earlier_boot = case when boot = $2 then earlier_boot else boot end,
                      earlier_boot_end = case when boot = $2 then earlier_boot_end else $8 end
               where id = $1"#,
            node.as_str(),
            boot.0,
            pg_text(version),
            AsJson(devices) as _,
            AsJson(ledger) as _,
            machine_boot,
            credentials_lock,
            before.end(new).as_str()
        )
        .execute(&mut *tx)
        .await
        .doing("writing a node")?;
        tx.commit().await.doing("writing a node")?;
        Ok(Ok(Some(before.boot).filter(|before| before != boot)))
    }

    /// Cordons a node, or ends this. `None` if no node of this name is registered. A node of a revoked machine stays
    /// cordoned.
    pub async fn set_cordon(&self, node: &NodeId, cordoned: bool) -> Result<Option<Vec<Hint>>, StoreError> {
        let changed = sqlx::query!(
            r#"update nodes set cordoned_at = case
                   when $2 or exists (select from machines where name = $1 and revoked_at is not null)
                   then coalesce(cordoned_at, now()) end
               where id = $1"#,
            node.as_str(),
            cordoned
        )
        .execute(&self.pool)
        .await
        .doing("cordoning a node")?;
        Ok((changed.rows_affected() == 1).then(|| vec![Hint::Leader(LeaderHint::Node(node.clone()))]))
    }

    /// Withdraws the suspicions because of the node's earlier boot, if it ended with its machine.
    async fn withdraw_suspicions_after_restart(&self, node: &NodeId) -> Result<(), StoreError> {
        let restarted = sqlx::query_scalar!(
            r#"select earlier_boot as "boot!" from nodes
               where id = $1 and earlier_boot is not null and earlier_boot_end = $2"#,
            node.as_str(),
            BootEnd::MachineRestarted.as_str()
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding a node")?;
        match restarted {
            Some(boot) => self.withdraw_suspicions_of_boot(BootId(boot)).await,
            None => Ok(()),
        }
    }

    /// Releases the jobs that earlier boots of this node, or of all nodes, hold. A job whose row is locked or faulty is
    /// left for the next call.
    pub async fn release_jobs_of_earlier_boots(&self, node: Option<&NodeId>) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query!(
            r#"select jobs.id, jobs.task, jobs.lease as "lease!", nodes.id as node,
                      case when jobs.node_boot = nodes.earlier_boot then nodes.earlier_boot_end end as boot_end
               from jobs join nodes on nodes.id = jobs.node
               where jobs.state in ('placed', 'running') and jobs.node_boot <> nodes.boot
                 and ($1::text is null or nodes.id = $1) and jobs.id <> all($2)"#,
            node.map(NodeId::as_str),
            &self.shared.row_backoff.rows()
        )
        .fetch_all(&self.pool);
        let doing = "finding the jobs of an earlier boot";
        let rows = limited(doing, async { found.await.doing(doing) }).await?;
        let mut hints = Vec::new();
        for row in rows {
            let node = match parse("node", &row.node) {
                Ok(node) => node,
                Err(error) => {
                    self.skip_faulty_row("job", row.id, Err(error))?;
                    continue;
                }
            };
            let old = OldJob {
                job: JobId(row.id),
                task: TaskId(row.task),
                lease: LeaseId(row.lease),
                node,
                end: BootEnd::from_stored(row.boot_end.as_deref()),
            };
            let released = limited("releasing the jobs of an earlier boot", self.release_old_job(&old)).await;
            hints.extend(self.skip_faulty_row("job", row.id, released)?);
        }
        Ok(hints)
    }

    async fn release_old_job(&self, old: &OldJob) -> Result<Vec<Hint>, StoreError> {
        let OldJob { job, node, .. } = old;
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, old.task).await? else { return roll_back(tx, vec![]).await };
        let state = sqlx::query_scalar!(
            r#"select state from jobs where id = $1 and lease = $2
                 and node_boot <> (select boot from nodes where nodes.id = jobs.node) for update"#,
            job.0,
            old.lease.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let (end, reason) = match old.end {
            BootEnd::Drained => (UnreportedEnd::Infrastructure, format!("{node} was restarted")),
            BootEnd::MachineRestarted => {
                (UnreportedEnd::Infrastructure, format!("the machine of {node} was restarted"))
            }
            BootEnd::Unexpected => (UnreportedEnd::NodeLost, format!("{node} stopped unexpectedly and was restarted")),
        };
        let hints = match state.map(|s| parse::<JobState>("job state", &s)).transpose()? {
            Some(JobState::Running) => self.end_lost_attempt(&mut tx, &task, *job, end, &reason).await?,
            Some(JobState::Placed) => {
                let reason = format!("{reason} before it accepted the job");
                self.end_lost_attempt(&mut tx, &task, *job, end, &reason).await?
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
                      cordoned_at is not null as "cordoned!", exclusions as "exclusions: Json<serde_json::Value>"
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
            let (boot, seen_ms, cordoned) = (BootId(r.boot), r.seen_ms, r.cordoned);
            nodes.push(core::Node { id, boot, ledger, seen_ms, cordoned, exclusions });
        }
        Ok(nodes)
    }
}
