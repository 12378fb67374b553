//! Whether NATS delivers messages to this scheduler, checked by messages to itself. The check has a task of its own,
//! because a message that is not delivered takes as long as its time limit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_link::Session;
use tokio::time::{MissedTickBehavior, interval};

/// Number of checks that must fail in a row: on a busy machine, one message may be late.
const MIN_FAILURES: u32 = 2;

/// Result of the checks. Clones share it.
#[derive(Debug, Clone)]
pub struct NatsCheck(Arc<Mutex<Checked>>);

#[derive(Debug, Clone, Copy)]
struct Checked {
    last_success: Instant,
    failures: u32,
}

impl Default for NatsCheck {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Checked { last_success: Instant::now(), failures: 0 })))
    }
}

impl NatsCheck {
    /// Whether one of the last two messages to itself arrived.
    pub fn delivers(&self) -> bool {
        self.read().failures < MIN_FAILURES
    }

    /// Whether no message to itself arrived for longer than `time`.
    pub fn is_silent_for(&self, time: Duration) -> bool {
        self.read().last_success.elapsed() > time
    }

    fn read(&self) -> Checked {
        // Plain data: consistent even if a thread panicked while it held the lock.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, update: impl FnOnce(&mut Checked)) {
        update(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Checks at this interval until the task is ended.
    pub async fn run(self, session: Session, every: Duration) {
        let mut checks = interval(every);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            checks.tick().await;
            match session.round_trip().await {
                Ok(()) => self.update(|checked| *checked = Checked { last_success: Instant::now(), failures: 0 }),
                Err(error) => {
                    tracing::debug!(%error, "nats delivered no message");
                    self.update(|checked| checked.failures += 1);
                    if self.read().failures == MIN_FAILURES {
                        tracing::warn!("nats delivers no message: no lease is ended, another scheduler may take over");
                    }
                }
            }
        }
    }
}
