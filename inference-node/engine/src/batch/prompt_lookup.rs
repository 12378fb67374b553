//! Prompt lookup decoding: draft tokens taken from the text that the sequence already holds, verified in one forward
//! pass.
//!
//! A revision mostly repeats its input: its prompt, and the job's previous revision, which need not be in the prompt.
//! Where the last tokens occurred before, the tokens that followed them are drafted. The drafts go through the forward
//! pass beside the token they follow, and those that the model samples itself are accepted. The text is the same with
//! and without drafts, as far as the kernels compute one row as they compute several (guaranteed for deterministic
//! sequences); only the speed differs. Saxena, 2023: <https://github.com/apoorvumang/prompt-lookup-decoding>.
//!
//! Both sources are searched as one text, the previous revision first. After accepted drafts the next ones continue at
//! the same place; otherwise occurrences behind the last used place come first, because text is repeated in order. The
//! index is that of LZ77 compressors (RFC 1951, section 4): the latest place of each hash, and for each place the one
//! before it, four bytes per token.
//!
//! The number of drafts maximises the expected tokens per second, from the measured cost of a pass and of a row, and
//! from the acceptance rate of this sequence. Where no number pays off, nothing is drafted except for a rare probe that
//! notices when that changes.

mod index;

use self::index::ContextIndex;

/// Length of the context that must have occurred before, in tokens.
const CONTEXT_TOKENS: usize = 3;
/// Maximum draft tokens of one step.
pub const MAX_DRAFT_TOKENS: usize = 24;
/// Acceptance rate assumed before the first verification.
const INITIAL_ACCEPTANCE: f64 = 0.7;
/// Weight of a new verification in the moving average of the acceptance rate.
const ACCEPTANCE_WEIGHT: f64 = 0.1;
/// Tokens between two probes while drafting does not pay off.
const PROBE_INTERVAL_TOKENS: usize = 48;
/// Draft tokens of a probe.
const PROBE_DRAFT_TOKENS: usize = 2;

/// Cost of a forward pass, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassCost {
    /// Cost that does not depend on the number of rows.
    pub fixed: f64,
    /// Cost of each row.
    pub per_row: f64,
}

/// The draft source of one sequence. Places count through the previous revision and then through the sequence.
#[derive(Debug)]
pub struct PromptLookup {
    /// Tokens of the job's previous revision; empty if there is none.
    previous: Vec<u32>,
    /// Length of the sequence's prompt, after which its output begins, in tokens.
    prompt_len: usize,
    /// Contexts of the previous revision.
    previous_index: ContextIndex,
    /// Contexts of the sequence, whose places count from its own beginning.
    sequence_index: ContextIndex,
    /// The place where the last drafts were taken from, advanced by the accepted ones.
    cursor: usize,
    /// Moving average of the acceptance rate.
    acceptance: f64,
    /// Sequence length from which on the next probe is made.
    probe_at: usize,
    drafted: u64,
    accepted: u64,
}

impl PromptLookup {
    /// The draft source of a sequence with a prompt of `prompt_len` tokens that may repeat `previous`.
    pub fn new(previous: Vec<u32>, prompt_len: usize) -> Self {
        let mut previous_index = ContextIndex::default();
        previous_index.extend(&previous);
        Self {
            previous,
            prompt_len,
            previous_index,
            sequence_index: ContextIndex::default(),
            cursor: 0,
            acceptance: INITIAL_ACCEPTANCE,
            probe_at: 0,
            drafted: 0,
            accepted: 0,
        }
    }

    /// Indexes the known tokens of the sequence in advance, off the batcher thread.
    pub fn indexed(mut self, tokens: &[u32]) -> Self {
        self.sequence_index.extend(tokens);
        self
    }

    /// Number of tokens drafted and accepted in all steps.
    pub fn counts(&self) -> (u64, u64) {
        (self.drafted, self.accepted)
    }

