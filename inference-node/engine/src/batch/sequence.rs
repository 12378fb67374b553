//! One generation on the batcher thread: its tokens, its text, and its end.

use std::time::{Duration, Instant};

use cfq_proto::job::{Completion, FinishReason, JobFailure, Sampling, TokenLogprob, TokenLogprobs, Usage};

use crate::batch::admission::Permit;
use crate::batch::prompt_lookup::PromptLookup;
use crate::batch::resume::SequenceInit;
use crate::generation::{GenerationError, Outbox};
use crate::model::tokenizer::Vocabulary;
use crate::sampling::grammar::{Grammar, GrammarError};
use crate::sampling::text::TextStream;
use crate::sampling::{self, SampleError, sample, sample_constrained};

/// Maximum number of alternative tokens reported with the log probability of each token; the limit of OpenAI's API.
const MAX_TOP_LOGPROBS: u8 = 20;

/// An admitted sequence that is sent to the batcher thread.
pub struct SequenceRequest {
    pub init: SequenceInit,
    pub lookup: PromptLookup,
    pub sampling: Sampling,
    /// Maximum length of prompt and output, in tokens.
    pub max_len: usize,
    /// Whether RoPE uses the long-context frequencies. Depends on the requested length and not on this machine's
    /// memory, so that every machine computes the same text.
    pub long_context: bool,
    pub permit: Permit,
    pub outbox: Outbox,
}

/// An admitted sequence, in the batch or preempted.
pub struct Sequence {
    /// Arrival number; sequences that arrived later have larger numbers.
    pub arrival: u64,
    /// Tokens of the prompt and of the output so far.
    pub tokens: Vec<u32>,
    /// Number of prompt tokens.
    pub prompt_len: usize,
    /// Number of output tokens that are kept from an earlier generation.
    resumed_tokens: usize,
    /// Prefix cache hit when the sequence first entered the batch, in tokens. When it resumes after a preemption, it
    /// finds its own keys and values, which do not count.
    pub cached_tokens: Option<usize>,
    /// See [`SequenceRequest::long_context`].
    pub long_context: bool,
    pub sampling: Sampling,
    grammar: Option<Grammar>,
    /// See [`SequenceRequest::max_len`].
    pub max_len: usize,
    pub lookup: PromptLookup,
    stream: TextStream,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    /// Number of output tokens that the grammar forced.
    forced_tokens: usize,
    /// Time spent evaluating the grammar.
    constraint_time: Duration,
    started: Instant,
    /// Time from `started` to the first sampled token. Tokens that the grammar forced before it do not count, since
    /// they were not computed by the model.
    time_to_first_token: Option<Duration>,
    pub outbox: Outbox,
    // Reservation of KV tokens and a slot. The last field, so that it is dropped last.
    permit: Permit,
}

/// Result of appending tokens to a sequence.
pub enum TokenOutcome {
    /// The sequence continues.
    Continue,
    /// The output is complete.
    Finished(FinishReason),
    /// The sequence cannot continue.
    Failed(JobFailure),
}

impl Sequence {
    /// Creates a sequence of which nothing is computed yet, and sends the text of an earlier generation to the
    /// reader.
    pub fn new(request: SequenceRequest, arrival: u64) -> Self {
        let SequenceInit { tokens, prompt_len, grammar, stream, text } = request.init;
        if !text.is_empty() {
            request.outbox.report_step(&text);
        }
        Self {
            arrival,
            resumed_tokens: tokens.len() - prompt_len,
            prompt_len,
            tokens,
            cached_tokens: None,
            long_context: request.long_context,
            stream,
            sampling: request.sampling,
            grammar,
            max_len: request.max_len,
            lookup: request.lookup,
            text,
            logprobs: Vec::new(),
            forced_tokens: 0,
            constraint_time: Duration::ZERO,
            started: Instant::now(),
            time_to_first_token: None,
            outbox: request.outbox,
            permit: request.permit,
        }
    }

    /// Releases the reservation and reports the end to the reader.
    pub fn end(mut self, result: Result<FinishReason, GenerationError>) {
        let result = result.map(|finish| {
            let (drafted, accepted) = self.lookup.counts();
            let usage = Usage {
                drafted_tokens: drafted as u32,
                accepted_tokens: accepted as u32,
                prompt_tokens: self.prompt_len as u32,
                // Limited to the prompt: the cached prefix may also contain output tokens of an earlier generation
                // or forced tokens.
                cached_tokens: self.cached_tokens.unwrap_or(0).min(self.prompt_len) as u32,
                output_tokens: (self.tokens.len() - self.prompt_len) as u32,
                resumed_tokens: self.resumed_tokens as u32,
                forced_tokens: self.forced_tokens as u32,
                constraint_ms: self.constraint_time.as_millis() as u64,
                first_token_ms: self.time_to_first_token.unwrap_or_else(|| self.started.elapsed()).as_millis() as u64,
                total_ms: self.started.elapsed().as_millis() as u64,
            };
            let logprobs = std::mem::take(&mut self.logprobs);
            Completion { text: std::mem::take(&mut self.text), finish, usage, logprobs }
        });
        // Released before the reader sees the end, so that its next request finds the tokens free.
        drop(self.permit);
        self.outbox.end(result);
    }

    /// Appends the tokens that the grammar forces at the beginning of the output; they are prefilled together with the
    /// prompt.
    pub fn begin(&mut self, vocabulary: &Vocabulary) -> TokenOutcome {
        let mut output = StepOutput::default();
        let outcome = self.append_forced(&mut output, vocabulary);
        self.flush(&output);
        outcome
    }

