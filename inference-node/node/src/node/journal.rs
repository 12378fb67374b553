//! What an attempt has written is told every second, or every 64 tokens, beside the generation and without holding it up. A
//! node that is lost then costs what it wrote since, not all of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_proto::job::Written;
use cfq_proto::messages::{FenceReply, JOURNAL_MOST, JobFence, Journal};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::Shared;
use super::attempt::Attempt;

const EVERY: Duration = Duration::from_secs(1);
const TOKENS: usize = 64;

/// What was written since the start, for the task that tells of it.
#[derive(Default)]
struct Pad {
    tokens: Mutex<Vec<u32>>,
    news: Notify,
    /// Nothing more is written: the rest is told at once.
    closed: AtomicBool,
}

impl Pad {
    fn tokens(&self) -> MutexGuard<'_, Vec<u32>> {
        // Plain data: whole even if a holder panicked.
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped with its generation, which its teller sees within a moment; what was not told by then is in the result, or is
/// written again.
pub(super) struct Notes(Option<(Arc<Pad>, JoinHandle<()>)>);

/// For the rest to be told: a job that is handed back waits no longer for that.
const CLOSING: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(100);

impl Notes {
    /// `resumed`: tokens it took over. Nothing is told of an engine without a vocabulary.
    pub fn of(attempt: &Attempt, vocabulary: Option<i64>, resumed: u32) -> Self {
        Self(vocabulary.map(|vocabulary| {
            let pad = Arc::new(Pad::default());
            let teller = Teller { shared: attempt.shared.clone(), fence: attempt.in_hand.fence, vocabulary, resumed };
            let teller = tokio::spawn(teller.run(pad.clone()));
            (pad, teller)
        }))
    }

    pub fn wrote(&mut self, tokens: &[u32]) {
        if let Some((pad, _)) = &self.0
            && !tokens.is_empty()
        {
            let mut all = pad.tokens();
            // Longer than is ever told.
            if all.len() <= JOURNAL_MOST {
                all.extend_from_slice(tokens);
            }
            drop(all);
            pad.news.notify_one();
        }
    }

    /// Tells the rest, where that takes no longer than a moment.
    pub async fn close(&mut self) {
        if let Some((pad, teller)) = self.0.take() {
            pad.closed.store(true, Ordering::Relaxed);
            pad.news.notify_one();
            if tokio::time::timeout(CLOSING, teller).await.is_err() {
                tracing::debug!("the last of what was written is not journalled");
            }
        }
    }
}

struct Teller {
    shared: Arc<Shared>,
    fence: JobFence,
    vocabulary: i64,
    resumed: u32,
}

impl Teller {
    async fn run(self, pad: Arc<Pad>) {
        let mut told = 0;
        let mut due = Instant::now() + EVERY;
        // Alone with the pad: the generation is over, and its end says the rest.
        while Arc::strong_count(&pad) > 1 {
            tokio::select! {
                () = pad.news.notified() => {}
                () = sleep_until(due) => {}
            }
            let untold = pad.tokens().get(told..).unwrap_or_default().to_vec();
            let now = Instant::now();
            let closed = pad.closed.load(Ordering::Relaxed);
            if untold.is_empty() {
                if closed {
                    return;
                }
                due = due.max(now + EVERY);
                continue;
            }
            if untold.len() < TOKENS && now < due && !closed {
                continue;
            }
            if self.resumed as usize + told + untold.len() > JOURNAL_MOST {
                return;
            }
            let wait = match self.tell(told, &untold).await {
                // What was written while this was told is looked for at once.
                Some(true) if closed => {
                    told += untold.len();
                    Duration::ZERO
                }
                Some(true) => {
                    told += untold.len();
                    EVERY
                }
                Some(false) => return,
                // Not heard, or the other side has less than was told: all of it again.
                None => {
                    told = 0;
                    if closed { AGAIN } else { EVERY }
                }
            };
            due = Instant::now() + wait;
        }
    }

    /// `None` if it was not kept, false if it is not wanted.
    async fn tell(&self, told: usize, tokens: &[u32]) -> Option<bool> {
        let Self { shared, fence, vocabulary, resumed } = self;
        let written = Written { vocabulary: *vocabulary, tokens: tokens.to_vec() };
        let ask =
            Journal { fence: *fence, boot: shared.boot, resumed: *resumed, after: resumed + told as u32, written };
        match shared.session.request::<_, FenceReply>(&shared.subject("journal"), &ask).await {
            Ok(FenceReply::Committed) => {
                cfq_link::failpoint::hit("node.journalled");
                Some(true)
            }
            Ok(FenceReply::Stale) => Some(false),
            Ok(FenceReply::Refused { reason }) => {
                tracing::warn!(job = %fence.job, reason, "what is written is not journalled");
                Some(false)
            }
            Ok(FenceReply::Unavailable { reason }) => {
                tracing::debug!(reason, "journal not kept yet");
                None
            }
            Err(error) => {
                tracing::debug!(%error, "journal not kept yet");
                None
            }
        }
    }
}
