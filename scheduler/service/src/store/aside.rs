//! Rows that could not be worked on. One that this build cannot read, or that Postgres refuses to write, must stop neither
//! the placing nor the sweeping nor the granting of the others: it is left alone for a while, said once in the log, and then
//! tried again, because whoever mends it tells nobody.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::StoreError;

/// Often enough that a mended row is soon at work, seldom enough that the log stays readable.
const LEFT_ALONE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default)]
pub struct Aside(Arc<Mutex<BTreeMap<Uuid, Instant>>>);

impl Aside {
    /// `what` is the kind of row, for the log.
    pub fn put(&self, what: &'static str, row: Uuid, error: &StoreError) {
        let now = Instant::now();
        let mut rows = self.current(now);
        if rows.insert(row, now + LEFT_ALONE).is_none() {
            let cause = std::error::Error::source(error);
            tracing::error!(what, %row, %error, ?cause, "a row cannot be worked on and is left alone; the others go on");
        }
    }

    pub fn holds(&self, row: Uuid) -> bool {
        self.current(Instant::now()).contains_key(&row)
    }

    pub fn rows(&self) -> Vec<Uuid> {
        self.current(Instant::now()).keys().copied().collect()
    }

    fn current(&self, now: Instant) -> MutexGuard<'_, BTreeMap<Uuid, Instant>> {
        // Plain data: whole even if a holder panicked.
        let mut rows = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        rows.retain(|_, until| *until > now);
        rows
    }
}