    /// At most `max` tokens that may follow `tokens`, the whole sequence.
    pub fn draft(&mut self, tokens: &[u32], max: usize, cost: PassCost) -> Vec<u32> {
        let mut length = self.best_length(cost).min(max);
        if length == 0 && tokens.len() >= self.probe_at {
            length = PROBE_DRAFT_TOKENS.min(max);
        }
        if length == 0 {
            return Vec::new();
        }
        let Some(from) = self.continuation(tokens) else { return Vec::new() };
        self.cursor = from;
        // The continuation may reach into the drafts themselves, as in a line of dashes.
        let mut drafts: Vec<u32> = Vec::with_capacity(length);
        for at in from..from + length {
            let token = match at.checked_sub(self.previous.len()) {
                // The previous revision has ended.
                Some(_) if from < self.previous.len() => None,
                Some(at) => tokens.get(at).or_else(|| drafts.get(at - tokens.len())).copied(),
                None => self.previous.get(at).copied(),
            };
            let Some(token) = token else { break };
            drafts.push(token);
        }
        drafts
    }

    /// Records that of `drafted` tokens the first `accepted` were accepted; the sequence has `len` tokens now.
    pub fn record_verified(&mut self, drafted: usize, accepted: usize, len: usize) {
        if drafted == 0 {
            return;
        }
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.cursor += accepted;
        self.probe_at = len + PROBE_INTERVAL_TOKENS;
        // Tokens after the first rejected one were not verified.
        for trial in 0..(accepted + 1).min(drafted) {
            let hit = if trial < accepted { 1.0 } else { 0.0 };
            self.acceptance += ACCEPTANCE_WEIGHT * (hit - self.acceptance);
        }
    }

    /// The number of draft tokens with the highest expected rate of tokens per second. With acceptance p and n drafts a
    /// pass yields 1 + p + ... + p^n tokens on average.
    fn best_length(&self, cost: PassCost) -> usize {
        let rate = |drafts: usize| {
            let p = self.acceptance.min(0.99);
            let tokens = (1.0 - p.powi(drafts as i32 + 1)) / (1.0 - p);
            tokens / (cost.fixed + cost.per_row * (drafts + 1) as f64)
        };
        let mut best = (0, rate(0));
        for drafts in 1..=MAX_DRAFT_TOKENS {
            let rate = rate(drafts);
            if rate > best.1 {
                best = (drafts, rate);
            }
        }
        best.0
    }

    /// The place of the token that is drafted to follow `tokens`.
    fn continuation(&mut self, tokens: &[u32]) -> Option<usize> {
        let output = tokens.get(self.prompt_len..).unwrap_or_default();
        // The output is shorter than a context, but it may be how the previous revision begins.
        if output.len() < CONTEXT_TOKENS && self.previous.len() > output.len() && self.previous.starts_with(output) {
            return Some(output.len());
        }
        let tail = tokens.last_chunk::<CONTEXT_TOKENS>()?;
        self.sequence_index.extend(tokens);
        let first = self.previous.len();
        // The token that the model sampled after the accepted drafts continued the previous revision.
        if self.cursor + 1 < first && self.previous[..=self.cursor].ends_with(tail) {
            return Some(self.cursor + 1);
        }
        let previous = self.previous_index.places_after(&self.previous, tail);
        let mut sequence = self.sequence_index.places_after(tokens, tail);
        sequence.iter_mut().for_each(|place| *place += first);
        // Each list has its latest place first.
        let next = |places: &[usize]| places.iter().rev().find(|place| **place >= self.cursor).copied();
        let latest = || sequence.first().or(previous.first()).copied();
        next(&previous).or_else(|| next(&sequence)).or_else(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows cost almost nothing compared with the pass.
    const CHEAP_ROWS: PassCost = PassCost { fixed: 1.0, per_row: 0.01 };

    /// Decodes the rest of `text` after its first `known` tokens; returns the number of passes.
    fn passes(text: &[u32], known: usize, cost: PassCost) -> usize {
        passes_with(&[], text, known, cost)
    }

    /// As [`passes`], with a previous revision.
    fn passes_with(previous: &[u32], text: &[u32], known: usize, cost: PassCost) -> usize {
        let mut lookup = PromptLookup::new(previous.to_vec(), known);
        let mut length = known;
        let mut passes = 0;
        while length < text.len() {
            let drafts = lookup.draft(&text[..length], text.len() - length - 1, cost);
            let accepted = drafts.iter().zip(&text[length..]).take_while(|(a, b)| a == b).count();
            length += accepted + 1;
            lookup.record_verified(drafts.len(), accepted, length);
            passes += 1;
        }
        passes
    }

    fn words(seed: u32, count: usize) -> Vec<u32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 12
        };
        (0..count).map(|_| next() % 5000).collect()
    }

