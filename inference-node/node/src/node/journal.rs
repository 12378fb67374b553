//! The journal of an attempt: its generated tokens are sent to the scheduler every second or every 64 tokens, without
//! delaying the generation. If the node is lost, only the tokens that were not sent yet are generated again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_proto::job::GeneratedTokens;
use cfq_proto::messages::{FenceReply, JobFence, Journal, MAX_JOURNAL_TOKENS};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::context::NodeContext;

/// Maximum time before generated tokens are sent.
const SEND_INTERVAL: Duration = Duration::from_secs(1);
/// Number of unsent tokens at which they are sent without waiting for the interval.
const SEND_TOKENS: usize = 64;
/// Maximum time that a released job waits for its last tokens to be sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Wait before the last tokens are sent again after a failure.
const CLOSE_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The tokens generated since the start of the attempt.
#[derive(Default)]
struct TokenBuffer {
    tokens: Mutex<Vec<u32>>,
    appended: Notify,
    /// No more tokens follow, so the unsent ones are sent immediately.
    closed: AtomicBool,
}

impl TokenBuffer {
    fn tokens(&self) -> MutexGuard<'_, Vec<u32>> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writer of the journal of one attempt. When it is dropped, its sender task ends within a second. Tokens that were not
/// sent are part of the result, or are generated again by the next attempt.
pub(super) struct JournalWriter(Option<(Arc<TokenBuffer>, JoinHandle<()>)>);

impl JournalWriter {
    /// Starts the sender task. `resumed` is the number of tokens kept from an earlier attempt. If the engine reports no
    /// token ids (`vocabulary` is `None`), no journal is written.
    pub fn start(context: &Arc<NodeContext>, fence: JobFence, vocabulary: Option<i64>, resumed: u32) -> Self {
        Self(vocabulary.map(|vocabulary| {
            let buffer = Arc::new(TokenBuffer::default());
            let sender = JournalSender { context: context.clone(), fence, vocabulary, resumed };
            let sender = tokio::spawn(sender.run(buffer.clone()));
            (buffer, sender)
        }))
    }

    /// Appends generated tokens.
    pub fn append(&mut self, tokens: &[u32]) {
        if let Some((buffer, _)) = &self.0
            && !tokens.is_empty()
        {
            let mut all = buffer.tokens();
            // Tokens beyond the maximum journal length are never sent, so they are not collected.
            if all.len() <= MAX_JOURNAL_TOKENS {
                all.extend_from_slice(tokens);
            }
            drop(all);
            buffer.appended.notify_one();
        }
    }

    /// Sends the unsent tokens; gives up after [`CLOSE_TIMEOUT`].
    pub async fn close(&mut self) {
        if let Some((buffer, sender)) = self.0.take() {
            buffer.closed.store(true, Ordering::Relaxed);
            buffer.appended.notify_one();
            if tokio::time::timeout(CLOSE_TIMEOUT, sender).await.is_err() {
                tracing::debug!("the last tokens were not sent in time; the next attempt generates them again");
            }
        }
    }
}

/// How the scheduler handled a journal entry.
enum Sent {
    Kept,
    /// The entry was not stored; all tokens of the attempt have to be sent again.
    NotKept,
    /// The attempt is stale or its journal is refused: nothing more has to be sent.
    Unwanted,
}

struct JournalSender {
    context: Arc<NodeContext>,
    fence: JobFence,
    vocabulary: i64,
    resumed: u32,
}

impl JournalSender {
    async fn run(self, buffer: Arc<TokenBuffer>) {
        let mut sent = 0;
        let mut due = Instant::now() + SEND_INTERVAL;
        // Once the writer is dropped, the generation is over, and its result contains the unsent tokens.
        while Arc::strong_count(&buffer) > 1 {
            tokio::select! {
                () = buffer.appended.notified() => {}
                () = sleep_until(due) => {}
            }
            let unsent = buffer.tokens().get(sent..).unwrap_or_default().to_vec();
            let now = Instant::now();
            let closed = buffer.closed.load(Ordering::Relaxed);
            if unsent.is_empty() {
                if closed {
                    return;
                }
                due = due.max(now + SEND_INTERVAL);
                continue;
            }
            if unsent.len() < SEND_TOKENS && now < due && !closed {
                continue;
            }
            if self.resumed as usize + sent + unsent.len() > MAX_JOURNAL_TOKENS {
                return;
            }
            let wait = match self.send(sent, &unsent).await {
                Sent::Kept => {
                    sent += unsent.len();
                    // Once the buffer is closed, tokens generated in the meantime are sent without waiting.
                    if closed { Duration::ZERO } else { SEND_INTERVAL }
                }
                Sent::Unwanted => return,
                // The entry was lost, or the scheduler has fewer tokens than were sent before.
                Sent::NotKept => {
                    sent = 0;
                    if closed { CLOSE_RETRY_INTERVAL } else { SEND_INTERVAL }
                }
            };
            due = Instant::now() + wait;
        }
    }

    /// Sends `tokens`, which follow the first `sent` tokens of this attempt.
    async fn send(&self, sent: usize, tokens: &[u32]) -> Sent {
        let Self { context, fence, vocabulary, resumed } = self;
        let generated = GeneratedTokens { vocabulary: *vocabulary, tokens: tokens.to_vec() };
        let after = resumed + sent as u32;
        let entry = Journal { fence: *fence, boot: context.boot, resumed: *resumed, after, generated };
        match context.session.request::<_, FenceReply>(&context.subject("journal"), &entry).await {
            Ok(FenceReply::Committed) => {
                cfq_link::failpoint::hit("node.journalled");
                Sent::Kept
            }
            Ok(FenceReply::Stale) => Sent::Unwanted,
            Ok(FenceReply::Refused { reason }) => {
                tracing::warn!(job = %fence.job, %reason, "scheduler refused the journal entry");
                Sent::Unwanted
            }
            Ok(FenceReply::Unavailable { reason }) => {
                tracing::debug!(%reason, "journal entry not stored; its tokens are sent again");
                Sent::NotKept
            }
            Err(error) => {
                tracing::debug!(%error, "journal entry not stored; its tokens are sent again");
                Sent::NotKept
            }
        }
    }
}
