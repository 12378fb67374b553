//! The end of an attempt that its node did not report: it was lost with its node, or never accepted.
//!
//! Two counts are kept apart. `losses` and `unaccepted` count such attempts, except those that the infrastructure ended
//! (a clean stop, an outage, a restarted machine). `suspicions` counts those whose end the job itself may have caused
//! ([`cfq_scheduler_core::is_suspect`]); a job with too many of them becomes a dead letter. A suspicion is withdrawn if
//! it turns out that the node was not stopped by a job: its machine was restarted, or it was only disconnected and sends
//! heartbeats again.

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::job::JobState;
use cfq_scheduler_core::{BootAttempt, UnreportedEnd, is_suspect};
use sqlx::PgConnection;

use super::attempts::{self, AttemptOutcome};
use super::earlier_boot::BootEnd;
use super::error::Doing;
use super::hints::{Hint, for_changed_job};
use super::jobs::{append_job_changed, leave_node, mark_dead};
use super::tasks::TaskRow;
use super::{Store, StoreError};
use crate::config::SchedulerLimits;

/// Time, in lease TTLs, for which an attempt that ended unreported still counts as held by its node when another
/// attempt of the same boot ends: the ends of one node's attempts are noticed one after the other.
const SAME_LOSS_TTLS: f64 = 3.0;

/// Part of a lease TTL for which a node counts as alive after its last heartbeat. When a lease expires, the last
/// heartbeat of a node that died is almost a TTL old, because the heartbeat is written after the leases that it extends;
/// that of a node whose job stalls is at most a few heartbeat intervals old.
const ALIVE_TTLS: f64 = 0.5;

/// State of a node, as its row shows it, for one of its boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeCondition {
    Alive,
    /// The node was stopped cleanly, or is being stopped.
    Draining,
    /// A boot from another start of its machine has registered, or waits for the lease of this one to end while the node
    /// sends no heartbeats.
    MachineRestarted,
    Lost,
}

impl Store {
    /// Ends the current attempt of a placed or running job whose task is locked. The job is requeued, or becomes a dead
    /// letter if its attempts ended too often in this way. The end of an attempt for reasons of the infrastructure (a
    /// clean stop, an outage) is not counted.
    pub(super) async fn end_lost_attempt(
        &self,
        connection: &mut PgConnection,
        task: &TaskRow,
        job: JobId,
        end: UnreportedEnd,
        reason: &str,
    ) -> Result<Vec<Hint>, StoreError> {
        let suspicion = self.suspicion(connection, job, end).await?;
        let row = sqlx::query!(
            r#"update jobs set losses = losses + case when state = 'running' and $3 then 1 else 0 end,
                      unaccepted = unaccepted + case when state <> 'running' and $3 then 1 else 0 end,
                      suspicions = suspicions + case when $2 then 1 else 0 end
               where id = $1
               returning losses, unaccepted, suspicions, state = 'running' as "accepted!", next_model is not null as "has_next_model!""#,
            job.0,
            suspicion.is_some(),
            end != UnreportedEnd::Infrastructure
        )
        .fetch_one(&mut *connection)
        .await
        .doing("counting a loss")?;
        let outcome = match end {
            _ if !row.accepted => AttemptOutcome::Unplaced,
            UnreportedEnd::Infrastructure => AttemptOutcome::Released,
            UnreportedEnd::NodeLost | UnreportedEnd::Stalled | UnreportedEnd::NotAccepted => AttemptOutcome::Lost,
        };
        attempts::end_current(connection, job, outcome, reason).await?;
        // Another model may succeed whatever happened to this one.
        if !row.has_next_model && is_over_limit(&self.limits, row.losses, row.unaccepted, row.suspicions) {
            mark_dead(connection, job, &summary(row.losses, row.unaccepted)).await?;
        } else {
            leave_node(connection, job, JobState::Queued).await?;
        }
        append_job_changed(connection, task, job, reason).await?;
        Ok(for_changed_job(task, job))
    }

