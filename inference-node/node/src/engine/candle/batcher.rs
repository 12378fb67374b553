//! One thread per model: all its sequences go through one forward pass a step.
//!
//! Each step takes one token of every decoding sequence and, beside them, as much of the waiting prompts as the measured
//! rate computes in a quarter of a second, oldest first. So decoding never stalls for longer than that behind somebody's
//! long prompt, and a cancel is seen within one step. Sequences join and leave between steps.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use cfq_proto::job::{Completion, FinishReason, JobFailure, Sampling, Usage};

use crate::engine::candle::kv::{PrefixCache, SequenceKv};
use crate::engine::candle::llama::{Llama, Part};
use crate::engine::candle::room::{Figures, Held, Room};
use crate::engine::grammar::Grammar;
use crate::engine::sampling::sample;
use crate::engine::text::TextStream;
use crate::engine::{Ended, Outbox};
use crate::models::tokenizer::Vocabulary;

/// Longest a prompt's chunk may hold up the decoding sequences.
const CHUNK_TIME: Duration = Duration::from_millis(250);
/// Chunk sizes in tokens: the first steps of an unmeasured model, and the bounds of its activations.
const CHUNK_LEAST: usize = 8;
pub const CHUNK_MOST: usize = 512;

/// An admitted sequence on its way to the thread.
pub struct Job {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    pub grammar: Option<Grammar>,
    /// Longest sequence, prompt and output, in tokens; what was reserved.
    pub longest: usize,
    pub held: Held,
    pub outbox: Outbox,
}

struct Sequence {
    /// Prompt and output so far; those from `kv.len()` on are not computed yet.
    tokens: Vec<u32>,
    prompt: usize,
    cached: usize,
    kv: SequenceKv,
    sampling: Sampling,
    grammar: Option<Grammar>,
    longest: usize,
    stream: TextStream,
    text: String,
    began: Instant,
    first_token: Option<Duration>,
    outbox: Outbox,
    // Released after everything above.
    _held: Held,
}

/// What became of a sequence in a step.
enum After {
    GoesOn,
    Finished(FinishReason),
    Failed(String),
}

pub struct Batcher {
    model: Llama,
    vocabulary: Arc<Vocabulary>,
    jobs: Receiver<Job>,
    room: Arc<Room>,
    figures: Arc<Figures>,
    running: Vec<Sequence>,
    cache: PrefixCache,
}

impl Batcher {
    pub fn new(
        model: Llama,
        vocabulary: Arc<Vocabulary>,
        jobs: Receiver<Job>,
        room: Arc<Room>,
        figures: Arc<Figures>,
    ) -> Self {
        Self { model, vocabulary, jobs, room, figures, running: Vec::new(), cache: PrefixCache::default() }
    }

