//! Heartbeats of nodes and runners. A heartbeat lists the leases that its sender holds; the reply names those that were
//! extended and those that are lost. Only leases whose work progresses are extended.

use std::time::Duration;

use cfq_proto::ids::{LeaseId, NodeId, RunnerId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{Heartbeat, HeartbeatReply};
use uuid::Uuid;

use super::columns::AsJson;
use super::error::Doing;
use super::{Store, StoreError};

/// Time limit for writing one heartbeat. A heartbeat that takes longer is abandoned, so that the next heartbeat does
/// not queue behind it.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

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
        let known = sqlx::query!(
            r#"update nodes set last_seen = now(), ledger = coalesce($3, ledger), devices = coalesce($4, devices)
               where id = $1 and boot = $2"#,
            node.as_str(),
            heartbeat.boot.0,
            heartbeat.ledger.as_ref().map(AsJson) as _,
            heartbeat.devices.as_ref().map(AsJson) as _
        )
        .execute(&self.pool)
        .await
        .doing("writing a heartbeat")?
        .rows_affected()
            == 1;
        let listed = ListedLeases::new(heartbeat, self.timing.job_step_timeout_ms);
        if listed.all.is_empty() {
            return Ok(listed.reply(known, vec![], &[]));
        }
        // Separate from the statement that writes the node's row, so that a heartbeat never waits for the lock on a
        // job's row while it holds the lock on the node's row. Job rows are locked in the order of their ids, as by a
        // cancel, which avoids deadlocks.
        let mut extended = sqlx::query_scalar!(
            r#"update jobs set lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from jobs
                            where lease = any($1) and node = $2 and node_boot = $3 and state = 'running'
                            order by id for update)
               returning lease as "lease!""#,
            &listed.progressing,
            node.as_str(),
            heartbeat.boot.0,
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
            heartbeat.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking job leases")?;
        // The lease of a placed job does not expire before the job's acceptance arrives, so it is reported as extended.
        extended.extend(live.iter().filter(|l| l.state == JobState::Placed.as_str()).map(|l| l.lease));
        let live: Vec<_> = live.into_iter().map(|l| l.lease).collect();
        Ok(listed.reply(known, extended, &live))
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
        let known = sqlx::query!(
            "update runners set last_seen = now() where id = $1 and boot = $2",
            runner.as_str(),
            heartbeat.boot.0
        )
        .execute(&self.pool)
        .await
        .doing("writing a heartbeat")?
        .rows_affected()
            == 1;
        let listed = ListedLeases::new(heartbeat, self.timing.task_step_timeout_ms);
        if listed.all.is_empty() {
            return Ok(listed.reply(known, vec![], &[]));
        }
        let extended = sqlx::query_scalar!(
            r#"update tasks set stalled = false, lease_expires = now() + $4::float8 * interval '1 millisecond'
               where id in (select id from tasks where lease = any($1) and runner = $2 and runner_boot = $3
                            order by id for update)
               returning lease as "lease!""#,
            &listed.progressing,
            runner.as_str(),
            heartbeat.boot.0,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("extending task leases")?;
        if extended.len() < listed.all.len() {
            let stalled: Vec<_> = listed.all.iter().filter(|l| !listed.progressing.contains(l)).copied().collect();
            sqlx::query!(
                r#"update tasks set stalled = true
                   where lease = any($1) and runner = $2 and runner_boot = $3 and not stalled"#,
                &stalled,
                runner.as_str(),
                heartbeat.boot.0
            )
            .execute(&self.pool)
            .await
            .doing("marking a stalled task")?;
        }
        let live = sqlx::query_scalar!(
            r#"select lease as "lease!" from tasks where lease = any($1) and runner = $2 and runner_boot = $3"#,
            &listed.all,
            runner.as_str(),
            heartbeat.boot.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("checking task leases")?;
        Ok(listed.reply(known, extended, &live))
    }
}

/// Abandons a heartbeat after [`HEARTBEAT_TIMEOUT`]. The statements of a heartbeat are idempotent, so those executed
/// before the timeout do no harm.
async fn with_timeout<T>(work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(HEARTBEAT_TIMEOUT, work)
        .await
        .unwrap_or(Err(StoreError::TooSlow { doing: "writing a heartbeat" }))
}
