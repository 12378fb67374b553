//! Waits for a condition, with a time limit. No function here merely sleeps for a fixed time.

use std::future::Future;
use std::time::{Duration, Instant};

/// Calls `probe` every 20 ms until it returns `Ok`. Panics after `limit`, with `what` and the last error.
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
