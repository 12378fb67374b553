//! Prompt lookup decoding: speculative decoding whose draft tokens are copied from earlier text of the sequence,
//! instead of a draft model.
//!
//! The output of a revision mostly repeats two sources: the prompt, and the previous revision, which need not be in
//! the prompt. If the last tokens of the sequence occurred before, the tokens that followed them there are drafted.
//! The drafts are computed in the same forward pass as the last token, and a draft is accepted if the model samples the
//! same token. Drafts do not change the text, only the speed, provided that the kernels return the same result for a
//! row alone and in a batch (guaranteed for deterministic sequences). Saxena, 2023:
//! <https://github.com/apoorvumang/prompt-lookup-decoding>.
//!
//! Both sources are searched as one text, the previous revision first. After accepted drafts, the next drafts continue
//! at the same position; otherwise occurrences after the last used position are preferred, because text is repeated in
//! order. The index is the hash chain of LZ77 compressors (RFC 1951, section 4): the latest position for each hash, and
//! for each position the previous one with the same hash, at four bytes per token.
//!
//! The number of drafts is the one with the highest expected tokens per second, computed from the measured cost of a
//! pass and of a row, and from the acceptance rate of this sequence. If drafting does not pay off, nothing is drafted
//! except an occasional probe, which detects when it pays off again.

mod index;

use self::index::ContextIndex;

/// Number of last tokens that must occur earlier in the text for a draft (the n of an n-gram lookup).
const NGRAM_TOKENS: usize = 3;
/// Maximum draft tokens of one step.
pub const MAX_DRAFT_TOKENS: usize = 24;
/// Acceptance rate assumed before the first verification.
const INITIAL_ACCEPTANCE: f64 = 0.7;
/// Weight of each newly verified draft token in the moving average of the acceptance rate.
const ACCEPTANCE_WEIGHT: f64 = 0.1;
/// Number of tokens generated between two probes while drafting does not pay off.
const PROBE_INTERVAL_TOKENS: usize = 48;
/// Number of draft tokens of a probe.
const PROBE_DRAFT_TOKENS: usize = 2;

/// Cost of a forward pass, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassCost {
    /// Fixed cost of a pass, independent of its number of rows.
    pub fixed: f64,
    /// Additional cost of each row.
    pub per_row: f64,
}

/// The draft source of one sequence. A position is an index into both of its texts joined: first the previous revision,
/// then the sequence.
#[derive(Debug)]
pub struct PromptLookup {
    /// Tokens of the previous revision; empty if there is none.
    previous: Vec<u32>,
    /// Length of the sequence's prompt, after which its output begins, in tokens.
    prompt_len: usize,
    /// Index of the previous revision.
    previous_index: ContextIndex,
    /// Index of the sequence; its positions count from the beginning of the sequence.
    sequence_index: ContextIndex,
    /// Position from which the last drafts were copied, plus the number of accepted ones.
    cursor: usize,
    /// Moving average of the acceptance rate.
    acceptance: f64,
    /// Sequence length, in tokens, at which the next probe is made.
    probe_at: usize,
    drafted: u64,
    accepted: u64,
}

impl PromptLookup {
    /// Creates the draft source of a sequence with a prompt of `prompt_len` tokens. `previous` is the previous
    /// revision, which the output may repeat.
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

    /// Indexes the initial tokens of the sequence; called before the sequence is sent to the batcher thread, to save
    /// that thread the time.
    pub fn indexed(mut self, tokens: &[u32]) -> Self {
        self.sequence_index.extend(tokens);
        self
    }

    /// Number of draft tokens, and how many of them were accepted, in all steps so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.drafted, self.accepted)
    }

    /// Drafts at most `max` tokens that may follow `tokens`, which are all tokens of the sequence so far.
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
        // The copied text may extend into the drafts themselves, for example in a line of dashes.
        let mut drafts: Vec<u32> = Vec::with_capacity(length);
        for at in from..from + length {
            let token = match at.checked_sub(self.previous.len()) {
                // Drafts copied from the previous revision do not continue into the sequence.
                Some(_) if from < self.previous.len() => None,
                Some(at) => tokens.get(at).or_else(|| drafts.get(at - tokens.len())).copied(),
                None => self.previous.get(at).copied(),
            };
            let Some(token) = token else { break };
            drafts.push(token);
        }
        drafts
    }

    /// Records that the first `accepted` of `drafted` draft tokens were accepted. The sequence now has `len` tokens.
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

    /// The number of draft tokens with the highest expected rate of tokens per second. With acceptance rate p and n
    /// drafts, a pass yields 1 + p + ... + p^n tokens on average.
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

    /// Position of the first token to draft after `tokens`; `None` if their last tokens did not occur before.
    fn continuation(&mut self, tokens: &[u32]) -> Option<usize> {
        let output = tokens.get(self.prompt_len..).unwrap_or_default();
        // The output is too short for a lookup, but it equals the beginning of the previous revision.
        if output.len() < NGRAM_TOKENS && self.previous.len() > output.len() && self.previous.starts_with(output) {
            return Some(output.len());
        }
        let tail = tokens.last_chunk::<NGRAM_TOKENS>()?;
        self.sequence_index.extend(tokens);
        let first = self.previous.len();
        // The token sampled after the accepted drafts is also the next token of the previous revision: continue there.
        if self.cursor + 1 < first && self.previous[..=self.cursor].ends_with(tail) {
            return Some(self.cursor + 1);
        }
        let previous = self.previous_index.positions_after(&self.previous, tail);
        let mut sequence = self.sequence_index.positions_after(tokens, tail);
        sequence.iter_mut().for_each(|place| *place += first);
        // Each list is ordered from the latest to the earliest position.
        let next = |places: &[usize]| places.iter().rev().find(|place| **place >= self.cursor).copied();
        let latest = || sequence.first().or(previous.first()).copied();
        next(&previous).or_else(|| next(&sequence)).or_else(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cost of a pass in which a row costs almost nothing compared with the pass itself.
    const CHEAP_ROWS: PassCost = PassCost { fixed: 1.0, per_row: 0.01 };

    /// Simulates the decoding of `text`, of which the first `known` tokens are the prompt; returns the number of
    /// passes.
    fn passes(text: &[u32], known: usize, cost: PassCost) -> usize {
        passes_with(&[], text, known, cost)
    }

    /// Same as [`passes`], with a previous revision.
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
        // The output begins like the previous revision, so the first draft is made before the output has enough tokens
        // for a lookup.
        assert_eq!(PromptLookup::new(previous.clone(), 400).draft(&text[..401], 4, CHEAP_ROWS), previous[1..5]);
        // An unrelated output takes a pass per token, as without drafts.
        let mut other = prompt.clone();
        other.extend(words(4, 100));
        assert_eq!(passes_with(&previous, &other, 400, CHEAP_ROWS), 100);
    }

    #[test]
    fn repetitive_revision_is_followed_in_order() {
        // All lines begin with the same tokens, in the prompt too, and there are more of them than the index returns
        // matches.
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
