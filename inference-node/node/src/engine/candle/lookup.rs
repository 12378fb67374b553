//! Prompt lookup: guessing the next tokens from what the sequence already holds, for one forward pass to verify.
//!
//! A revision mostly repeats its input: its prompt, and the job's previous revision, which need not be in the prompt. Where
//! the last tokens stood before, what followed them is guessed to follow again; the guesses go through the forward pass
//! beside the token they follow, and those the model would have chosen itself are kept. The text is the same with and
//! without, as far as the kernels compute one row as they compute several (asked to be deterministic, always); only its
//! speed changes. Saxena, 2023: <https://github.com/apoorvumang/prompt-lookup-decoding>.
//!
//! Both sources are one text to look in, the revision first. What was guessed right is gone on with; otherwise text is repeated
//! in order, so the next place after the last one comes before all others. The index is that of LZ77 compressors (RFC 1951,
//! section 4): the latest place of each hash, and for each place the one before it; so it takes four bytes a token.
//!
//! How many to guess is a sum: rows cost what the pool's measured rates say, and a guess is right as often as this
//! sequence's were. Where no number of guesses pays, none are made, but for a rare one to see whether that has changed.

mod index;

use self::index::Index;

/// Tokens that must have stood together before.
const CONTEXT: usize = 3;
/// Guesses of one step.
pub const MOST: usize = 24;
/// Share of right guesses that is assumed before there were any, and how fast it follows what happens.
const ASSUMED: f64 = 0.7;
const FOLLOWS: f64 = 0.1;
/// Tokens between two guesses while none pay, and how many are made then.
const PROBE_EVERY: usize = 48;
const PROBE: usize = 2;

/// What a forward pass costs, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Whatever is in it.
    pub pass: f64,
    pub row: f64,
}

#[derive(Debug)]
pub struct Lookup {
    /// The job's previous revision. Places count through it and then through the sequence.
    previous: Vec<u32>,
    /// Tokens of the prompt, after which a revision begins.
    prompt: usize,
    /// The revision's contexts.
    revision: Index,
    /// The sequence's, whose places count from its own beginning.
    sequence: Index,
    /// The place where the last guesses were taken from, and would go on.
    cursor: usize,
    /// Share of guesses that were right, lately.
    right: f64,
    /// Length at which a guess is made although it does not pay.
    probe_at: usize,
    proposed: u64,
    accepted: u64,
}

impl Lookup {
    /// For a sequence whose first `prompt` tokens are given, and which may repeat `previous`.
    pub fn new(previous: Vec<u32>, prompt: usize) -> Self {
        let mut revision = Index::default();
        revision.read(&previous);
        let sequence = Index::default();
        Self { previous, prompt, revision, sequence, cursor: 0, right: ASSUMED, probe_at: 0, proposed: 0, accepted: 0 }
    }

    /// Indexes what is known of the sequence, so that its first step need not.
    pub fn read(mut self, tokens: &[u32]) -> Self {
        self.sequence.read(tokens);
        self
    }

    /// Guesses of all steps, and those that were right.
    pub fn counts(&self) -> (u64, u64) {
        (self.proposed, self.accepted)
    }

    /// At most `most` tokens that may follow `tokens`.
    pub fn propose(&mut self, tokens: &[u32], most: usize, cost: Cost) -> Vec<u32> {
        let mut length = self.length(cost).min(most);
        if length == 0 && tokens.len() >= self.probe_at {
            length = PROBE.min(most);
        }
        if length == 0 {
            return Vec::new();
        }
        let Some(from) = self.source(tokens) else { return Vec::new() };
        self.cursor = from;
        // What follows may reach into the guesses themselves, as in a line of dashes.
        let mut guesses: Vec<u32> = Vec::with_capacity(length);
        for at in from..from + length {
            let token = match at.checked_sub(self.previous.len()) {
                // The revision has ended.
                Some(_) if from < self.previous.len() => None,
                Some(at) => tokens.get(at).or_else(|| guesses.get(at - tokens.len())).copied(),
                None => self.previous.get(at).copied(),
            };
            let Some(token) = token else { break };
            guesses.push(token);
        }
        guesses
    }

    /// Of `proposed` guesses the first `accepted` were right; the sequence has `length` tokens now.
    pub fn judged(&mut self, proposed: usize, accepted: usize, length: usize) {
        if proposed == 0 {
            return;
        }
        self.proposed += proposed as u64;
        self.accepted += accepted as u64;
        self.cursor += accepted;
        self.probe_at = length + PROBE_EVERY;
        for trial in 0..(accepted + 1).min(proposed) {
            let hit = if trial < accepted { 1.0 } else { 0.0 };
            self.right += FOLLOWS * (hit - self.right);
        }
    }

    /// The number of guesses that gives the most tokens a second.
    fn length(&self, cost: Cost) -> usize {
        let rate = |guesses: usize| {
            let p = self.right.min(0.99);
            let tokens = (1.0 - p.powi(guesses as i32 + 1)) / (1.0 - p);
            tokens / (cost.pass + cost.row * (guesses + 1) as f64)
        };
        let mut best = (0, rate(0));
        for guesses in 1..=MOST {
            let rate = rate(guesses);
            if rate > best.1 {
                best = (guesses, rate);
            }
        }
        best.0
    }

