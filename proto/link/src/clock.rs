//! The one place that reads the wall clock. Leases and limits never use it: they run on monotonic time or the database's.

use std::time::{SystemTime, UNIX_EPOCH};

/// Whole seconds since 1970.
#[allow(clippy::disallowed_methods)]
pub fn unix_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}
