//! What runs one model: the trait every engine implements, and the two ends of one generation.
//!
//! Admission comes first and reserves room (`admit`), so that a node can take a job over before any work begins; dropping
//! what was admitted gives the room back. A generation is then a mailbox: the engine appends, the reader takes what
//! has gathered since it last looked. A slow reader therefore never holds an engine up, and memory is bounded by the
//! length of the text.

mod ahead;
pub mod candle;
pub mod grammar;
mod lanes;
pub mod proxy;
pub mod sampling;
mod sse;
pub mod text;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::job::{Completion, JobFailure, Prompt, Written};
use cfq_proto::messages::WarmUp;
use cfq_proto::node::ModelState;
use futures::future::BoxFuture;
use tokio::sync::Notify;

pub use crate::engine::ahead::{Ahead, Warmed};

/// One model, ready to take sequences. Cheap to share; all methods may be called at once.
pub trait Engine: Send + Sync {
    /// For the ledger: residency, room and measured rates.
    fn state(&self) -> ModelState;

    /// Why it will never work again in this process; `None` while it works, or may again by itself.
    fn broken(&self) -> Option<String> {
        None
    }

    /// Names the vocabulary of the tokens it tells of; `None` if it tells of none.
    fn vocabulary(&self) -> Option<i64> {
        None
    }

    /// Counts the prompt and reserves its room, or says why not. Must be called within a tokio runtime.
    fn admit(&self, prompt: Prompt) -> BoxFuture<'_, Result<Admitted, Refused>> {
        self.admit_after(prompt, Written::default())
    }

    /// The same, going on from what was written already. Where that cannot be it is a failure: another text would contradict it.
    fn admit_after(&self, prompt: Prompt, written: Written) -> BoxFuture<'_, Result<Admitted, Refused>>;

    /// What is expected, in this model's tokens. `None` where nothing can be computed ahead, as behind an endpoint. Must be
    /// called within a tokio runtime.
    fn foresee(&self, _expected: &WarmUp) -> BoxFuture<'_, Option<Ahead>> {
        Box::pin(async { None })
    }

    /// Computes a short piece of it, if nothing runs or waits here.
    fn warm(&self, _ahead: Arc<Ahead>) -> BoxFuture<'_, Warmed> {
        Box::pin(async { Warmed::Enough })
    }
}

/// Room held for one sequence. Dropped unused, the room is free again.
pub struct Admitted {
    resumed: u32,
    start: Box<dyn FnOnce() -> Generation + Send>,
}

impl std::fmt::Debug for Admitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admitted").finish_non_exhaustive()
    }
}

impl Admitted {
    pub fn new(start: impl FnOnce() -> Generation + Send + 'static) -> Self {
        Self { resumed: 0, start: Box::new(start) }
    }

    /// It goes on after so many tokens of an earlier attempt.
    pub fn after(self, resumed: u32) -> Self {
        Self { resumed, ..self }
    }

    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Begins the work.
    pub fn start(self) -> Generation {
        (self.start)()
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refused {
    /// No room at the moment; `need` and `have` in tokens, `need` where it was counted.
    #[error("no room for it now, {have} tokens are free")]
    NotNow { need: Option<u64>, have: u64 },
    /// This engine can never run it, though another might.
    #[error("{reason}")]
    Never { reason: String },
    /// Nobody can: the job itself fails with this.
    #[error("{0}")]
    Failed(JobFailure),
}

/// What happened since the reader last looked.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Work went on (a prefill chunk, tokens); `text` is what became final, perhaps nothing, and `tokens` what was written,
    /// where the engine has tokens.
    Step { text: String, tokens: Vec<u32> },
    /// The end; nothing comes after it. The completion holds the whole text.
    Done(Result<Completion, Ended>),
}

/// Why a generation ended without a completion.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Ended {
    #[error("cancelled")]
    Cancelled,
    #[error("{0}")]
    Failed(JobFailure),
}

#[derive(Default)]
struct Slot {
    text: String,
    tokens: Vec<u32>,
    stepped: bool,
    done: Option<Result<Completion, Ended>>,
}

#[derive(Default)]
struct Mailbox {
    slot: Mutex<Slot>,
    news: Notify,
    cancelled: AtomicBool,
    cancel: Notify,
}

impl Mailbox {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Plain data: whole even if a holder panicked.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reader's end. Dropping it cancels the work.
pub struct Generation {
    mailbox: Arc<Mailbox>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").finish_non_exhaustive()
    }
}

impl Generation {
    /// The next news. After `Done` it never completes.
    pub async fn next(&mut self) -> Event {
        loop {
            {
                let mut slot = self.mailbox.slot();
                if slot.stepped {
                    slot.stepped = false;
                    let (text, tokens) = (std::mem::take(&mut slot.text), std::mem::take(&mut slot.tokens));
                    return Event::Step { text, tokens };
                }
                if let Some(done) = slot.done.take() {
                    return Event::Done(done);
                }
            }
            self.mailbox.news.notified().await;
        }
    }

    /// Asks the engine to stop; it does within one step and then says so.
    pub fn cancel(&self) {
        self.mailbox.cancelled.store(true, Ordering::SeqCst);
        self.mailbox.cancel.notify_one();
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The engine's end. Dropped without an end, as by a panic, it reports the engine's failure.
pub struct Outbox {
    mailbox: Arc<Mailbox>,
    ended: bool,
}

/// The two ends of one generation.
pub fn generation() -> (Outbox, Generation) {
    let mailbox = Arc::new(Mailbox::default());
    (Outbox { mailbox: mailbox.clone(), ended: false }, Generation { mailbox })
}

impl Outbox {
    pub fn step(&self, text: &str) {
        self.wrote(text, &[]);
    }

    /// A step that wrote these tokens.
    pub fn wrote(&self, text: &str, tokens: &[u32]) {
        let mut slot = self.mailbox.slot();
        slot.text.push_str(text);
        slot.tokens.extend_from_slice(tokens);
        slot.stepped = true;
        drop(slot);
        self.mailbox.news.notify_one();
    }

    pub fn end(mut self, how: Result<Completion, Ended>) {
        self.set(how);
    }

    fn set(&mut self, how: Result<Completion, Ended>) {
        self.ended = true;
        self.mailbox.slot().done = Some(how);
        self.mailbox.news.notify_one();
    }

    pub fn is_cancelled(&self) -> bool {
        self.mailbox.cancelled.load(Ordering::SeqCst)
    }

    /// Completes when the reader cancels or is gone.
    pub async fn cancelled(&self) {
        while !self.is_cancelled() {
            self.mailbox.cancel.notified().await;
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if !self.ended {
            let reason = "the engine stopped in the middle of the generation".to_owned();
            self.set(Err(Ended::Failed(JobFailure::Engine { reason })));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn steps_gather_and_the_end_comes_last() {
        let (outbox, mut reader) = generation();
        outbox.step("a");
        outbox.step("b");
        outbox.end(Err(Ended::Cancelled));
        assert_eq!(reader.next().await, Event::Step { text: "ab".into(), tokens: vec![] });
        assert_eq!(reader.next().await, Event::Done(Err(Ended::Cancelled)));
    }

    #[tokio::test]
    async fn an_engine_that_vanishes_is_a_failure_and_a_reader_that_does_is_a_cancel() {
        let (outbox, mut reader) = generation();
        drop(outbox);
        assert!(matches!(reader.next().await, Event::Done(Err(Ended::Failed(JobFailure::Engine { .. })))));
        let (outbox, reader) = generation();
        assert!(!outbox.is_cancelled());
        drop(reader);
        outbox.cancelled().await;
    }
}
