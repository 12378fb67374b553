//! Limits on what clients keep open: calls and event feeds. Each is a limit of all clients together, of which a named token
//! gets at most half, so that no client shuts out the others, or its own limit if that is lower.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::ids::ApiTokenId;

use super::access::Access;
use super::error::ApiError;

/// Limit on what clients keep open of one kind, and the current counts. Clones share them.
#[derive(Debug, Clone)]
pub struct OpenLimit {
    /// For users, for example `calls`.
    kind: &'static str,
    limit: usize,
    /// Seconds after which a refused client should retry.
    retry_after: u32,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    /// Of each token that has something open.
    by_token: HashMap<ApiTokenId, usize>,
}

/// Counts as open until it is dropped.
#[derive(Debug)]
pub struct OpenPermit {
    token: ApiTokenId,
    open: Arc<Mutex<Open>>,
}

impl OpenLimit {
    pub fn new(kind: &'static str, limit: usize, retry_after: u32) -> Self {
        Self { kind, limit, retry_after, open: Arc::default() }
    }

    /// Opens one more, unless a limit is reached; `own` is that of the token.
    pub fn open(&self, access: &Access, own: Option<u32>) -> Result<OpenPermit, ApiError> {
        let (token, mut open, kind) = (access.token_id(), lock(&self.open), self.kind);
        let of_token = open.by_token.get(&token).copied().unwrap_or(0);
        let refuse = |open: &str| {
            let message = format!("{open} are open, which is the limit: close some, or retry when some have ended");
            Err(ApiError::too_many_requests(message, self.retry_after))
        };
        if let Access::Named(named) = access
            && of_token >= own.map_or(self.limit.div_ceil(2), |own| (own as usize).min(self.limit.div_ceil(2)))
        {
            return refuse(&format!("{of_token} {kind} of the token {}", named.name()));
        }
        if open.all >= self.limit {
            return refuse(&format!("{} {kind}", self.limit));
        }
        open.all += 1;
        open.by_token.insert(token, of_token + 1);
        Ok(OpenPermit { token, open: self.open.clone() })
    }
}

impl Drop for OpenPermit {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.all = open.all.saturating_sub(1);
        let of_token = open.by_token.get(&self.token).copied().unwrap_or(0);
        if of_token > 1 {
            open.by_token.insert(self.token, of_token - 1);
        } else {
            open.by_token.remove(&self.token);
        }
    }
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}
