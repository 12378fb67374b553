//! Bounded waits on values. Nothing here waits for time to pass as such.

use std::future::Future;
use std::time::{Duration, Instant};

/// Asks until `probe` answers `Some`, at most `limit`; panics with `what` and the last thing `describe` said.
pub async fn until<T, F>(what: &str, limit: Duration, mut probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let start = Instant::now();
    loop {
        let last = match probe().await {
            Ok(value) => return value,
            Err(last) => last,
        };
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}; last seen: {last}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
