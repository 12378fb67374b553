//! One generation: a mailbox between the engine, which appends, and one reader.
//!
//! The reader takes everything that has accumulated since its last read, so the engine needs no backpressure: a slow
//! reader never blocks it, and memory is bounded by the length of the text.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::job::{Completion, JobFailure};
use tokio::sync::Notify;

/// One event of a generation: a step, or the end. Steps that were not read are merged into one event.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationEvent {
    /// At least one step (a prefill chunk or tokens) was computed.
    Step {
        /// New text that is final; may be empty.
        text: String,
        /// Ids of the new tokens; empty if the engine reports none.
        tokens: Vec<u32>,
    },
    /// The generation ended. If it succeeded, the completion contains the whole text.
    Done(Result<Completion, GenerationError>),
}

/// Why a generation ended without a completion.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerationError {
    /// The reader cancelled the generation or was dropped.
    #[error("cancelled")]
    Cancelled,
    /// The engine failed, or the request cannot be served.
    #[error("{0}")]
    Failed(JobFailure),
}

/// Content of the mailbox since the last read.
#[derive(Default)]
struct Unread {
    text: String,
    tokens: Vec<u32>,
    stepped: bool,
    done: Option<Result<Completion, GenerationError>>,
}

#[derive(Default)]
struct Mailbox {
    unread: Mutex<Unread>,
    changed: Notify,
    is_cancelled: AtomicBool,
    cancelled: Notify,
}

impl Mailbox {
    fn unread(&self) -> MutexGuard<'_, Unread> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reader's half of a generation. Dropping it cancels the generation.
pub struct Generation {
    mailbox: Arc<Mailbox>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").finish_non_exhaustive()
    }
}

impl Generation {
    /// Creates a generation: the engine's half and the reader's half.
    pub fn channel() -> (Outbox, Self) {
        let mailbox = Arc::new(Mailbox::default());
        (Outbox { mailbox: mailbox.clone(), ended: false }, Self { mailbox })
    }

    /// Waits for the next event. A call after [`GenerationEvent::Done`] never completes.
    pub async fn next(&mut self) -> GenerationEvent {
        loop {
            {
                let mut unread = self.mailbox.unread();
                if unread.stepped {
                    unread.stepped = false;
                    let (text, tokens) = (std::mem::take(&mut unread.text), std::mem::take(&mut unread.tokens));
                    return GenerationEvent::Step { text, tokens };
                }
                if let Some(done) = unread.done.take() {
                    return GenerationEvent::Done(done);
                }
            }
            self.mailbox.changed.notified().await;
        }
    }

    /// Asks the engine to stop. The engine stops within one step, and the generation ends with
    /// [`GenerationError::Cancelled`].
    pub fn cancel(&self) {
        self.mailbox.is_cancelled.store(true, Ordering::SeqCst);
        self.mailbox.cancelled.notify_one();
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The engine's half of a generation. If it is dropped without a call of [`Outbox::end`], for example because of a
/// panic, the generation ends with an engine failure.
pub struct Outbox {
    mailbox: Arc<Mailbox>,
    ended: bool,
}

impl Outbox {
    /// Reports a step with final `text`, which may be empty.
    pub fn report_step(&self, text: &str) {
        self.report_step_with_tokens(text, &[]);
    }

    /// Reports a step with final `text` and the ids of its tokens.
    pub fn report_step_with_tokens(&self, text: &str, tokens: &[u32]) {
        let mut unread = self.mailbox.unread();
        unread.text.push_str(text);
        unread.tokens.extend_from_slice(tokens);
        unread.stepped = true;
        drop(unread);
        self.mailbox.changed.notify_one();
    }

    /// Ends the generation.
    pub fn end(mut self, result: Result<Completion, GenerationError>) {
        self.set_done(result);
    }

    fn set_done(&mut self, result: Result<Completion, GenerationError>) {
        self.ended = true;
        self.mailbox.unread().done = Some(result);
        self.mailbox.changed.notify_one();
    }

    /// Whether the reader cancelled or was dropped.
    pub fn is_cancelled(&self) -> bool {
        self.mailbox.is_cancelled.load(Ordering::SeqCst)
    }

    /// Completes when the reader cancels or is dropped.
    pub async fn cancelled(&self) {
        while !self.is_cancelled() {
            self.mailbox.cancelled.notified().await;
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if !self.ended {
            let reason = "the engine stopped in the middle of the generation".to_owned();
            self.set_done(Err(GenerationError::Failed(JobFailure::Engine { reason })));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unread_steps_are_merged_and_the_end_comes_last() {
        let (outbox, mut reader) = Generation::channel();
        outbox.report_step("a");
        outbox.report_step("b");
        outbox.end(Err(GenerationError::Cancelled));
        assert_eq!(reader.next().await, GenerationEvent::Step { text: "ab".into(), tokens: vec![] });
        assert_eq!(reader.next().await, GenerationEvent::Done(Err(GenerationError::Cancelled)));
    }

    #[tokio::test]
    async fn dropped_outbox_is_a_failure_and_dropped_reader_a_cancellation() {
        let (outbox, mut reader) = Generation::channel();
        drop(outbox);
        let event = reader.next().await;
        assert!(matches!(event, GenerationEvent::Done(Err(GenerationError::Failed(JobFailure::Engine { .. })))));
        let (outbox, reader) = Generation::channel();
        assert!(!outbox.is_cancelled());
        drop(reader);
        outbox.cancelled().await;
    }
}
