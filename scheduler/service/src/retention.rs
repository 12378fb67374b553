//! Deletes what is older than the configured retention, at intervals. Any scheduler may do it, also several at once,
//! because each deletes rows that no other transaction has locked.

use std::time::Duration;

use cfq_link::stop::Stop;

use crate::config::RetentionConfig;
use crate::store::{Expiry, Store, StoreError};

/// Time between two runs.
const INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Time until the first run, so that a restarted scheduler serves requests first.
const FIRST_RUN_AFTER: Duration = Duration::from_secs(60);
/// Pause between two batches, for other work on the database.
const PAUSE: Duration = Duration::from_millis(200);

const SECONDS_PER_DAY: f64 = 24.0 * 60.0 * 60.0;

impl RetentionConfig {
    /// What is expired at `now_s`, in seconds since 1970. `tasks_days` replaces the configured time for tasks.
    pub fn expiry(&self, now_s: f64, tasks_days: Option<f64>) -> Expiry {
        let configured = |days: u32| (days > 0).then(|| now_s - f64::from(days) * SECONDS_PER_DAY);
        Expiry {
            tasks_ended_before: match tasks_days {
                Some(days) => Some(now_s - days * SECONDS_PER_DAY),
                None => configured(self.ended_tasks_days),
            },
            nodes_seen_before: configured(self.nodes_days),
        }
    }
}

/// Deletes expired rows until `stop` is raised.
pub async fn run(store: Store, config: RetentionConfig, mut stop: Stop) {
    let mut wait = FIRST_RUN_AFTER;
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = stop.raised() => return,
        }
        wait = INTERVAL;
        tokio::select! {
            done = delete_expired(&store, &config) => match done {
                Ok(0) => {}
                Ok(tasks) => tracing::info!(tasks, "deleted ended tasks that were older than the retention"),
                Err(error) => {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "expired rows not deleted, retrying");
                    wait = FIRST_RUN_AFTER;
                }
            },
            () = stop.raised() => return,
        }
    }
}

/// Deletes everything that is expired now. Returns the number of deleted tasks.
async fn delete_expired(store: &Store, config: &RetentionConfig) -> Result<u64, StoreError> {
    store.mark_ended_tasks().await?;
    let expiry = config.expiry(store.clock_ms().await? as f64 / 1000.0, None);
    let mut tasks = 0;
    if let Some(before) = expiry.tasks_ended_before {
        while let Some(batch) = store.delete_expired_tasks(before).await? {
            tasks += batch.tasks;
            tokio::time::sleep(PAUSE).await;
        }
    }
    if let Some(before) = expiry.nodes_seen_before {
        store.delete_lost_nodes(before).await?;
    }
    Ok(tasks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_days_keep_everything_and_a_request_may_name_another_time() {
        let day = SECONDS_PER_DAY;
        let keep = RetentionConfig { ended_tasks_days: 0, nodes_days: 0 };
        assert_eq!(keep.expiry(day, None), Expiry { tasks_ended_before: None, nodes_seen_before: None });
        assert_eq!(keep.expiry(day, Some(0.5)).tasks_ended_before, Some(day / 2.0));
        let config = RetentionConfig { ended_tasks_days: 2, nodes_days: 1 };
        let expiry = config.expiry(3.0 * day, None);
        assert_eq!(expiry, Expiry { tasks_ended_before: Some(day), nodes_seen_before: Some(2.0 * day) });
        assert_eq!(config.expiry(3.0 * day, Some(0.0)).tasks_ended_before, Some(3.0 * day));
    }
}
