//! Continuous batching: one thread per model computes all its running sequences in one forward pass per step.
//!
//! A pass computes one token of every decoding sequence and, beside them, as many prompt tokens as the measured latency
//! allows in a quarter of a second ([`super::chunked_prefill`]). So a long prompt delays decoding by at most a quarter
//! of a second, and a cancellation takes effect within one step. Sequences join and leave between steps.
//!
//! | module         | holds                                                                       |
//! |----------------|-----------------------------------------------------------------------------|
//! | `plan`         | which tokens each running sequence computes in the next pass                |
//! | `verification` | sampling from a pass's scores, verification of draft tokens                 |
//! | `preemption`   | which sequences release their KV blocks and wait; the policy after a failed pass |
//!
//! A chunk of an expected prompt is computed only while no sequence runs or waits ([`super::speculative_prefill`]).

mod plan;
mod preemption;
mod verification;

use std::any::Any;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use cfq_proto::job::FinishReason;

use self::plan::{MAX_PREFILL_TIME, prefill_rows};
use crate::backend::forward::{BatchEntry, ForwardFailure, ForwardModel};
use crate::batch::admission::{Admission, EngineStats};
use crate::batch::chunked_prefill::MIN_CHUNK_ROWS;
use crate::batch::latency_model::BatchWork;
use crate::batch::oom_backoff::BatchLimit;
use crate::batch::prompt_lookup::PassCost;
use crate::batch::sequence::{Sequence, SequenceRequest, TokenOutcome, failed_by_engine};
use crate::batch::speculative_prefill::{self, PrefillChunk, PrefillProgress, SpeculativePrompt};
use crate::engine_failure::EngineFailure;
use crate::generation::GenerationError;
use crate::kv::{KV_BLOCK_TOKENS, KvPool, SequenceKv};
use crate::model::tokenizer::Vocabulary;

/// Work for the batcher thread.
pub enum EngineCommand {
    /// Run an admitted sequence.
    Sequence(Box<SequenceRequest>),
    /// Prefill one chunk speculatively while nothing else runs.
    PrefillChunk(PrefillChunk),
}

/// A sequence in the batch. The keys and values of its first `kv.len()` tokens are computed.
struct Running {
    sequence: Sequence,
    kv: SequenceKv,
    /// Number of the last step that computed tokens of this sequence.
    last_step: u64,
}

impl Running {
    /// Tokens of the sequence whose keys and values are not computed yet: one while decoding, more during prefill.
    fn uncomputed(&self) -> &[u32] {
        &self.sequence.tokens[self.kv.len()..]
    }
}

/// A function that is called on the batcher thread before every forward pass.
pub type StepHook = Arc<dyn Fn() + Send + Sync>;

/// The continuous-batching scheduler of one model; runs on the model's batcher thread.
pub struct Batcher<M: ForwardModel> {
    model: M,
    pool: KvPool<M::Memory>,
    vocabulary: Arc<Vocabulary>,
    commands: Receiver<EngineCommand>,
    admission: Arc<Admission>,
    stats: Arc<EngineStats>,
    /// Estimates the cost of a pass over a given number of decoding sequences; this cost determines the number of draft
    /// tokens. The function is [`EngineStats::pass_cost`], except in tests, which need the same drafts on every
    /// machine.
    pass_cost: fn(&EngineStats, usize) -> PassCost,
    /// Sequences in the batch, in order of arrival, oldest first.
    running: Vec<Running>,
    /// Sequences that have no KV blocks and wait to resume or to start, oldest first.
    preempted: VecDeque<Sequence>,
    limit: BatchLimit,
    /// Device failure that occurred during speculative prefill; the next step ends the engine with it.
    device_failure: Option<EngineFailure>,
    /// Arrival number of the next sequence.
    next_arrival: u64,
    steps: u64,
    before_step: Option<StepHook>,
}

impl<M: ForwardModel> Batcher<M> {
    /// Creates a batcher without sequences. Nothing is computed before [`Self::run`] is called.
    pub fn new(
        model: M,
        pool: KvPool<M::Memory>,
        vocabulary: Arc<Vocabulary>,
        commands: Receiver<EngineCommand>,
        admission: Arc<Admission>,
        stats: Arc<EngineStats>,
        pass_cost: fn(&EngineStats, usize) -> PassCost,
    ) -> Self {
        Self {
            model,
            pool,
            vocabulary,
            commands,
            admission,
            stats,
            pass_cost,
            running: Vec::new(),
            preempted: VecDeque::new(),
            limit: BatchLimit::UNLIMITED,
            device_failure: None,
            next_arrival: 0,
            steps: 0,
            before_step: None,
        }
    }

