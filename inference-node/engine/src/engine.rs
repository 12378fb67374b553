//! The trait that every engine implements, in this process or behind a model server.
//!
//! A sequence starts in two steps. [`Engine::admit`] reserves KV tokens and a sequence slot, so that the caller
//! promises an answer only if the prompt can run. [`Admitted::start`] then starts the generation; dropping the
//! [`Admitted`] instead releases the reservation.

use std::sync::Arc;

use cfq_proto::job::{ChatMessage, GeneratedTokens, JobFailure, Prompt};
use cfq_proto::node::ModelState;
use futures::future::BoxFuture;

use crate::batch::speculative_prefill::{PrefillProgress, SpeculativePrompt};
use crate::engine_failure::EngineFailure;
use crate::generation::Generation;

/// One model, ready to take sequences. Cheap to share; every method may be called concurrently.
pub trait Engine: Send + Sync {
    /// Snapshot of the model's state: residency, free KV tokens and measured rates.
    fn state(&self) -> ModelState;

    /// The failure after which the engine cannot serve until the process restarts; `None` while it works or may recover
    /// without a restart.
    fn failure(&self) -> Option<EngineFailure> {
        None
    }

    /// Number of the unit of work, for example a forward pass, that the engine's thread has begun and not ended; each
    /// unit has another number. `None` while the engine waits for work, and for an engine that has no thread here. If
    /// the number does not change for a long time, the engine hangs.
    fn unfinished_work(&self) -> Option<u64> {
        None
    }

    /// Records a failure that the engine cannot notice itself, see [`Self::unfinished_work`]. From then on
    /// [`Self::failure`] returns it. Has no effect on an engine that has no thread here.
    fn set_failure(&self, _failure: EngineFailure) {}

    /// Fingerprint of the vocabulary that the reported token ids belong to; `None` if the engine reports no token ids.
    fn vocabulary(&self) -> Option<i64> {
        None
    }

    /// Tokenizes the prompt and reserves KV tokens and a slot for it. Must be called within a tokio runtime whose
    /// timers are enabled.
    ///
    /// # Errors
    /// [`AdmitError`] says where a retry can succeed: on this engine, on another one, or nowhere.
    fn admit(&self, prompt: Prompt) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
        self.admit_resumed(prompt, GeneratedTokens::default())
    }

    /// Admits a prompt whose output resumes after `generated`, the tokens that an earlier generation delivered before
    /// it was lost.
    ///
    /// # Errors
    /// The errors of [`Engine::admit`], and [`AdmitError::Failed`] if the output cannot resume after these tokens: it
    /// is not restarted, since new text could contradict the text that readers have already received.
    fn admit_resumed(&self, prompt: Prompt, generated: GeneratedTokens) -> BoxFuture<'_, Result<Admitted, AdmitError>>;

    /// Tokenizes an expected prompt for speculative prefill. Returns `None` if the engine does not support speculative
    /// prefill, for example a model behind an endpoint. Must be called within a tokio runtime whose timers are enabled.
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
    /// Maximum output of the expected call, in tokens.
    pub max_tokens: u32,
    /// Whether the expected call will request batch-invariant output.
    pub deterministic: bool,
}

/// An admitted sequence: its reservation and the function that starts its generation. Dropping it without starting
/// releases the reservation.
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
    /// Creates an admitted sequence; `start` starts its generation.
    pub fn new(start: impl FnOnce() -> Generation + Send + 'static) -> Self {
        Self { resumed: 0, start: Box::new(start) }
    }

    /// Records that the generation resumes after `resumed` tokens of an earlier generation.
    pub fn with_resumed(self, resumed: u32) -> Self {
        Self { resumed, ..self }
    }

    /// Number of output tokens that are kept from an earlier generation.
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
pub enum AdmitError {
    /// Too few free KV tokens or no free slot at present.
    #[error("no free slot, or too few free KV tokens, at present: {have} KV tokens are free")]
    NotNow {
        /// KV tokens that the sequence needs; `None` if they were not counted.
        need: Option<u64>,
        /// KV tokens that are free.
        have: u64,
    },
    /// This engine can never run the sequence; another engine might.
    #[error("{reason}")]
    Never {
        /// Why this engine cannot run the sequence.
        reason: String,
    },
    /// No engine can run the sequence: the call fails on every engine.
    #[error("{0}")]
    Failed(JobFailure),
}
