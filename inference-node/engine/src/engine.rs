//! The trait every engine implements, in this process or behind a model server.
//!
//! Admission comes first: [`Engine::admit`] reserves KV tokens and a sequence slot, so that a node can accept a job
//! before any work begins. Dropping what was admitted releases the reservation.

use std::sync::Arc;

use cfq_proto::job::{ChatMessage, GeneratedTokens, JobFailure, Prompt};
use cfq_proto::node::ModelState;
use futures::future::BoxFuture;

use crate::batch::speculative_prefill::{PrefillProgress, SpeculativePrompt};
use crate::generation::Generation;

/// One model, ready to take sequences. Cheap to share; every method may be called concurrently.
pub trait Engine: Send + Sync {
    /// Snapshot for the node's ledger: residency, free KV tokens and measured rates.
    fn state(&self) -> ModelState;

    /// The reason why the engine cannot serve again in this process; `None` while it works or may recover by itself.
    fn broken(&self) -> Option<String> {
        None
    }

    /// Identifier of the vocabulary of the token ids it reports; `None` if it reports none.
    fn vocabulary(&self) -> Option<i64> {
        None
    }

    /// Tokenizes the prompt and reserves KV tokens and a slot for it. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`Refused`] says whether to retry here, elsewhere or not at all.
    fn admit(&self, prompt: Prompt) -> BoxFuture<'_, Result<Admitted, Refused>> {
        self.admit_resumed(prompt, GeneratedTokens::default())
    }

    /// Admits a prompt whose answer resumes after `generated`, the tokens an earlier attempt delivered.
    ///
    /// # Errors
    /// As [`Engine::admit`]; also [`Refused::Failed`] if the answer cannot resume there, because restarting would
    /// contradict text that was already delivered.
    fn admit_resumed(&self, prompt: Prompt, generated: GeneratedTokens) -> BoxFuture<'_, Result<Admitted, Refused>>;

    /// Tokenizes an expected prompt for speculative prefill. `None` where the engine cannot prefill speculatively, as
    /// behind an endpoint. Must be called within a tokio runtime.
    fn plan_prefill(&self, _expected: &ExpectedPrompt) -> BoxFuture<'_, Option<SpeculativePrompt>> {
        Box::pin(async { None })
    }

    /// Prefills one short chunk of `prompt` if the engine is idle.
    fn prefill_chunk(&self, _prompt: Arc<SpeculativePrompt>) -> BoxFuture<'_, PrefillProgress> {
        Box::pin(async { PrefillProgress::Done })
    }
}

/// The known beginning of a prompt that is expected soon.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedPrompt {
    /// Messages known so far; the last one may be incomplete.
    pub messages: Vec<ChatMessage>,
    /// Longest output the call will ask for, in tokens.
    pub max_tokens: u32,
    /// Whether the call will ask for batch-invariant output.
    pub deterministic: bool,
}

/// A reservation for one sequence. Dropping it unused releases the reservation.
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
    /// Wraps the function that starts the generation.
    pub fn new(start: impl FnOnce() -> Generation + Send + 'static) -> Self {
        Self { resumed: 0, start: Box::new(start) }
    }

    /// Records that the generation resumes after `resumed` tokens of an earlier attempt.
    pub fn with_resumed(self, resumed: u32) -> Self {
        Self { resumed, ..self }
    }

    /// Number of tokens taken over from an earlier attempt.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Starts the generation.
    pub fn start(self) -> Generation {
        (self.start)()
    }
}

/// Why an engine did not admit a sequence.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refused {
    /// Too few free KV tokens or no free slot at present.
    #[error("not enough free capacity at present: {have} KV tokens are free")]
    NotNow {
        /// Tokens the sequence needs, if they were counted.
        need: Option<u64>,
        /// Tokens that are free.
        have: u64,
    },
    /// This engine can never run it; another engine might.
    #[error("{reason}")]
    Never {
        /// What this engine lacks.
        reason: String,
    },
    /// No engine can run it: the job itself fails.
    #[error("{0}")]
    Failed(JobFailure),
}