    #[test]
    fn repeated_text_takes_few_passes_and_new_text_one_per_token() {
        let prompt = words(1, 400);
        let mut repeated = prompt.clone();
        repeated.extend(&prompt[..200]);
        repeated.extend(words(2, 10));
        repeated.extend(&prompt[200..]);
        let took = passes(&repeated, 400, CHEAP_ROWS);
        assert!(took < 410 / 6, "{took}");
        let mut new = prompt.clone();
        new.extend(words(3, 100));
        assert_eq!(passes(&new, 400, CHEAP_ROWS), 100);
    }

    #[test]
    fn previous_revision_outside_the_prompt_is_drafted_from() {
        let (prompt, previous) = (words(1, 400), words(2, 300));
        let mut text = prompt.clone();
        text.extend(&previous[..120]);
        text.extend(words(3, 10));
        text.extend(&previous[140..]);
        assert_eq!(passes(&text, 400, CHEAP_ROWS), 290, "nothing of it is in the prompt");
        let took = passes_with(&previous, &text, 400, CHEAP_ROWS);
        assert!(took < 290 / 6, "{took}");
        // The output begins like the revision: the first draft needs no context.
        assert_eq!(PromptLookup::new(previous.clone(), 400).draft(&text[..401], 4, CHEAP_ROWS), previous[1..5]);
        // An unrelated output takes a pass per token, as without drafts.
        let mut other = prompt.clone();
        other.extend(words(4, 100));
        assert_eq!(passes_with(&previous, &other, 400, CHEAP_ROWS), 100);
    }

    #[test]
    fn repetitive_revision_is_followed_in_order() {
        // Every line begins alike, more often than matches are returned, in the prompt too.
        let line = |n: u32| [1, 2, 3, 4, 100 + n, 200 + n, 300 + n];
        let prompt: Vec<u32> = (100..140).flat_map(line).collect();
        let previous: Vec<u32> = (0..40).flat_map(line).collect();
        let text = [&prompt[..], &previous[..]].concat();
        let took = passes_with(&previous, &text, prompt.len(), CHEAP_ROWS);
        assert!(took <= previous.len() / 12, "{took}");
        let after_its_end = PromptLookup::new(previous.clone(), 0).draft(&previous[273..280], 9, CHEAP_ROWS);
        assert!(after_its_end.is_empty(), "{after_its_end:?}");
    }

    #[test]
    fn drafts_that_do_not_pay_off_are_not_made() {
        let lookup = |acceptance| PromptLookup { acceptance, ..PromptLookup::new(Vec::new(), 0) };
        let expensive_rows = PassCost { fixed: 0.0, per_row: 1.0 };
        assert_eq!(lookup(0.9).best_length(expensive_rows), 0, "a row costs as much as a token");
        assert_eq!(lookup(0.0).best_length(CHEAP_ROWS), 0);
        assert_eq!(lookup(0.99).best_length(CHEAP_ROWS), MAX_DRAFT_TOKENS);
        assert!((1..8).contains(&lookup(0.5).best_length(CHEAP_ROWS)));
        let mut prompt = words(1, 100);
        // The context occurs again and something else follows.
        for round in 0..400 {
            prompt.extend([7, 8, 9, 5000 + round]);
        }
        let mut lookup = PromptLookup::new(Vec::new(), 100);
        let mut drafted = 0;
        for length in 100..prompt.len() {
            let drafts = lookup.draft(&prompt[..length], 8, PassCost { fixed: 1.0, per_row: 0.3 });
            let accepted = drafts.iter().zip(&prompt[length..]).take_while(|(a, b)| a == b).count();
            lookup.record_verified(drafts.len(), accepted, length + 1);
            drafted += drafts.len();
        }
        assert!(drafted < 400, "{drafted} drafts in 1,600 tokens, none of which could be accepted for long");
    }

    #[test]
    fn drafts_may_continue_into_themselves() {
        let mut lookup = PromptLookup::new(Vec::new(), 5);
        assert_eq!(lookup.draft(&[5, 4, 4, 4, 4], 6, CHEAP_ROWS), [4; 6]);
    }
}
