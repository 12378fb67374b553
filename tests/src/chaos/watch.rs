//! Watches the tasks' rows during the faults, over a connection of its own: counts the tasks that are not at rest, and
//! finds tasks that stay `running` without a renewal of their lease.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::producer::Ledger;
use crate::cluster::Cluster;

const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Limit of one query; a suspended Postgres answers none.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a task may stay `running` without a renewal of its lease. The lease TTL is 2 s, the longest fault
/// takes about 10 s with its stops and starts, and no lease is swept for one TTL after an outage.
pub const RENEWAL_LIMIT: Duration = Duration::from_secs(60);

/// A task's row in `tasks`.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TaskRow {
    pub id: String,
    pub number: i64,
    pub idempotency_key: Option<String>,
    pub state: String,
    pub reason: String,
    /// Number of leases that the task had.
    pub attempt: i32,
    /// Lease and end of the lease.
    pub lease: Option<String>,
}

impl TaskRow {
    pub async fn all(connection: &mut PgConnection) -> sqlx::Result<Vec<Self>> {
        sqlx::query_as(
            "select id::text, number, idempotency_key, state, reason, attempt,
             lease::text || ' until ' || lease_expires as lease from tasks order by number",
        )
        .fetch_all(connection)
        .await
    }

    pub fn is_settled(&self) -> bool {
        self.state.parse::<TaskState>().unwrap().is_settled()
    }
}

/// The leases of running tasks, each with the time at which its current end was first seen.
#[derive(Default)]
struct Renewals {
    since: HashMap<String, (Option<String>, Instant, bool)>,
}

impl Renewals {
    /// Records the rows seen at `now`; returns a violation for each task that exceeded the limit just now.
    fn record(&mut self, rows: &[TaskRow], now: Instant) -> Vec<String> {
        self.since.retain(|id, _| rows.iter().any(|row| row.id == *id && row.state == "running"));
        let mut violations = Vec::new();
        for row in rows.iter().filter(|row| row.state == "running") {
            let entry = self.since.entry(row.id.clone()).or_insert((row.lease.clone(), now, false));
            if entry.0 != row.lease {
                *entry = (row.lease.clone(), now, false);
            }
            if !entry.2 && now.duration_since(entry.1) > RENEWAL_LIMIT {
                entry.2 = true;
                violations.push(format!(
                    "task {} ({}) is running for more than {RENEWAL_LIMIT:?} without a renewal of its lease {:?}",
                    row.number, row.id, row.lease
                ));
            }
        }
        violations
    }
}

/// Watches until it is dropped.
pub async fn watch(cluster: &Cluster, ledger: Arc<Ledger>) {
    let mut renewals = Renewals::default();
    let mut connection = None;
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        // On an error, Postgres is stopped, killed or suspended; the next round connects again.
        if let Ok(Ok((open, rows))) = tokio::time::timeout(QUERY_TIMEOUT, read(cluster, connection.take())).await {
            connection = Some(open);
            ledger.backlog.store(rows.iter().filter(|row| !row.is_settled()).count(), Ordering::SeqCst);
            let violations = renewals.record(&rows, Instant::now());
            ledger.violations.lock().unwrap().extend(violations);
        }
    }
}

async fn read(cluster: &Cluster, connection: Option<PgConnection>) -> sqlx::Result<(PgConnection, Vec<TaskRow>)> {
    let mut connection = match connection {
        Some(connection) => connection,
        None => cluster.database.try_connect().await?,
    };
    let rows = TaskRow::all(&mut connection).await?;
    Ok((connection, rows))
}

/// The tasks, read with a new connection; an error if Postgres does not answer in time.
pub async fn tasks(cluster: &Cluster) -> Result<Vec<TaskRow>, String> {
    match tokio::time::timeout(QUERY_TIMEOUT, read(cluster, None)).await {
        Ok(Ok((_, rows))) => Ok(rows),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("Postgres does not answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, lease: &str) -> TaskRow {
        TaskRow {
            id: "t".into(),
            number: 1,
            idempotency_key: None,
            state: state.into(),
            reason: String::new(),
            attempt: 1,
            lease: Some(lease.into()),
        }
    }

    #[test]
    fn task_without_renewal_is_reported_once() {
        let (mut renewals, start) = (Renewals::default(), Instant::now());
        assert!(renewals.record(&[row("running", "a")], start).is_empty());
        assert!(renewals.record(&[row("running", "b")], start + RENEWAL_LIMIT).is_empty(), "renewed");
        let late = start + RENEWAL_LIMIT * 3;
        assert_eq!(renewals.record(&[row("running", "b")], late).len(), 1);
        assert!(renewals.record(&[row("running", "b")], late).is_empty());
        assert!(renewals.record(&[row("merged", "b")], late + RENEWAL_LIMIT * 3).is_empty());
    }
}