    /// Calls `hook` before every forward pass.
    pub fn with_step_hook(self, hook: Option<StepHook>) -> Self {
        Self { before_step: hook, ..self }
    }

    /// Runs until every sender of commands is dropped, offloads the cached keys and values, and returns the model. A
    /// panic or an unusable device ends the engine early: all sequences fail, then the failure is recorded in the
    /// stats, and the result is `None`.
    pub fn run(mut self) -> Option<M> {
        let stats = self.stats.clone();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            while self.drain_commands() {
                self.step()?;
            }
            self.pool.offload_all();
            Ok::<(), EngineFailure>(())
        }));
        let Self { model, pool, commands, running, preempted, .. } = self;
        let failure = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(failure),
            Err(panic) => Some(EngineFailure::Panic { message: panic_message(panic.as_ref()).to_owned() }),
        };
        let Some(failure) = failure else {
            drop((running, preempted, commands, pool));
            return Some(model);
        };
        for sequence in running.into_iter().map(|running| running.sequence).chain(preempted) {
            sequence.end(Err(failed_by_engine(format!("the engine stopped: {failure}"))));
        }
        drop((commands, pool));
        let reason = failure.to_string();
        tracing::error!(reason, "inference engine stopped");
        stats.set_failure(failure);
        None
    }

    /// Processes all queued commands. While no sequence runs, it computes requested chunks of speculative prefill and
    /// blocks until the next command. Returns false once the engine is dropped and its last sequence has ended.
    fn drain_commands(&mut self) -> bool {
        self.stats.begin_work();
        self.resume_preempted();
        let mut chunk = None;
        loop {
            let idle = self.is_idle();
            let next = match idle && chunk.is_none() {
                true => {
                    self.stats.end_work();
                    let received = self.commands.recv();
                    self.stats.begin_work();
                    received.map_err(|_| TryRecvError::Disconnected)
                }
                false => self.commands.try_recv(),
            };
            match next {
                Ok(EngineCommand::Sequence(request)) => self.enqueue(*request),
                Ok(EngineCommand::PrefillChunk(requested)) => chunk = Some(requested),
                Err(empty_or_gone) => {
                    // The chunk is handled last, so that sequences queued together with it take precedence.
                    if let Some(chunk) = chunk.take() {
                        let progress =
                            if idle { self.prefill_speculatively(&chunk.prompt) } else { PrefillProgress::Busy };
                        chunk.finish(progress);
                    }
                    match empty_or_gone {
                        TryRecvError::Empty if self.device_failure.is_some() => return true,
                        TryRecvError::Empty if idle => {}
                        TryRecvError::Empty => return true,
                        TryRecvError::Disconnected => return !idle,
                    }
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.preempted.is_empty()
    }

    /// Runs one chunk of speculative prefill.
    fn prefill_speculatively(&mut self, prompt: &SpeculativePrompt) -> PrefillProgress {
        // While the batch size is limited for lack of memory, free memory is left to the preempted sequences.
        if !self.limit.is_unlimited() {
            return PrefillProgress::Done;
        }
        let rows_after = |past: usize| {
            let short = prefill_rows(&self.stats, speculative_prefill::CHUNK_TIME, past);
            short.max(KV_BLOCK_TOKENS.min(prefill_rows(&self.stats, MAX_PREFILL_TIME, past)))
        };
        match speculative_prefill::run_chunk(&self.model, &mut self.pool, prompt, rows_after) {
            Ok(progress) => {
                self.stats.set_kv_tokens(self.pool.tokens());
                progress
            }
            Err(error) => {
                tracing::warn!(%error, "speculative prefill failed; the expected call is not affected");
                if let ForwardFailure::Device = self.model.failure(&error) {
                    self.device_failure = Some(EngineFailure::DeviceLost { error: error.to_string() });
                }
                PrefillProgress::Done
            }
        }
    }

    /// Adds a new sequence to the batch, or to the queue of preempted sequences if that is not empty or the batch is at
    /// its limit.
    fn enqueue(&mut self, request: SequenceRequest) {
        let mut sequence = Sequence::new(request, self.next_arrival);
        self.next_arrival += 1;
        match sequence.begin(&self.vocabulary) {
            TokenOutcome::Continue => {}
            TokenOutcome::Finished(finish) => return sequence.end(Ok(finish)),
            TokenOutcome::Failed(failure) => return sequence.end(Err(GenerationError::Failed(failure))),
        }
        // Preempted sequences resume before new ones start.
        if self.preempted.is_empty() && self.running.len() < self.limit.rows() {
            self.start(sequence);
        } else {
            self.preempted.push_back(sequence);
        }
    }

    /// Adds a sequence to the batch. Its KV blocks begin with those of its longest cached prefix.
    fn start(&mut self, mut sequence: Sequence) {
        let kv = self.pool.begin(&sequence.tokens, sequence.long_context, sequence.sampling.deterministic);
        sequence.cached_tokens.get_or_insert(kv.len());
        self.stats.set_kv_tokens(self.pool.tokens());
        let at = self.running.partition_point(|r| r.sequence.arrival < sequence.arrival);
        self.running.insert(at, Running { sequence, kv, last_step: 0 });
    }

    fn remove_cancelled(&mut self) {
        for at in (0..self.running.len()).rev() {
            if self.running[at].sequence.outbox.is_cancelled() {
                let running = self.running.remove(at);
                self.finish(running, Err(GenerationError::Cancelled));
            }
        }
        for at in (0..self.preempted.len()).rev() {
            if self.preempted[at].outbox.is_cancelled()
                && let Some(sequence) = self.preempted.remove(at)
            {
                sequence.end(Err(GenerationError::Cancelled));
            }
        }
    }

    /// Computes one forward pass over the running sequences and applies its scores.
    fn step(&mut self) -> Result<(), EngineFailure> {
        if let Some(failure) = self.device_failure.take() {
            return Err(failure);
        }
        self.remove_cancelled();
        self.steps += 1;
        let plan = self.plan();
        if plan.is_empty() {
            return Ok(());
        }
        let work = plan.iter().zip(&self.running).map(|(e, r)| BatchWork::new(e.tokens.len(), r.kv.len())).sum();
        if let Some(hook) = &self.before_step {
            hook();
        }
        let started = Instant::now();
        let entries: Vec<BatchEntry<'_>> = self
            .running
            .iter()
            .zip(&plan)
            .filter(|(_, entry)| !entry.tokens.is_empty())
            .map(|(r, entry)| BatchEntry { kv: &r.kv, tokens: &entry.tokens, scored: entry.scored })
            .collect();
        // One deterministic sequence makes the whole pass batch-invariant.
        let batch_invariant = self.running.iter().any(|r| r.sequence.sampling.deterministic);
        let scores = self.model.forward(&mut self.pool, &entries, batch_invariant);
        drop(entries);
        let outcomes = scores.and_then(|scores| self.apply_scores(scores, &plan));
        let took = started.elapsed();
        let prefilled = plan.iter().filter(|e| e.drafted == 0 && e.tokens.len() > 1).map(|e| e.tokens.len());
        if prefilled.sum::<usize>() >= MIN_CHUNK_ROWS {
            // The work includes the rows of decoding sequences, since they took part of the time.
            self.stats.record_prefill(work, took);
        } else if plan.iter().all(|e| e.tokens.len() == 1) {
            self.stats.record_decode(took);
        }
        match outcomes {
            Ok(outcomes) => {
                self.limit.on_success();
                for (at, outcome) in outcomes.into_iter().enumerate().rev() {
                    let result = match outcome {
                        TokenOutcome::Continue => continue,
                        TokenOutcome::Finished(finish) => Ok(finish),
                        TokenOutcome::Failed(failure) => Err(GenerationError::Failed(failure)),
                    };
                    let running = self.running.remove(at);
                    self.finish(running, result);
                }
                Ok(())
            }
            Err(error) => self.on_forward_failure(&error, plan.iter().map(|entry| entry.tokens.len()).sum()),
        }
    }

    /// Releases the KV blocks of a sequence that left the batch, and reports its end to the reader of its text.
    fn finish(&mut self, running: Running, result: Result<FinishReason, GenerationError>) {
        let Running { sequence, kv, .. } = running;
        match &result {
            Err(GenerationError::Failed(_)) => self.pool.discard(kv),
            Ok(_) | Err(GenerationError::Cancelled) => self.pool.end(kv, &sequence.tokens),
        }
        // Published only when blocks are released, not with every token, because each change of the state wakes its
        // listeners.
        self.stats.set_kv_tokens(self.pool.tokens());
        if result.is_ok() {
            self.admission.record_output(sequence.tokens.len() - sequence.prompt_len);
        }
        sequence.end(result);
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests;
