//! Limits on tasks that have not ended: on all together, and on those of each token that has a limit.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use cfq_proto::ids::ApiTokenId;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::access::Access;
use super::error::ApiError;
use crate::store::{Store, StoreError};

/// Time for which a count from the database is used. Tasks that are created meanwhile are added to it.
const COUNT_LIFETIME: Duration = Duration::from_secs(1);
/// Seconds after which a refused client should retry.
const RETRY_AFTER_SECONDS: u32 = 30;

/// The limit of all tasks, and a recent count.
#[derive(Debug)]
pub struct OpenTaskLimit {
    limit: u32,
    counted: Mutex<Option<(Instant, i64)>>,
    /// A lock for each token that has a limit and was used. Its requests create tasks one after the other.
    token_locks: std::sync::Mutex<HashMap<ApiTokenId, Arc<Mutex<()>>>>,
}

/// Permission to create tasks; it is held until they are written. `None` for a token without a limit.
#[derive(Debug)]
pub struct OpenTaskPermit(Option<OwnedMutexGuard<()>>);

impl OpenTaskPermit {
    pub fn is_unlimited(&self) -> bool {
        self.0.is_none()
    }
}

impl OpenTaskLimit {
    pub fn new(limit: u32) -> Self {
        Self { limit, counted: Mutex::new(None), token_locks: std::sync::Mutex::default() }
    }

    /// Permits `more` further tasks, or returns the refusal. Concurrent requests may exceed the limit of
    /// all tasks by their number, and that of a token only through several schedulers.
    pub async fn admit(
        &self,
        store: &Store,
        access: &Access,
        more: usize,
    ) -> Result<Result<OpenTaskPermit, ApiError>, StoreError> {
        let more = i64::try_from(more).unwrap_or(i64::MAX);
        let mut permit = OpenTaskPermit(None);
        if let Some((name, limits)) = access.limits()
            && let Some(limit) = limits.open_tasks
        {
            permit = OpenTaskPermit(Some(self.lock_of(access.token_id()).lock_owned().await));
            let open = store.count_open_tasks_of(Some(access.token_id())).await?;
            if open.saturating_add(more) > i64::from(limit) {
                return Ok(Err(refusal(&format!("{open} tasks of the token {name}"), limit)));
            }
        }
        let mut counted = self.counted.lock().await;
        let open = match *counted {
            Some((at, open)) if at.elapsed() < COUNT_LIFETIME => open,
            _ => {
                let open = store.count_open_tasks().await?;
                *counted = Some((Instant::now(), open));
                open
            }
        };
        let is_within = open.saturating_add(more) <= i64::from(self.limit);
        Ok(if is_within { Ok(permit) } else { Err(refusal(&format!("{open} tasks"), self.limit)) })
    }

    fn lock_of(&self, token: ApiTokenId) -> Arc<Mutex<()>> {
        self.token_locks.lock().unwrap_or_else(PoisonError::into_inner).entry(token).or_default().clone()
    }

    /// Counts a task that was just created.
    pub async fn on_created(&self) {
        if let Some((_, open)) = self.counted.lock().await.as_mut() {
            *open += 1;
        }
    }
}

fn refusal(open: &str, limit: u32) -> ApiError {
    let message = format!(
        "{open} are open, and at most {limit} may be: wait until some end, or cancel or resolve some (`cfq ls` lists them)"
    );
    ApiError::too_many_requests(message, RETRY_AFTER_SECONDS)
}
