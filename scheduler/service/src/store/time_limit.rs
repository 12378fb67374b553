//! Time limit of the leader's database operations on this side of the connection. Postgres ends a statement that takes
//! too long, but a connection whose other end vanished never answers: without a limit here, the leader would keep its row
//! and never place or sweep again.
//!
//! An operation that reaches the limit is dropped, and the pool closes its connection (see [`super::pools`]). The
//! operation may have been committed; the next one finds out, because every write is a compare-and-set.

use std::time::Duration;

use super::StoreError;

/// Time limit of one operation, longer than that of a statement in Postgres, so that the error of Postgres arrives first.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit of one operation of the election. It is shorter, because nothing is placed or swept meanwhile.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs one operation, for at most [`OPERATION_TIMEOUT`].
///
/// # Errors
/// [`StoreError::TooSlow`] after this time.
pub async fn limited<T>(
    doing: &'static str,
    operation: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    within(OPERATION_TIMEOUT, doing, operation).await
}

/// Runs one operation of the election, for at most [`ELECTION_TIMEOUT`].
///
/// # Errors
/// [`StoreError::TooSlow`] after this time.
pub async fn limited_election<T>(
    doing: &'static str,
    operation: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    within(ELECTION_TIMEOUT, doing, operation).await
}

async fn within<T>(
    limit: Duration,
    doing: &'static str,
    operation: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(limit, operation).await.unwrap_or(Err(StoreError::TooSlow { doing }))
}