    /// Runs until the engine is dropped. A panic ends the engine: its sequences fail first, then it says why, and the node
    /// ends over it.
    pub fn run(mut self) {
        let figures = self.figures.clone();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            while self.take_up() {
                self.step();
            }
        }));
        drop(self);
        if let Err(panic) = outcome {
            let said = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without words");
            tracing::error!(reason = said, "inference engine stopped");
            figures.broken(said.to_owned());
        }
    }

    /// Lets waiting jobs join; sleeps while there is nothing to do. False when the engine is gone.
    fn take_up(&mut self) -> bool {
        loop {
            let next = if self.running.is_empty() {
                self.jobs.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.jobs.try_recv()
            };
            match next {
                Ok(job) => self.join(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !self.running.is_empty(),
            }
            if !self.running.is_empty() && self.running.len() >= self.room.max_sequences() {
                return true;
            }
        }
    }

    fn join(&mut self, job: Job) {
        let began = Instant::now();
        // Kept sequences live in room nobody reserved.
        self.cache.shrink_to(self.room.free());
        let mut kv = self.model.new_sequence(job.longest);
        let cached = self.cache.fill(&job.prompt, &mut kv);
        self.running.push(Sequence {
            prompt: job.prompt.len(),
            tokens: job.prompt,
            cached,
            kv,
            stream: TextStream::new(&job.sampling.stop),
            sampling: job.sampling,
            grammar: job.grammar,
            longest: job.longest,
            text: String::new(),
            began,
            first_token: None,
            outbox: job.outbox,
            _held: job.held,
        });
    }

    fn step(&mut self) {
        for at in (0..self.running.len()).rev() {
            if self.running[at].outbox.is_cancelled() {
                let sequence = self.running.remove(at);
                self.leave(sequence, Err(Ended::Cancelled));
            }
        }
        if self.running.is_empty() {
            return;
        }
        let began = Instant::now();
        // Prompts share the step evenly: a short one does not wait for a long one to end.
        let prefilling = self.running.iter().filter(|s| s.tokens.len() - s.kv.len() > 1).count();
        let share = (self.chunk() / prefilling.max(1)).max(CHUNK_LEAST);
        let mut prefilled = 0usize;
        let mut parts = Vec::with_capacity(self.running.len());
        for sequence in &mut self.running {
            let waiting = &sequence.tokens[sequence.kv.len()..];
            let take = waiting.len().min(share);
            if waiting.len() > 1 {
                prefilled += take;
            }
            let scored = take == waiting.len();
            parts.push(Part { kv: &mut sequence.kv, tokens: &waiting[..take], scored });
        }
        let scores = self.model.forward(&mut parts);
        drop(parts);
        let outcomes = scores.and_then(|scores| self.advance(scores));
        let took = began.elapsed();
        if prefilled >= CHUNK_LEAST {
            self.figures.prefilled(prefilled, took);
        } else if prefilled == 0 {
            self.figures.decoded(took);
        }
        match outcomes {
            Ok(outcomes) => {
                for (at, outcome) in outcomes.into_iter().enumerate().rev() {
                    let how = match outcome {
                        After::GoesOn => continue,
                        After::Finished(finish) => Ok(finish),
                        After::Failed(reason) => Err(engine_failure(reason)),
                    };
                    let sequence = self.running.remove(at);
                    self.leave(sequence, how);
                }
            }
            Err(error) => {
                // Which sequence is at fault cannot be told, and their KV may be half written.
                for sequence in self.running.drain(..) {
                    sequence.outbox.end(Err(engine_failure(format!("the forward pass failed: {error}"))));
                }
                self.cache.clear();
            }
        }
    }

    /// Tokens of prompts that one step may take.
    fn chunk(&self) -> usize {
        let rate = self.figures.prefill_rate();
        if rate <= 0.0 {
            return CHUNK_LEAST * 4;
        }
        ((rate * CHUNK_TIME.as_secs_f64()) as usize).clamp(CHUNK_LEAST, CHUNK_MOST)
    }

    /// Samples for every sequence whose scores were computed.
    fn advance(&mut self, scores: Option<Tensor>) -> candle_core::Result<Vec<After>> {
        let mut scores = match scores {
            Some(scores) => scores.to_vec2::<f32>()?.into_iter(),
            None => Vec::new().into_iter(),
        };
        let vocabulary = &self.vocabulary;
        let outcomes = self.running.iter_mut().map(|sequence| {
            if sequence.kv.len() < sequence.tokens.len() {
                sequence.outbox.step("");
                return After::GoesOn;
            }
            match scores.next() {
                Some(mut logits) => {
                    // Rows beyond the vocabulary are padding of the matrix.
                    logits.truncate(vocabulary.len());
                    sequence.next_token(&mut logits, vocabulary)
                }
                None => After::Failed("the forward pass returned no scores".to_owned()),
            }
        });
        Ok(outcomes.collect())
    }

    fn leave(&mut self, mut sequence: Sequence, how: Result<FinishReason, Ended>) {
        let how = how.map(|finish| {
            let usage = Usage {
                prompt_tokens: sequence.prompt as u32,
                cached_tokens: sequence.cached as u32,
                output_tokens: (sequence.tokens.len() - sequence.prompt) as u32,
                first_token_ms: sequence.first_token.unwrap_or_default().as_millis() as u64,
                total_ms: sequence.began.elapsed().as_millis() as u64,
            };
            Completion { text: std::mem::take(&mut sequence.text), finish, usage }
        });
        let Sequence { tokens, kv, outbox, _held, .. } = sequence;
        let healthy = !matches!(how, Err(Ended::Failed(_)));
        if healthy {
            self.cache.keep(tokens, kv);
        } else {
            drop(kv);
        }
        // The room is free before anybody hears of the end: who asks next finds it.
        drop(_held);
        self.cache.shrink_to(self.room.free());
        outbox.end(how);
    }
}

impl Sequence {
    fn next_token(&mut self, logits: &mut [f32], vocabulary: &Vocabulary) -> After {
        if let Some(grammar) = &mut self.grammar
            && let Err(error) = grammar.mask(logits)
        {
            return After::Failed(error.to_string());
        }
        let token = match sample(logits, &self.tokens, &self.sampling) {
            Ok(token) => token,
            Err(error) => return After::Failed(error.to_string()),
        };
        self.first_token.get_or_insert_with(|| self.began.elapsed());
        let complete = match &mut self.grammar {
            Some(grammar) => match grammar.accept(token) {
                Ok(complete) => complete,
                Err(error) => return After::Failed(error.to_string()),
            },
            None => false,
        };
        self.tokens.push(token);
        let ends = vocabulary.is_end(token);
        let piece = self.stream.push(if ends { &[] } else { vocabulary.bytes_of(token) });
        let finish = if ends || complete || piece.stopped {
            Some(FinishReason::Stop)
        } else if self.tokens.len() >= self.longest {
            Some(FinishReason::Length)
        } else {
            None
        };
        let mut text = piece.text;
        if finish.is_some() {
            text.push_str(&self.stream.finish());
        }
        self.text.push_str(&text);
        self.outbox.step(&text);
        match finish {
            Some(finish) => After::Finished(finish),
            None => After::GoesOn,
        }
    }
}

fn engine_failure(reason: String) -> Ended {
    Ended::Failed(JobFailure::Engine { reason })
}
