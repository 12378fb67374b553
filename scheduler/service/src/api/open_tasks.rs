//! The limit on tasks that have not ended. There is one API token, so the limit of a token is the limit of all tasks.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::error::ApiError;
use crate::store::{Store, StoreError};

/// Time for which a count from the database is used. Tasks that are created meanwhile are added to it.
const COUNT_LIFETIME: Duration = Duration::from_secs(1);
/// Seconds after which a refused client should retry.
const RETRY_AFTER_SECONDS: u32 = 30;

/// The limit, and a recent count.
#[derive(Debug)]
pub struct OpenTaskLimit {
    limit: u32,
    counted: Mutex<Option<(Instant, i64)>>,
}

impl OpenTaskLimit {
    pub fn new(limit: u32) -> Self {
        Self { limit, counted: Mutex::new(None) }
    }

    /// `Some` if `more` further tasks may not be created now. Concurrent requests may exceed the limit by their number.
    pub async fn refusal(&self, store: &Store, more: usize) -> Result<Option<ApiError>, StoreError> {
        let mut counted = self.counted.lock().await;
        let open = match *counted {
            Some((at, open)) if at.elapsed() < COUNT_LIFETIME => open,
            _ => {
                let open = store.count_open_tasks().await?;
                *counted = Some((Instant::now(), open));
                open
            }
        };
        if open.saturating_add(i64::try_from(more).unwrap_or(i64::MAX)) <= i64::from(self.limit) {
            return Ok(None);
        }
        let message = format!(
            "{open} tasks are open, and at most {} may be: wait until some end, or cancel or resolve some (`cfq ls` \
             lists them)",
            self.limit
        );
        Ok(Some(ApiError::too_many_requests(message, RETRY_AFTER_SECONDS)))
    }

    /// Counts a task that was just created.
    pub async fn on_created(&self) {
        if let Some((_, open)) = self.counted.lock().await.as_mut() {
            *open += 1;
        }
    }
}
