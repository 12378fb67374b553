//! Rows that cannot be processed. A row that this build cannot read, or that Postgres refuses to write, must not stop
//! the placement, sweep or grant of the other rows: it is skipped for [`ROW_RETRY_INTERVAL`], logged once, and then
//! retried, because a repair of the row sends no notification.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::StoreError;

/// Time for which a faulty row is skipped: short enough that a repaired row is used soon, long enough to keep the log
/// readable.
const ROW_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Rows that are skipped for now, by id, with the time of their next try. Clones share the same set.
#[derive(Debug, Clone, Default)]
pub struct RowBackoff(Arc<Mutex<BTreeMap<Uuid, Instant>>>);

impl RowBackoff {
    /// Skips a row for `ROW_RETRY_INTERVAL`. `what` is the kind of row, for the log.
    pub fn defer(&self, what: &'static str, row: Uuid, error: &StoreError) {
        let now = Instant::now();
        let mut rows = self.current(now);
        if rows.insert(row, now + ROW_RETRY_INTERVAL).is_none() {
            let cause = std::error::Error::source(error);
            tracing::error!(what, %row, %error, ?cause, "cannot process a row; it is skipped and retried later");
        }
    }

    /// Whether the row is skipped now.
    pub fn contains(&self, row: Uuid) -> bool {
        self.current(Instant::now()).contains_key(&row)
    }

    /// Ids of all rows that are skipped now.
    pub fn rows(&self) -> Vec<Uuid> {
        self.current(Instant::now()).keys().copied().collect()
    }

    fn current(&self, now: Instant) -> MutexGuard<'_, BTreeMap<Uuid, Instant>> {
        // Plain data: consistent even if a thread panicked while it held the lock.
        let mut rows = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        rows.retain(|_, until| *until > now);
        rows
    }
}
