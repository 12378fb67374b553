//! Prompt lookup: guessing the next tokens from what the sequence already holds, for one forward pass to verify.
//!
//! A revision mostly repeats its input. Where the last tokens stood before, what followed them is guessed to follow again;
//! the guesses go through the forward pass beside the token they follow, and those the model would have chosen itself are
//! kept. The text is the same with and without, as far as the kernels compute one row as they compute several (asked to be
//! deterministic, always); only its speed changes. Saxena, 2023:
//! <https://github.com/apoorvumang/prompt-lookup-decoding>.
//!
//! How many to guess is a sum: rows cost what the pool's measured rates say, and a guess is right as often as this
//! sequence's were. Where no number of guesses pays, none are made, but for a rare one to see whether that has changed.

use std::collections::HashMap;

/// Tokens that must have stood together before.
const CONTEXT: usize = 3;
/// Occurrences of a context that are remembered, the latest.
const OCCURRENCES: usize = 8;
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
    /// Positions after each context.
    index: HashMap<[u32; CONTEXT], Vec<u32>>,
    /// Tokens that were indexed.
    indexed: usize,
    /// Where the last guesses were taken from, and would go on.
    cursor: usize,
    /// Share of guesses that were right, lately.
    right: f64,
    /// Length at which a guess is made although it does not pay.
    probe_at: usize,
    proposed: u64,
    accepted: u64,
}

impl Lookup {
    pub fn new() -> Self {
        Self { index: HashMap::new(), indexed: 0, cursor: 0, right: ASSUMED, probe_at: 0, proposed: 0, accepted: 0 }
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
            let token = tokens.get(at).or_else(|| guesses.get(at.wrapping_sub(tokens.len()))).copied();
            guesses.extend(token);
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

    /// The position whose token is the guess for the next.
    fn source(&mut self, tokens: &[u32]) -> Option<usize> {
        let tail = tokens.last_chunk::<CONTEXT>()?;
        // The context at the very end is what is looked for, so it is not in the index yet.
        for end in self.indexed.max(CONTEXT)..tokens.len() {
            if let Some(context) = tokens[..end].last_chunk::<CONTEXT>() {
                let places = self.index.entry(*context).or_default();
                if places.len() == OCCURRENCES {
                    places.remove(0);
                }
                places.push(end as u32);
            }
        }
        self.indexed = tokens.len();
        let places = self.index.get(tail)?;
        // Text is repeated in order: the next place after the last one comes before all others.
        let after = places.iter().find(|p| **p as usize >= self.cursor);
        after.or(places.last()).map(|p| *p as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that cost almost nothing beside the pass.
    const CHEAP: Cost = Cost { pass: 1.0, row: 0.01 };

    /// Decodes the rest of `text` after its first `known` tokens; returns the passes it took.
    fn passes(text: &[u32], known: usize, cost: Cost) -> usize {
        let mut lookup = Lookup::new();
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
    fn guesses_that_do_not_pay_are_not_made() {
        let lookup = |right| Lookup { right, ..Lookup::new() };
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
        let mut lookup = Lookup::new();
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
        let mut lookup = Lookup::new();
        assert_eq!(lookup.propose(&[5, 4, 4, 4, 4], 6, CHEAP), [4; 6]);
    }
}
