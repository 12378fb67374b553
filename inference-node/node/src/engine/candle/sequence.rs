//! One generation as its batcher's thread sees it: what is known of it, and what becomes of it with each token.

use std::time::{Duration, Instant};

use cfq_proto::job::{Completion, FinishReason, JobFailure, Sampling, Usage};

use crate::engine::candle::lookup::Lookup;
use crate::engine::candle::opening::Opening;
use crate::engine::candle::room::Held;
use crate::engine::grammar::Grammar;
use crate::engine::sampling::sample;
use crate::engine::text::TextStream;
use crate::engine::{Ended, Outbox};
use crate::models::tokenizer::Vocabulary;

/// An admitted sequence on its way to the thread.
pub struct Job {
    pub opening: Opening,
    /// The text it may repeat, see [`Sampling::previous`].
    pub previous: Vec<u32>,
    pub sampling: Sampling,
    /// Longest sequence, prompt and output, in tokens.
    pub longest: usize,
    /// Rotated for long sequences; a matter of what was asked for, not of this node's room.
    pub long: bool,
    pub held: Held,
    pub outbox: Outbox,
}

/// A sequence that was admitted, with or without a place in the pool.
pub struct Sequence {
    /// In the order of their coming.
    pub serial: u64,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    pub prompt: usize,
    /// Of the output, written by an earlier attempt.
    resumed: usize,
    /// Found when it began first; what it finds of itself later does not count.
    pub cached: Option<usize>,
    pub long: bool,
    pub sampling: Sampling,
    grammar: Option<Grammar>,
    pub longest: usize,
    pub lookup: Lookup,
    stream: TextStream,
    text: String,
    began: Instant,
    first_token: Option<Duration>,
    pub outbox: Outbox,
    // Released after everything above.
    held: Held,
}

/// What became of a sequence in a step.
pub enum After {
    GoesOn,
    Finished(FinishReason),
    Failed(String),
}

impl Sequence {
    /// The `serial`th that came. Its reader hears first what an earlier attempt wrote.
    pub fn new(job: Job, serial: u64) -> Self {
        let Opening { tokens, prompt, grammar, stream, text } = job.opening;
        if !text.is_empty() {
            job.outbox.step(&text);
        }
        Self {
            serial,
            resumed: tokens.len() - prompt,
            prompt,
            tokens,
            cached: None,
            long: job.long,
            stream,
            sampling: job.sampling,
            grammar,
            longest: job.longest,
            lookup: Lookup::new(job.previous, prompt),
            text,
            began: Instant::now(),
            first_token: None,
            outbox: job.outbox,
            held: job.held,
        }
    }

    pub fn end(mut self, how: Result<FinishReason, Ended>) {
        let how = how.map(|finish| {
            let (guessed, accepted) = self.lookup.counts();
            let usage = Usage {
                guessed_tokens: guessed as u32,
                accepted_tokens: accepted as u32,
                prompt_tokens: self.prompt as u32,
                cached_tokens: self.cached.unwrap_or(0) as u32,
                output_tokens: (self.tokens.len() - self.prompt) as u32,
                resumed_tokens: self.resumed as u32,
                first_token_ms: self.first_token.unwrap_or_default().as_millis() as u64,
                total_ms: self.began.elapsed().as_millis() as u64,
            };
            Completion { text: std::mem::take(&mut self.text), finish, usage }
        });
        // The room is free before anybody hears of the end: who asks next finds it.
        drop(self.held);
        self.outbox.end(how);
    }

    /// Draws the token after those known from its scores.
    pub fn next_token(&mut self, logits: &mut [f32], vocabulary: &Vocabulary) -> After {
        if let Some(grammar) = &mut self.grammar
            && let Err(error) = grammar.mask(logits)
        {
            return After::Failed(error.to_string());
        }
        let token = match sample(logits, &self.tokens, self.prompt, &self.sampling) {
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
        self.outbox.wrote(&text, &[token]);
        match finish {
            Some(finish) => After::Finished(finish),
            None => After::GoesOn,
        }
    }
}

pub fn engine_failure(reason: String) -> Ended {
    Ended::Failed(JobFailure::Engine { reason })
}
