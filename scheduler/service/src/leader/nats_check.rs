//! Whether NATS delivers messages to this scheduler, checked by messages to itself. The check has a task of its own,
//! because a message that is not delivered takes as long as its time limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cfq_link::Session;
use tokio::time::{MissedTickBehavior, interval};

/// Number of checks that must fail in a row: on a busy machine, one message may be late.
const MIN_FAILURES: u32 = 2;

/// Result of the last checks. Clones share it.
#[derive(Debug, Clone)]
pub struct NatsCheck(Arc<AtomicBool>);

impl Default for NatsCheck {
    fn default() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }
}

impl NatsCheck {
    /// Whether one of the last two messages to itself arrived.
    pub fn delivers(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Checks at this interval until the task is ended.
    pub async fn run(self, session: Session, every: Duration) {
        let mut checks = interval(every);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failures = 0;
        loop {
            checks.tick().await;
            match session.round_trip().await {
                Ok(()) => failures = 0,
                Err(error) => {
                    tracing::debug!(%error, "nats delivered no message");
                    failures += 1;
                }
            }
            let delivers = failures < MIN_FAILURES;
            if self.0.swap(delivers, Ordering::Relaxed) && !delivers {
                tracing::warn!("nats delivers no message: no lease is ended, and another scheduler may take over");
            }
        }
    }
}
