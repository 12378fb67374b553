//! The time limit of work on untrusted text or files, and its cancellation.
//!
//! Threads cannot be interrupted from outside, so the work itself checks its limit, at least once per word of a text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit of one piece of work. Clones share the cancellation.
#[derive(Debug, Clone)]
pub struct TimeLimit {
    started: Instant,
    duration: Duration,
    cancelled: Arc<AtomicBool>,
}

/// The work was stopped before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The work took longer than its limit.
    #[error("it takes longer than {} s", limit.as_secs_f64())]
    OutOfTime {
        /// The limit.
        limit: Duration,
    },
    /// The caller no longer waits for the result.
    #[error("it was cancelled")]
    Cancelled,
}

impl TimeLimit {
    /// A limit that ends `duration` from now.
    pub fn new(duration: Duration) -> Self {
        Self { started: Instant::now(), duration, cancelled: Arc::default() }
    }

    /// No limit.
    pub fn none() -> Self {
        Self::new(Duration::MAX)
    }

    /// # Errors
    /// [`Stopped`] once the time is over or the work is cancelled.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Stopped::Cancelled);
        }
        if self.duration < Duration::MAX && self.started.elapsed() > self.duration {
            return Err(Stopped::OutOfTime { limit: self.duration });
        }
        Ok(())
    }

    /// A guard that cancels the work when it is dropped.
    pub fn cancel_on_drop(&self) -> CancelOnDrop {
        CancelOnDrop(self.cancelled.clone())
    }
}

/// Cancels the work of a [`TimeLimit`] when it is dropped.
#[derive(Debug)]
pub struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_stops_when_it_is_over_or_cancelled() {
        assert_eq!(TimeLimit::none().check(), Ok(()));
        let limit = TimeLimit::new(Duration::ZERO);
        while limit.check().is_ok() {}
        assert_eq!(limit.check(), Err(Stopped::OutOfTime { limit: Duration::ZERO }));
        let limit = TimeLimit::new(Duration::from_secs(3600));
        let guard = limit.cancel_on_drop();
        assert_eq!(limit.clone().check(), Ok(()));
        drop(guard);
        assert_eq!(limit.check(), Err(Stopped::Cancelled));
    }
}
