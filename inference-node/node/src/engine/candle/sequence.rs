//! One generation as its batcher's thread sees it: what is known of it, and what becomes of it with each token.

use std::time::{Duration, Instant};

use cfq_proto::job::{Completion, FinishReason, JobFailure, Sampling, TokenLogprob, TokenLogprobs, Usage};

use crate::engine::candle::lookup::Lookup;
use crate::engine::candle::opening::Opening;
use crate::engine::candle::room::Held;
use crate::engine::grammar::Grammar;
use crate::engine::sampling::{self, sample, sample_within};
use crate::engine::text::TextStream;
use crate::engine::{Ended, Outbox};
use crate::models::tokenizer::Vocabulary;

/// Most places told beside each token, as OpenAI's API bounds them.
const LOGPROBS_MOST: u8 = 20;

/// An admitted sequence on its way to the thread.
pub struct Job {
    pub opening: Opening,
    pub lookup: Lookup,
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
    logprobs: Vec<TokenLogprobs>,
    /// Of the output, what the grammar left no choice about; and the time that grammar took.
    forced: usize,
    constrained: Duration,
    began: Instant,
    /// Until the first token was drawn: what a grammar writes before that says nothing of the model.
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
            lookup: job.lookup,
            text,
            logprobs: Vec::new(),
            forced: 0,
            constrained: Duration::ZERO,
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
                // More may be found: what an earlier attempt wrote, or a forced beginning.
                cached_tokens: self.cached.unwrap_or(0).min(self.prompt) as u32,
                output_tokens: (self.tokens.len() - self.prompt) as u32,
                resumed_tokens: self.resumed as u32,
                forced_tokens: self.forced as u32,
                constraint_ms: self.constrained.as_millis() as u64,
                first_token_ms: self.first_token.unwrap_or_else(|| self.began.elapsed()).as_millis() as u64,
                total_ms: self.began.elapsed().as_millis() as u64,
            };
            let logprobs = std::mem::take(&mut self.logprobs);
            Completion { text: std::mem::take(&mut self.text), finish, usage, logprobs }
        });
        // The room is free before anybody hears of the end: who asks next finds it.
        drop(self.held);
        self.outbox.end(how);
    }

    /// Takes up what the grammar leaves no choice about, before anything was computed: it goes through the model with the
    /// prompt.
    pub fn open(&mut self, vocabulary: &Vocabulary) -> After {
        let mut wrote = Wrote::default();
        let after = self.force(&mut wrote, vocabulary);
        self.tell(&wrote);
        after
    }

    /// Draws the token after those known from its scores, and takes up what must follow it.
    pub fn next_token(&mut self, logits: &mut [f32], vocabulary: &Vocabulary) -> After {
        let (history, prompt, sampling) = (&self.tokens, self.prompt, &self.sampling);
        // Drawing uses the scores up.
        let scores = sampling.logprobs.map(|best| (best, logits.to_vec()));
        let drawn = match &mut self.grammar {
            Some(grammar) => {
                let began = Instant::now();
                let drawn = sample_within(logits, history, prompt, sampling, grammar).map_err(|e| e.to_string());
                self.constrained += began.elapsed();
                drawn
            }
            None => sample(logits, history, prompt, sampling).map_err(|e| e.to_string()),
        };
        let token = match drawn {
            Ok(token) => token,
            Err(reason) => return After::Failed(reason),
        };
        if let Some((best, scores)) = scores {
            self.told(token, sampling::logprobs(&scores, token, usize::from(best.min(LOGPROBS_MOST))), vocabulary);
        }
        self.first_token.get_or_insert_with(|| self.began.elapsed());
        let mut wrote = Wrote::default();
        let after = match self.take(token, &mut wrote, vocabulary) {
            After::GoesOn => self.force(&mut wrote, vocabulary),
            ended => ended,
        };
        // A run that was forced is told as one, so that no journal ends in the middle of it.
        self.tell(&wrote);
        after
    }

    fn force(&mut self, wrote: &mut Wrote, vocabulary: &Vocabulary) -> After {
        if !self.sampling.jump_forward {
            return After::GoesOn;
        }
        loop {
            let began = Instant::now();
            let forced = self.grammar.as_mut().map(Grammar::forced).unwrap_or_default();
            self.constrained += began.elapsed();
            if forced.is_empty() {
                return After::GoesOn;
            }
            for token in forced {
                self.forced += 1;
                if self.sampling.logprobs.is_some() {
                    self.told(token, (0.0, Vec::new()), vocabulary);
                }
                match self.take(token, wrote, vocabulary) {
                    After::GoesOn => {}
                    ended => return ended,
                }
            }
        }
    }

    fn told(&mut self, token: u32, (own, best): (f32, Vec<(u32, f32)>), vocabulary: &Vocabulary) {
        let named = |token: u32, logprob| {
            let token = String::from_utf8_lossy(vocabulary.bytes_of(token)).into_owned();
            TokenLogprob { token, logprob }
        };
        let top_logprobs = best.into_iter().map(|(token, logprob)| named(token, logprob)).collect();
        self.logprobs.push(TokenLogprobs { own: named(token, own), top_logprobs });
    }

    /// Appends a token.
    fn take(&mut self, token: u32, wrote: &mut Wrote, vocabulary: &Vocabulary) -> After {
        let complete = match &mut self.grammar {
            Some(grammar) => {
                let began = Instant::now();
                let accepted = grammar.accept(token);
                self.constrained += began.elapsed();
                match accepted {
                    Ok(complete) => complete,
                    Err(error) => return After::Failed(error.to_string()),
                }
            }
            None => false,
        };
        self.tokens.push(token);
        wrote.tokens.push(token);
        let ends = vocabulary.is_end(token);
        let piece = self.stream.push(if ends { &[] } else { vocabulary.bytes_of(token) });
        wrote.text.push_str(&piece.text);
        let finish = if ends || complete || piece.stopped || self.is_enough(&wrote.text, &piece.text) {
            FinishReason::Stop
        } else if self.tokens.len() >= self.longest {
            FinishReason::Length
        } else {
            return After::GoesOn;
        };
        wrote.text.push_str(&self.stream.finish());
        After::Finished(finish)
    }

    /// The answer has said all that is wanted of it: it goes on with `wrote`, which ends with `new`.
    fn is_enough(&self, wrote: &str, new: &str) -> bool {
        // Only these make a field known.
        if self.sampling.enough.is_empty() || !new.contains([',', '}']) {
            return false;
        }
        let text = format!("{}{wrote}", self.text);
        self.sampling.enough.iter().any(|enough| enough.of(&text).is_some())
    }

    fn tell(&mut self, wrote: &Wrote) {
        if !wrote.tokens.is_empty() {
            self.text.push_str(&wrote.text);
            self.outbox.wrote(&wrote.text, &wrote.tokens);
        }
    }
}

/// What one step added.
#[derive(Default)]
struct Wrote {
    text: String,
    tokens: Vec<u32>,
}

pub fn engine_failure(reason: String) -> Ended {
    Ended::Failed(JobFailure::Engine { reason })
}