    /// Decides whether the job may have caused the end of its current attempt, and records this with the attempt.
    /// Returns the recorded kind of suspicion; `None` if there is none.
    async fn suspicion(
        &self,
        connection: &mut PgConnection,
        job: JobId,
        end: UnreportedEnd,
    ) -> Result<Option<&'static str>, StoreError> {
        let kind = match end {
            UnreportedEnd::Infrastructure => return Ok(None),
            UnreportedEnd::NodeLost => "node_lost",
            UnreportedEnd::Stalled => "stalled",
            UnreportedEnd::NotAccepted => "not_accepted",
        };
        let held = sqlx::query!(
            r#"select a.job, (extract(epoch from a.placed_at) * 1000)::bigint as "placed_ms!",
                      (extract(epoch from a.accepted_at) * 1000)::bigint as accepted_ms,
                      a.first_token_at is not null as "has_first_token!"
               from attempts a join jobs j on j.id = $1 and a.node_boot = j.node_boot
               where (a.job = $1 and a.attempt = j.attempt)
                  or (a.job <> $1 and (a.ended_at is null or a.outcome = 'unplaced' and $2
                      or a.outcome in ('lost', 'unplaced') and a.ended_at > now() - $3::float8 * interval '1 millisecond'))"#,
            job.0,
            end == UnreportedEnd::NotAccepted,
            SAME_LOSS_TTLS * self.lease_ttl_ms()
        )
        .fetch_all(&mut *connection)
        .await
        .doing("reading the attempts of a node")?;
        let (own, others): (Vec<BootAttempt>, Vec<BootAttempt>) = held
            .into_iter()
            .map(|r| BootAttempt {
                job: JobId(r.job),
                placed_ms: r.placed_ms,
                accepted_ms: r.accepted_ms,
                has_first_token: r.has_first_token,
            })
            .partition(|attempt| attempt.job == job);
        let Some(own) = own.first() else { return Ok(None) };
        let last_accepted_ms = sqlx::query_scalar!(
            r#"select (extract(epoch from max(accepted_at)) * 1000)::bigint from attempts
               where node_boot = (select node_boot from jobs where id = $1)"#,
            job.0
        )
        .fetch_one(&mut *connection)
        .await
        .doing("reading the attempts of a node")?;
        if !is_suspect(end, own, &others, last_accepted_ms) {
            return Ok(None);
        }
        sqlx::query!(
            "update attempts set suspicion = $2 where job = $1 and attempt = (select attempt from jobs where id = $1)",
            job.0,
            kind
        )
        .execute(connection)
        .await
        .doing("recording a suspicion")?;
        Ok(Some(kind))
    }

    /// How the attempt of a job that `boot` of the node holds ends when its lease expires.
    pub(super) async fn end_of_expired_lease(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        boot: BootId,
    ) -> Result<UnreportedEnd, StoreError> {
        Ok(match self.node_condition(connection, node, boot).await? {
            NodeCondition::Alive => UnreportedEnd::Stalled,
            NodeCondition::Draining | NodeCondition::MachineRestarted => UnreportedEnd::Infrastructure,
            NodeCondition::Lost => UnreportedEnd::NodeLost,
        })
    }

    /// Whether this boot of the node was stopped cleanly, is being stopped, or was stopped with its machine.
    pub(super) async fn is_stopped_by_infrastructure(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        boot: BootId,
    ) -> Result<bool, StoreError> {
        Ok(match self.node_condition(connection, node, boot).await? {
            NodeCondition::Draining | NodeCondition::MachineRestarted => true,
            NodeCondition::Alive | NodeCondition::Lost => false,
        })
    }

    async fn node_condition(
        &self,
        connection: &mut PgConnection,
        node: &NodeId,
        boot: BootId,
    ) -> Result<NodeCondition, StoreError> {
        let row = sqlx::query!(
            r#"select boot = $2 as "is_current!", earlier_boot_end as end_of_earlier,
                      coalesce((ledger->>'draining')::boolean, false) as "draining!",
                      last_seen between now() - $3::float8 * interval '1 millisecond'
                                    and now() + $3::float8 * interval '1 millisecond' as "alive!",
                      coalesce(restart_seen_at > now() - $4::float8 * interval '1 millisecond', false) as "restarted!"
               from nodes where id = $1 and (boot = $2 or earlier_boot = $2)"#,
            node.as_str(),
            boot.0,
            ALIVE_TTLS * self.lease_ttl_ms(),
            self.longest_lease_ms()
        )
        .fetch_optional(connection)
        .await
        .doing("reading a node")?;
        Ok(match row {
            // A later boot has registered, and the jobs of this one are not released yet.
            Some(row) if !row.is_current => match BootEnd::from_stored(row.end_of_earlier.as_deref()) {
                BootEnd::Drained => NodeCondition::Draining,
                BootEnd::MachineRestarted => NodeCondition::MachineRestarted,
                BootEnd::Unexpected => NodeCondition::Lost,
            },
            Some(row) if row.draining => NodeCondition::Draining,
            Some(row) if row.alive => NodeCondition::Alive,
            Some(row) if row.restarted => NodeCondition::MachineRestarted,
            Some(_) | None => NodeCondition::Lost,
        })
    }

    /// Withdraws the suspicions because of the loss of this boot of a node: its machine was restarted.
    pub(super) async fn withdraw_suspicions_of_boot(&self, boot: BootId) -> Result<(), StoreError> {
        sqlx::query!(
            r#"with suspected as (select id from jobs where id in
                      (select job from attempts where node_boot = $1 and suspicion = 'node_lost') order by id for update),
               cleared as (update attempts set suspicion = null
                      where node_boot = $1 and suspicion = 'node_lost' and job in (select id from suspected) returning job)
               update jobs set suspicions = greatest(suspicions - c.n, 0)
               from (select job, count(*)::integer as n from cleared group by job) c
               where jobs.id = c.job and state in ('queued', 'placed', 'running')"#,
            boot.0
        )
        .execute(&self.pool)
        .await
        .doing("withdrawing suspicions")?;
        Ok(())
    }

    /// Withdraws the suspicions because of the loss of the node that held these leases: the node sends heartbeats again,
    /// so it was not stopped.
    pub(super) async fn withdraw_suspicions_of_leases(&self, leases: &[LeaseId]) -> Result<(), StoreError> {
        let leases: Vec<uuid::Uuid> = leases.iter().map(|lease| lease.0).collect();
        sqlx::query!(
            r#"with suspected as (select id from jobs where id in
                      (select job from attempts where lease = any($1) and suspicion = 'node_lost') order by id for update),
               cleared as (update attempts set suspicion = null
                      where lease = any($1) and suspicion = 'node_lost' and job in (select id from suspected) returning job)
               update jobs set suspicions = greatest(suspicions - c.n, 0)
               from (select job, count(*)::integer as n from cleared group by job) c
               where jobs.id = c.job and state in ('queued', 'placed', 'running')"#,
            &leases
        )
        .execute(&self.pool)
        .await
        .doing("withdrawing suspicions")?;
        Ok(())
    }
}

fn is_over_limit(limits: &SchedulerLimits, losses: i32, unaccepted: i32, suspicions: i32) -> bool {
    suspicions > limits.max_losses || losses.saturating_add(unaccepted) > limits.max_lost_or_unaccepted
}

/// What a dead letter reports before the list of its attempts.
fn summary(losses: i32, unaccepted: i32) -> String {
    match (losses, unaccepted) {
        (losses, 0) => format!("lost its node {losses} times"),
        (0, unaccepted) => format!("was not accepted by its node {unaccepted} times"),
        (losses, unaccepted) => {
            format!("lost its node {losses} times and was not accepted by its node {unaccepted} times")
        }
    }
}