    /// The place whose token is the guess for the next.
    fn source(&mut self, tokens: &[u32]) -> Option<usize> {
        let written = tokens.get(self.prompt..).unwrap_or_default();
        // Too little is written to look for, but it may be how the revision begins.
        if written.len() < CONTEXT && self.previous.len() > written.len() && self.previous.starts_with(written) {
            return Some(written.len());
        }
        let tail = tokens.last_chunk::<CONTEXT>()?;
        self.sequence.read(tokens);
        let first = self.previous.len();
        // The model's own token after the right guesses went on with the revision.
        if self.cursor + 1 < first && self.previous[..=self.cursor].ends_with(tail) {
            return Some(self.cursor + 1);
        }
        let revision = self.revision.places(&self.previous, tail);
        let mut sequence = self.sequence.places(tokens, tail);
        sequence.iter_mut().for_each(|place| *place += first);
        // The latest first, in each.
        let next = |places: &[usize]| places.iter().rev().find(|place| **place >= self.cursor).copied();
        let latest = || sequence.first().or(revision.first()).copied();
        next(&revision).or_else(|| next(&sequence)).or_else(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that cost almost nothing beside the pass.
    const CHEAP: Cost = Cost { pass: 1.0, row: 0.01 };

    /// Decodes the rest of `text` after its first `known` tokens; returns the passes it took.
    fn passes(text: &[u32], known: usize, cost: Cost) -> usize {
        passes_with(&[], text, known, cost)
    }

    /// The same with a previous revision.
    fn passes_with(previous: &[u32], text: &[u32], known: usize, cost: Cost) -> usize {
        let mut lookup = Lookup::new(previous.to_vec(), known);
        let mut length = known;
        let mut passes = 0;
        while length < text.len() {
            let guesses = lookup.propose(&text[..length], text.len() - length - 1, cost);
            let right = guesses.iter().zip(&text[length..]).take_while(|(a, b)| a == b).count();
            length += right + 1;
            lookup.judged(guesses.len(), right, length);
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
    fn a_repeated_text_takes_few_passes_and_a_new_one_as_many_as_tokens() {
        let prompt = words(1, 400);
        let mut repeated = prompt.clone();
        repeated.extend(&prompt[..200]);
        repeated.extend(words(2, 10));
        repeated.extend(&prompt[200..]);
        let took = passes(&repeated, 400, CHEAP);
        assert!(took < 410 / 6, "{took}");
        let mut new = prompt.clone();
        new.extend(words(3, 100));
        assert_eq!(passes(&new, 400, CHEAP), 100);
    }

    #[test]
    fn a_revision_that_the_prompt_does_not_hold_is_repeated_as_well() {
        let (prompt, previous) = (words(1, 400), words(2, 300));
        let mut text = prompt.clone();
        text.extend(&previous[..120]);
        text.extend(words(3, 10));
        text.extend(&previous[140..]);
        assert_eq!(passes(&text, 400, CHEAP), 290, "nothing of it is in the prompt");
        let took = passes_with(&previous, &text, 400, CHEAP);
        assert!(took < 290 / 6, "{took}");
        // It begins like the revision: the first guess needs no context.
        assert_eq!(Lookup::new(previous.clone(), 400).propose(&text[..401], 4, CHEAP), previous[1..5]);
        // Another answer takes a pass for each token, as without.
        let mut other = prompt.clone();
        other.extend(words(4, 100));
        assert_eq!(passes_with(&previous, &other, 400, CHEAP), 100);
    }

    #[test]
    fn a_revision_full_of_the_same_words_is_followed_where_it_goes_on() {
        // Every line begins alike, more often than occurrences are remembered, in the prompt too.
        let line = |n: u32| [1, 2, 3, 4, 100 + n, 200 + n, 300 + n];
        let prompt: Vec<u32> = (100..140).flat_map(line).collect();
        let previous: Vec<u32> = (0..40).flat_map(line).collect();
        let text = [&prompt[..], &previous[..]].concat();
        let took = passes_with(&previous, &text, prompt.len(), CHEAP);
        assert!(took <= previous.len() / 12, "{took}");
        let after_its_end = Lookup::new(previous.clone(), 0).propose(&previous[273..280], 9, CHEAP);
        assert!(after_its_end.is_empty(), "{after_its_end:?}");
    }

    #[test]
    fn guesses_that_do_not_pay_are_not_made() {
        let lookup = |right| Lookup { right, ..Lookup::new(Vec::new(), 0) };
        let dear = Cost { pass: 0.0, row: 1.0 };
        assert_eq!(lookup(0.9).length(dear), 0, "a row costs as much as a token");
        assert_eq!(lookup(0.0).length(CHEAP), 0);
        assert_eq!(lookup(0.99).length(CHEAP), MOST);
        assert!((1..8).contains(&lookup(0.5).length(CHEAP)));
        let mut prompt = words(1, 100);
        // The context comes back and something else follows.
        for round in 0..400 {
            prompt.extend([7, 8, 9, 5000 + round]);
        }
        let mut lookup = Lookup::new(Vec::new(), 100);
        let mut guessed = 0;
        for length in 100..prompt.len() {
            let guesses = lookup.propose(&prompt[..length], 8, Cost { pass: 1.0, row: 0.3 });
            let right = guesses.iter().zip(&prompt[length..]).take_while(|(a, b)| a == b).count();
            lookup.judged(guesses.len(), right, length + 1);
            guessed += guesses.len();
        }
        assert!(guessed < 400, "{guessed} guesses in 1,600 tokens, none of which could be right for long");
    }

    #[test]
    fn what_follows_may_be_the_guesses_themselves() {
        let mut lookup = Lookup::new(Vec::new(), 5);
        assert_eq!(lookup.propose(&[5, 4, 4, 4, 4], 6, CHEAP), [4; 6]);
    }
}
