//! Heartbeats of nodes and runners. A heartbeat lists the leases that its sender holds; the reply names those that were
//! extended and those that are lost. Only leases whose work progresses are extended.

use std::time::Duration;

use cfq_proto::ids::{BootId, LeaseId, NodeId, RunnerId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{Heartbeat, HeartbeatReply};
use uuid::Uuid;

use super::columns::AsJson;
use super::error::Doing;
use super::{Store, StoreError};

/// Time limit for writing one heartbeat. A heartbeat that takes longer is abandoned, so that the next heartbeat does
/// not queue behind it.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of tries to extend a lease whose row is locked. Most locks last a few milliseconds; a lease whose row is locked
/// for longer is extended by a later heartbeat.
const MAX_EXTENSION_TRIES: u32 = 4;
/// Wait between two such tries.
const EXTENSION_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The leases that a heartbeat lists.
struct ListedLeases {
    all: Vec<Uuid>,
    /// Leases whose holder completed a step within the allowed step time.
    progressing: Vec<Uuid>,
}

impl ListedLeases {
    fn new(heartbeat: &Heartbeat, max_step_ms: u64) -> Self {
        let leases = |progresses: &dyn Fn(u64) -> bool| {
            heartbeat.held.iter().filter(|h| progresses(h.step_age_ms)).map(|h| h.lease.0).collect()
        };
        Self { all: leases(&|_| true), progressing: leases(&|age| age <= max_step_ms) }
    }

    /// The leases to extend, without those in `extended`.
    fn not_in(&self, extended: &[Uuid]) -> Vec<Uuid> {
        self.progressing.iter().filter(|lease| !extended.contains(lease)).copied().collect()
    }

    /// Whether this lease is to be extended and is not in `extended`.
    fn awaits(&self, lease: Uuid, extended: &[Uuid]) -> bool {
        self.progressing.contains(&lease) && !extended.contains(&lease)
    }

    /// Builds the reply. `live` are the listed leases that the sender still holds. A live lease whose work stalls is
    /// neither extended nor reported as lost.
    fn reply(self, known: bool, extended: Vec<Uuid>, live: &[Uuid]) -> HeartbeatReply {
        HeartbeatReply {
            extended: extended.into_iter().map(LeaseId).collect(),
            lost: self.all.into_iter().filter(|lease| !live.contains(lease)).map(LeaseId).collect(),
            register_again: !known,
        }
    }
}

impl Store {
    /// Records a node's heartbeat and extends exactly the listed leases whose work progresses. A listed lease that this
    /// boot of the node does not hold any more is reported as lost.
    pub async fn record_node_heartbeat(
        &self,
        node: &NodeId,
        heartbeat: &Heartbeat,
    ) -> Result<HeartbeatReply, StoreError> {
        with_timeout(self.extend_node(node, heartbeat)).await
    }

    async fn extend_node(&self, node: &NodeId, heartbeat: &Heartbeat) -> Result<HeartbeatReply, StoreError> {
        let listed = ListedLeases::new(heartbeat, self.timing.job_step_timeout_ms);
        let (mut extended, mut tries) = (Vec::new(), 0);
        let live = loop {
            extended.extend(self.extend_unlocked_jobs(node, heartbeat.boot, listed.not_in(&extended)).await?);
            let live = self.listed_jobs(node, heartbeat.boot, &listed).await?;
            tries += 1;
            let is_locked = |(lease, is_running): &(Uuid, bool)| *is_running && listed.awaits(*lease, &extended);
            if tries == MAX_EXTENSION_TRIES || !live.iter().any(is_locked) {
                break live;
            }
            tokio::time::sleep(EXTENSION_RETRY_INTERVAL).await;
        };
        // After the leases, because this row may be locked too, for example while a refusal of the node is stored.
        let silent_ms = sqlx::query_scalar!(
            r#"with before as (select id, last_seen from nodes where id = $1 and boot = $2)
               update nodes set last_seen = now(), ledger = coalesce($3, ledger), devices = coalesce($4, devices)
               from before where nodes.id = before.id and nodes.boot = $2
               returning (extract(epoch from now() - before.last_seen) * 1000)::float8 as "silent_ms!""#,
            node.as_str(),
            heartbeat.boot.0,
            heartbeat.ledger.as_ref().map(AsJson) as _,
            heartbeat.devices.as_ref().map(AsJson) as _
        )
        .fetch_optional(&self.pool)
        .await
        .doing("writing a heartbeat")?;
        // The node was only disconnected: it did not stop, so no job stopped it.
        if silent_ms.is_some_and(|ms| ms > self.lease_ttl_ms())
            && let Err(error) = self.withdraw_suspicions_of_boot(heartbeat.boot).await
        {
            tracing::warn!(%node, %error, "suspicions of a node that is back are not withdrawn");
        }
        // The lease of a placed job does not expire before the job's acceptance arrives, so it is reported as extended.
        extended.extend(live.iter().filter(|(_, is_running)| !is_running).map(|(lease, _)| lease));
        let live: Vec<_> = live.into_iter().map(|(lease, _)| lease).collect();
        let lost: Vec<_> =
            listed.progressing.iter().filter(|lease| !live.contains(lease)).copied().map(LeaseId).collect();
        if !lost.is_empty()
            && let Err(error) = self.withdraw_suspicions_of_leases(&lost).await
        {
            tracing::warn!(%node, %error, "suspicions of a node that is back are not withdrawn");
        }
        Ok(listed.reply(silent_ms.is_some(), extended, &live))
    }

    /// Extends those of these leases whose rows are not locked. One locked row delays no other lease of the node.
    async fn extend_unlocked_jobs(
        &self,
        node: &NodeId,
        boot: BootId,
        leases: Vec<Uuid>,
    ) -> Result<Vec<Uuid>, StoreError> {
        if leases.is_empty() {
            return Ok(vec![]);
        }
        sqlx::query_scalar!(
            r#"update jobs set lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from jobs
                            where lease = any($1) and node = $2 and node_boot = $3 and state = 'running'
                            order by id for no key update skip locked)
               returning lease as "lease!""#,
            &leases,
            node.as_str(),
            boot.0,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("extending job leases")
    }

    /// The listed leases that the node still holds, each with whether its job is running (and not only placed).
    async fn listed_jobs(
        &self,
        node: &NodeId,
        boot: BootId,
        listed: &ListedLeases,
    ) -> Result<Vec<(Uuid, bool)>, StoreError> {
        if listed.all.is_empty() {
            return Ok(vec![]);
        }
        let rows = sqlx::query!(
            r#"select lease as "lease!", state from jobs
               where lease = any($1) and node = $2 and node_boot = $3 and state in ('placed', 'running')"#,
            &listed.all,
            node.as_str(),
            boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking job leases")?;
        Ok(rows.into_iter().map(|row| (row.lease, row.state == JobState::Running.as_str())).collect())
    }

    /// Records a runner's heartbeat and extends exactly the listed leases whose work progresses.
    pub async fn record_runner_heartbeat(
        &self,
        runner: &RunnerId,
        heartbeat: &Heartbeat,
    ) -> Result<HeartbeatReply, StoreError> {
        with_timeout(self.extend_runner(runner, heartbeat)).await
    }

    async fn extend_runner(&self, runner: &RunnerId, heartbeat: &Heartbeat) -> Result<HeartbeatReply, StoreError> {
        let listed = ListedLeases::new(heartbeat, self.timing.task_step_timeout_ms);
        let (mut extended, mut tries) = (Vec::new(), 0);
        let live = loop {
            extended.extend(self.extend_unlocked_tasks(runner, heartbeat.boot, listed.not_in(&extended)).await?);
            let live = self.listed_tasks(runner, heartbeat.boot, &listed).await?;
            tries += 1;
            if tries == MAX_EXTENSION_TRIES || !live.iter().any(|lease| listed.awaits(*lease, &extended)) {
                break live;
            }
            tokio::time::sleep(EXTENSION_RETRY_INTERVAL).await;
        };
        self.mark_stalled(runner, heartbeat.boot, &listed).await?;
        let written = sqlx::query!(
            "update runners set last_seen = now() where id = $1 and boot = $2",
            runner.as_str(),
            heartbeat.boot.0
        )
        .execute(&self.pool)
        .await
        .doing("writing a heartbeat")?;
        Ok(listed.reply(written.rows_affected() == 1, extended, &live))
    }

    /// Extends those of these leases whose rows are not locked.
    async fn extend_unlocked_tasks(
        &self,
        runner: &RunnerId,
        boot: BootId,
        leases: Vec<Uuid>,
    ) -> Result<Vec<Uuid>, StoreError> {
        if leases.is_empty() {
            return Ok(vec![]);
        }
        sqlx::query_scalar!(
            r#"update tasks set stalled = false, lease_request = null, unreceived = 0,
                      lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from tasks where lease = any($1) and runner = $2 and runner_boot = $3
                            order by id for no key update skip locked)
               returning lease as "lease!""#,
            &leases,
            runner.as_str(),
            boot.0,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("extending task leases")
    }

    /// The listed leases that the runner still holds.
    async fn listed_tasks(
        &self,
        runner: &RunnerId,
        boot: BootId,
        listed: &ListedLeases,
    ) -> Result<Vec<Uuid>, StoreError> {
        if listed.all.is_empty() {
            return Ok(vec![]);
        }
        sqlx::query_scalar!(
            r#"select lease as "lease!" from tasks where lease = any($1) and runner = $2 and runner_boot = $3"#,
            &listed.all,
            runner.as_str(),
            boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking task leases")
    }

    /// Records which of the listed tasks complete no step.
    async fn mark_stalled(&self, runner: &RunnerId, boot: BootId, listed: &ListedLeases) -> Result<(), StoreError> {
        let stalled: Vec<_> = listed.all.iter().filter(|l| !listed.progressing.contains(l)).copied().collect();
        if stalled.is_empty() {
            return Ok(());
        }
        sqlx::query!(
            r#"update tasks set stalled = true
               where id in (select id from tasks where lease = any($1) and runner = $2 and runner_boot = $3
                              and not stalled order by id for no key update skip locked)"#,
            &stalled,
            runner.as_str(),
            boot.0
        )
        .execute(&self.pool)
        .await
        .doing("marking a stalled task")?;
        Ok(())
    }
}

/// Abandons a heartbeat after [`HEARTBEAT_TIMEOUT`]. The statements of a heartbeat are idempotent, so those executed
/// before the timeout do no harm.
async fn with_timeout<T>(work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(HEARTBEAT_TIMEOUT, work)
        .await
        .unwrap_or(Err(StoreError::TooSlow { doing: "writing a heartbeat" }))
}
