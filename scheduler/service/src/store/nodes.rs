//! Nodes say hello and beat.

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{Beat, BeatReply, NodeHello};
use cfq_proto::node::Ledger;
use cfq_scheduler_core as core;
use sqlx::types::Json;

use super::as_json::AsJson;
use super::beats::Listed;
use super::error::{Doing, plain, read};
use super::hint::{Hint, LeaderHint};
use super::jobs::{changed, leave_node};
use super::tasks::lock_task;
use super::{Store, StoreError, attempts, in_beat_time, nothing, sweep};

/// What a hello changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Greeting {
    /// It is another start than the last one known.
    pub new_boot: bool,
    pub hints: Vec<Hint>,
}

impl Store {
    /// Writes the node's row. A new boot releases at once what the old one held. `None` if a later boot is up: this hello
    /// came late, or two processes have one name. Boot ids are in the order of their starts; a clock that was set back
    /// breaks that, so a later boot counts only while it is heard.
    pub async fn node_hello(&self, hello: &NodeHello) -> Result<Option<Greeting>, StoreError> {
        let before = sqlx::query_scalar!("select boot from nodes where id = $1", hello.node.as_str())
            .fetch_optional(&self.pool)
            .await
            .doing("finding a node")?;
        let written = sqlx::query!(
            r#"insert into nodes (id, boot, version, devices, ledger) values ($1, $2, $3, $4, $5)
               on conflict (id) do update set boot = excluded.boot, version = excluded.version, devices = excluded.devices,
                   ledger = excluded.ledger, last_seen = now(), left_out = '{}'
               where nodes.boot <= excluded.boot
                  or nodes.last_seen not between now() - $6::float8 * interval '1 millisecond'
                                             and now() + $6::float8 * interval '1 millisecond'"#,
            hello.node.as_str(),
            hello.boot.0,
            plain(&hello.version),
            AsJson(&hello.devices) as _,
            AsJson(&hello.ledger) as _,
            self.lease_ttl_ms()
        )
        .execute(&self.pool)
        .await
        .doing("writing a node")?;
        if written.rows_affected() == 0 {
            return Ok(None);
        }
        let mut hints = self.release_old_boot(&hello.node, hello.boot).await?;
        hints.push(Hint::Leader(LeaderHint::Node(hello.node.clone())));
        Ok(Some(Greeting { new_boot: before != Some(hello.boot.0), hints }))
    }

    async fn release_old_boot(&self, node: &NodeId, boot: BootId) -> Result<Vec<Hint>, StoreError> {
        let held = sqlx::query!(
            r#"select id, task, lease as "lease!" from jobs
               where node = $1 and node_boot <> $2 and state in ('placed', 'running')"#,
            node.as_str(),
            boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the jobs of an earlier start")?;
        let mut hints = Vec::new();
        for row in held {
            let lost = self.release_old(node, boot, TaskId(row.task), JobId(row.id), LeaseId(row.lease)).await;
            hints.extend(self.swept("job", row.id, lost)?);
        }
        Ok(hints)
    }

    async fn release_old(
        &self,
        node: &NodeId,
        boot: BootId,
        task: TaskId,
        job: JobId,
        lease: LeaseId,
    ) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return nothing(tx, vec![]).await };
        let state = sqlx::query_scalar!(
            "select state from jobs where id = $1 and lease = $2 and node_boot <> $3 for update",
            job.0,
            lease.0,
            boot.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("checking a lease")?;
        let why = format!("{node} started anew");
        let hints = match state.map(|s| read::<JobState>("job state", &s)).transpose()? {
            Some(JobState::Running) => sweep::lose(&mut tx, &task, job, &why, self.limits.max_losses).await?,
            Some(JobState::Placed) => {
                attempts::end_current(&mut tx, job, "unplaced", &why).await?;
                leave_node(&mut tx, job, JobState::Queued).await?;
                changed(&mut tx, task.id, job, &why).await?;
                vec![Hint::Leader(LeaderHint::Job(job))]
            }
            Some(JobState::Queued | JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled)
            | None => return nothing(tx, vec![]).await,
        };
        tx.commit().await.doing("releasing the jobs of an earlier start")?;
        Ok(hints)
    }

    /// Extends exactly the listed leases whose work moves. What is listed but not this boot's any more is lost.
    pub async fn node_beat(&self, node: &NodeId, beat: &Beat) -> Result<BeatReply, StoreError> {
        in_beat_time(self.extend_node(node, beat)).await
    }

    async fn extend_node(&self, node: &NodeId, beat: &Beat) -> Result<BeatReply, StoreError> {
        let known = sqlx::query!(
            r#"update nodes set last_seen = now(), ledger = coalesce($3, ledger), devices = coalesce($4, devices)
               where id = $1 and boot = $2"#,
            node.as_str(),
            beat.boot.0,
            beat.ledger.as_ref().map(AsJson) as _,
            beat.devices.as_ref().map(AsJson) as _
        )
        .execute(&self.pool)
        .await
        .doing("writing a beat")?
        .rows_affected()
            == 1;
        let listed = Listed::of(beat, self.timing.job_step_ms);
        if listed.all.is_empty() {
            return Ok(listed.answer(known, vec![], &[]));
        }
        // Its own statement, so that a beat never waits for a job's row behind the node's; in the order of the ids, as a
        // cancel locks them.
        let mut extended = sqlx::query_scalar!(
            r#"update jobs set lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from jobs
                            where lease = any($1) and node = $2 and node_boot = $3 and state = 'running'
                            order by id for update)
               returning lease as "lease!""#,
            &listed.moving,
            node.as_str(),
            beat.boot.0,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("extending job leases")?;
        let live = sqlx::query!(
            r#"select lease as "lease!", state from jobs
               where lease = any($1) and node = $2 and node_boot = $3 and state in ('placed', 'running')"#,
            &listed.all,
            node.as_str(),
            beat.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking job leases")?;
        // A lease whose acceptance is still on its way does not expire yet.
        extended.extend(live.iter().filter(|l| l.state == "placed").map(|l| l.lease));
        let live: Vec<_> = live.into_iter().map(|l| l.lease).collect();
        Ok(listed.answer(known, extended, &live))
    }

    /// Every node's row. One that cannot be read is left out: its next hello, or its next ledger, writes it anew.
    pub async fn core_nodes(&self) -> Result<Vec<core::Node>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, boot, ledger as "ledger: Json<serde_json::Value>", (extract(epoch from last_seen) * 1000)::bigint as "seen_ms!",
                      left_out as "left_out: Json<serde_json::Value>"
               from nodes"#
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
                    tracing::error!(node = r.id, error = ?ledger.err(), "a node's row cannot be read and is left out");
                    continue;
                }
            };
            // Only a hint about room: without it a node is asked once too often.
            let left_out = serde_json::from_value(r.left_out.0).unwrap_or_default();
            nodes.push(core::Node { id, boot: BootId(r.boot), ledger, seen_ms: r.seen_ms, left_out });
        }
        Ok(nodes)
    }
}