    /// Samples the next token from `logits`, and appends it and the tokens that the grammar forces after it. `logits`
    /// is overwritten.
    pub fn next_token(&mut self, logits: &mut [f32], vocabulary: &Vocabulary) -> TokenOutcome {
        let (history, prompt_len, sampling) = (&self.tokens, self.prompt_len, &self.sampling);
        let scores = sampling.logprobs.map(|top| (top, logits.to_vec()));
        let sampled = match &mut self.grammar {
            Some(grammar) => {
                let started = Instant::now();
                let sampled = sample_constrained(logits, history, prompt_len, sampling, grammar);
                self.constraint_time += started.elapsed();
                sampled
            }
            None => sample(logits, history, prompt_len, sampling).map_err(SampleError::from),
        };
        let token = match sampled {
            Ok(token) => token,
            Err(SampleError::Grammar(error)) => return TokenOutcome::Failed(constraint_failure(&error)),
            Err(error @ SampleError::Logits(_)) => {
                return TokenOutcome::Failed(JobFailure::Engine { reason: error.to_string() });
            }
        };
        if let Some((top, scores)) = scores {
            let logprobs = sampling::logprobs(&scores, token, usize::from(top.min(MAX_TOP_LOGPROBS)));
            self.record_logprobs(token, logprobs, vocabulary);
        }
        self.time_to_first_token.get_or_insert_with(|| self.started.elapsed());
        let mut output = StepOutput::default();
        let outcome = match self.append(token, &mut output, vocabulary) {
            TokenOutcome::Continue => self.append_forced(&mut output, vocabulary),
            ended => ended,
        };
        // Consecutive forced tokens are delivered in one step, so that a record of the delivered tokens never ends
        // between them.
        self.flush(&output);
        outcome
    }

    fn append_forced(&mut self, output: &mut StepOutput, vocabulary: &Vocabulary) -> TokenOutcome {
        if !self.sampling.jump_forward {
            return TokenOutcome::Continue;
        }
        loop {
            let started = Instant::now();
            let forced = self.grammar.as_mut().map(Grammar::forced_tokens).unwrap_or_default();
            self.constraint_time += started.elapsed();
            if forced.is_empty() {
                return TokenOutcome::Continue;
            }
            for token in forced {
                self.forced_tokens += 1;
                if self.sampling.logprobs.is_some() {
                    self.record_logprobs(token, (0.0, Vec::new()), vocabulary);
                }
                match self.append(token, output, vocabulary) {
                    TokenOutcome::Continue => {}
                    ended => return ended,
                }
            }
        }
    }

    fn record_logprobs(&mut self, token: u32, (own, top): (f32, Vec<(u32, f32)>), vocabulary: &Vocabulary) {
        let named = |token: u32, logprob| {
            let token = String::from_utf8_lossy(vocabulary.token_bytes(token)).into_owned();
            TokenLogprob { token, logprob }
        };
        let top_logprobs = top.into_iter().map(|(token, logprob)| named(token, logprob)).collect();
        self.logprobs.push(TokenLogprobs { own: named(token, own), top_logprobs });
    }

    fn append(&mut self, token: u32, output: &mut StepOutput, vocabulary: &Vocabulary) -> TokenOutcome {
        let complete = match &mut self.grammar {
            Some(grammar) => {
                let started = Instant::now();
                let accepted = grammar.accept(token);
                self.constraint_time += started.elapsed();
                match accepted {
                    Ok(complete) => complete,
                    Err(error) => return TokenOutcome::Failed(constraint_failure(&error)),
                }
            }
            None => false,
        };
        self.tokens.push(token);
        output.tokens.push(token);
        let is_end = vocabulary.is_end_token(token);
        let piece = self.stream.push(if is_end { &[] } else { vocabulary.token_bytes(token) });
        output.text.push_str(&piece.text);
        let finish = if is_end || complete || piece.stopped || self.stops_early(&output.text, &piece.text) {
            FinishReason::Stop
        } else if self.tokens.len() >= self.max_len {
            FinishReason::Length
        } else {
            return TokenOutcome::Continue;
        };
        output.text.push_str(&self.stream.finish());
        TokenOutcome::Finished(finish)
    }

    /// Whether an early-stop rule is met by the text so far and `output`, which ends with `new`.
    fn stops_early(&self, output: &str, new: &str) -> bool {
        // Early-stop rules examine complete JSON fields, and only these characters complete one.
        if self.sampling.early_stop.is_empty() || !new.contains([',', '}']) {
            return false;
        }
        let text = format!("{}{output}", self.text);
        self.sampling.early_stop.iter().any(|rule| rule.met_by(&text).is_some())
    }

    /// Delivers the output of a step to the reader.
    fn flush(&mut self, output: &StepOutput) {
        if !output.tokens.is_empty() {
            self.text.push_str(&output.text);
            self.outbox.report_step_with_tokens(&output.text, &output.tokens);
        }
    }
}

/// Output of one step.
#[derive(Default)]
struct StepOutput {
    text: String,
    tokens: Vec<u32>,
}

/// The failure of a call whose constraint cannot be evaluated: its request is the cause, so a retry would fail too.
fn constraint_failure(error: &GrammarError) -> JobFailure {
    JobFailure::Rejected { reason: error.to_string() }
}

/// Creates the result of a generation that fails because of the engine, not because of its request.
pub fn failed_by_engine(reason: String) -> GenerationError {
    GenerationError::Failed(JobFailure::Engine { reason })
}
