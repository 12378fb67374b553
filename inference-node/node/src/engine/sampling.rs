//! Choosing the next token.
//!
//! The order is: penalties, temperature, top-k, top-p, min-p, then one draw. Draws come from a counter-based hash
//! of (seed, position), so the same seed gives the same text whatever else is in the batch, and a continuation on
//! another machine goes on with the same draws.
//!
//! Constrained, the draw is made freely first and kept if the grammar allows it; only else all tokens are masked and a
//! second draw is made among those allowed. Without cuts that is exactly the distribution of a draw behind the mask (with
//! p the share of what is allowed, each token comes with its own share plus (1 - p) times its share of p, which is its
//! share of p), and the mask is seldom computed: models mostly write what fits. The cuts of top-k, top-p and min-p are made
//! over what the model would say by itself, as llama.cpp's are.
//!
//! A vocabulary has tens of thousands of tokens and most scores are far from zero in a warm draw, so nothing here sorts
//! them all: the cuts look for the best few, and the draw goes through the vocabulary in its own order.

use std::collections::HashMap;

use cfq_proto::job::Sampling;
use pulp::{Simd, WithSimd};

use crate::engine::grammar::{Grammar, GrammarError};
use crate::engine::lanes::{LANES, add_lanes, exp, vectorised};

/// Tokens back that the repetition penalty looks at; llama.cpp's default.
const PENALTY_WINDOW: usize = 64;

/// Natural-log distance from the best token beyond which a token is not considered: together such tokens hold less
/// than one part in ten thousand even of a vocabulary of 300,000.
const NEGLIGIBLE: f32 = 22.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the model's scores are not numbers")]
pub struct NotNumbers;

#[derive(Debug, Clone, thiserror::Error)]
pub enum SampleError {
    #[error(transparent)]
    Scores(#[from] NotNumbers),
    #[error(transparent)]
    Grammar(#[from] GrammarError),
}

/// Which of the draws for one position.
#[derive(Debug, Clone, Copy)]
enum Draw {
    First,
    /// Among what is allowed, after the first was not.
    Second,
}

/// The next token for a sequence whose tokens so far are `history`, the prompt's `prompt` first. `logits` is used as
/// working space.
pub fn sample(logits: &mut [f32], history: &[u32], prompt: usize, sampling: &Sampling) -> Result<u32, NotNumbers> {
    sample_once(logits, history, prompt, sampling, Draw::First)
}

/// The natural logarithm of each token's probability by these scores, for `token` and the `best` of all, best first.
pub fn logprobs(logits: &[f32], token: u32, best: usize) -> (f32, Vec<(u32, f32)>) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|score| f64::from(score - highest).exp()).sum();
    let all = highest + sum.ln() as f32;
    let own = logits.get(token as usize).map_or(f32::NEG_INFINITY, |score| score - all);
    let mut candidates: Vec<(u32, f32)> = (0u32..).zip(logits.iter().map(|score| score - all)).collect();
    let better = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if best > 0 && best < candidates.len() {
        candidates.select_nth_unstable_by(best - 1, better);
    }
    candidates.truncate(best);
    candidates.sort_unstable_by(better);
    (own, candidates)
}

/// What may be drawn.
pub trait Constraint {
    fn allows(&mut self, token: u32) -> Result<bool, GrammarError>;
    /// Sets the scores of all that is not allowed to minus infinity.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError>;
}

impl Constraint for Grammar {
    fn allows(&mut self, token: u32) -> Result<bool, GrammarError> {
        Self::allows(self, token)
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        Self::mask(self, logits)
    }
}

/// As [`sample`], of what `constraint` allows.
pub fn sample_within(
    logits: &mut [f32],
    history: &[u32],
    prompt: usize,
    sampling: &Sampling,
    constraint: &mut impl Constraint,
) -> Result<u32, SampleError> {
    let token = sample(&mut logits.to_vec(), history, prompt, sampling)?;
    if constraint.allows(token)? {
        return Ok(token);
    }
    constraint.mask(logits)?;
    Ok(sample_once(logits, history, prompt, sampling, Draw::Second)?)
}

fn sample_once(
    logits: &mut [f32],
    history: &[u32],
    prompt: usize,
    sampling: &Sampling,
    which: Draw,
) -> Result<u32, NotNumbers> {
    penalize(logits, history, sampling.repetition_penalty);
    penalize_written(logits, &history[prompt.min(history.len())..], sampling);
    let best = argmax(logits)?;
    if sampling.temperature <= 0.0 {
        return Ok(best);
    }
    let top = logits[best as usize];
    let weights = logits;
    vectorised(Weigh { scores: weights, top, temperature: sampling.temperature });
    keep_best(weights, sampling);
    if let Some(p) = sampling.min_p {
        // The best token's weight is 1.
        weights.iter_mut().filter(|weight| **weight < p).for_each(|weight| *weight = 0.0);
    }
    // A second draw with the share that picked what was refused would always fall on what stands near it.
    let seed = match which {
        Draw::First => sampling.seed,
        Draw::Second => !sampling.seed,
    };
    Ok(draw(weights, uniform(seed, history.len() as u64)).unwrap_or(best))
}

/// Sets all weights to zero but those of the `top_k` best, and of those all but the best that make up `top_p`. Of equal
/// ones the first in the vocabulary are better.
fn keep_best(weights: &mut [f32], sampling: &Sampling) {
    let top_p = sampling.top_p.filter(|p| *p < 1.0);
    let top_k = sampling.top_k.filter(|k| *k > 0).map(|k| k as usize);
    if top_p.is_none() && top_k.is_none() {
        return;
    }
    let better = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let mut candidates: Vec<(u32, f32)> =
        (0u32..).zip(weights.iter().copied()).filter(|(_, weight)| *weight > 0.0).collect();
    if let Some(k) = top_k.filter(|k| *k < candidates.len()) {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
    if let Some(p) = top_p {
        let enough = p * candidates.iter().map(|(_, weight)| weight).sum::<f32>();
        let (mut sorted, mut sum) = (0, 0.0);
        // Few tokens make up most: a growing head is sorted until it is enough.
        while sorted < candidates.len() {
            let head = (sorted * 4).clamp(64, candidates.len().max(64)).min(candidates.len());
            let rest = &mut candidates[sorted..];
            if head - sorted < rest.len() {
                rest.select_nth_unstable_by(head - sorted - 1, better);
            }
            rest[..head - sorted].sort_unstable_by(better);
            let within = candidates[sorted..head].iter().position(|(_, weight)| {
                sum += weight;
                sum >= enough
            });
            if let Some(last) = within {
                candidates.truncate(sorted + last + 1);
                break;
            }
            sorted = head;
        }
    }
    weights.fill(0.0);
    for (token, weight) in candidates {
        weights[token as usize] = weight;
    }
}

/// Turns scores into weights relative to the best one's.
struct Weigh<'a> {
    scores: &'a mut [f32],
    top: f32,
    temperature: f32,
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for score in self.scores {
            let distance = (*score - self.top) / self.temperature;
            *score = if distance > -NEGLIGIBLE { exp(distance) } else { 0.0 };
        }
    }
}

/// Tokens whose weights are added up at a time.
const STRIDE: usize = 256;

/// The token at `share` (of 1) of all weights; `None` if they are all zero.
fn draw(weights: &[f32], share: f64) -> Option<u32> {
    let sum = |weights: &[f32]| -> f64 {
        let (chunks, rest) = weights.as_chunks::<LANES>();
        let mut sums = [0.0; LANES];
        for chunk in chunks {
            for lane in 0..LANES {
                sums[lane] += chunk[lane];
            }
        }
        f64::from(add_lanes(sums) + rest.iter().sum::<f32>())
    };
    let sums: Vec<f64> = weights.chunks(STRIDE).map(sum).collect();
    let mut left = share * sums.iter().sum::<f64>();
    let strides = || weights.chunks(STRIDE).zip(&sums).enumerate().filter(|(_, (_, sum))| **sum > 0.0);
    let within = strides().find(|(_, (_, sum))| {
        let here = left < **sum;
        if !here {
            left -= **sum;
        }
        here
    });
    // None only by rounding: the share is less than one.
    let (at, (weights, _)) = within.or_else(|| strides().next_back())?;
    let mut last = None;
    for (token, weight) in ((at * STRIDE) as u32..).zip(weights).filter(|(_, weight)| **weight > 0.0) {
        last = Some(token);
        left -= f64::from(*weight);
        if left < 0.0 {
            break;
        }
    }
    last
}

fn penalize(logits: &mut [f32], history: &[u32], penalty: f32) {
    if penalty == 1.0 || penalty <= 0.0 {
        return;
    }
    let recent = &history[history.len().saturating_sub(PENALTY_WINDOW)..];
    let mut seen: Vec<u32> = recent.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for token in seen {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

/// As OpenAI's API defines them: over what was written, not over the prompt.
fn penalize_written(logits: &mut [f32], written: &[u32], sampling: &Sampling) {
    let Sampling { frequency_penalty, presence_penalty, .. } = *sampling;
    if frequency_penalty == 0.0 && presence_penalty == 0.0 {
        return;
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    for token in written {
        *counts.entry(*token).or_default() += 1;
    }
    for (token, count) in counts {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit -= frequency_penalty * count as f32 + presence_penalty;
        }
    }
}

/// The first of the highest.
fn argmax(logits: &[f32]) -> Result<u32, NotNumbers> {
    let highest = vectorised(Highest(logits)).ok_or(NotNumbers)?;
    logits.iter().position(|logit| *logit == highest).map(|at| at as u32).ok_or(NotNumbers)
}

/// The highest of scores; `None` if one is no number or none is finite.
struct Highest<'a>(&'a [f32]);

impl WithSimd for Highest<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Option<f32> {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let (mut high, mut bad) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
        for chunk in chunks {
            for lane in 0..LANES {
                high[lane] = if chunk[lane] > high[lane] { chunk[lane] } else { high[lane] };
                bad[lane] |= chunk[lane].is_nan();
            }
        }
        let highest = high.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
        let bad = bad.contains(&true) || rest.iter().any(|score| score.is_nan());
        (!bad && highest.is_finite()).then_some(highest)
    }
}

/// A number in [0, 1) for (seed, position): two rounds of SplitMix64's finalizer.
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let hash = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn warm(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::default() }
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest() {
        assert_eq!(sample(&mut [0.0, 2.0, 2.0], &[], 0, &Sampling::default()), Ok(1));
        assert_eq!(sample(&mut [0.0, f32::NAN], &[], 0, &Sampling::default()), Err(NotNumbers));
        assert_eq!(sample(&mut [f32::NEG_INFINITY; 3], &[], 0, &Sampling::default()), Err(NotNumbers));
    }

    #[test]
    fn draws_follow_the_weights() {
        // Probabilities 0.5, 0.25, 0.25.
        let logits = [2f32.ln(), 0.0, 0.0];
        let mut counts = [0u32; 3];
        for seed in 0..4000 {
            counts[sample(&mut logits.clone(), &[1, 2, 3], 0, &warm(seed)).unwrap() as usize] += 1;
        }
        assert!((1850..2150).contains(&counts[0]), "{counts:?}");
        assert!((850..1150).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn log_probabilities_are_those_of_the_scores() {
        // Probabilities 0.2, 0.5, 0.3.
        let logits = [2f32.ln() + 7.0, 5f32.ln() + 7.0, 3f32.ln() + 7.0];
        let (own, best) = logprobs(&logits, 0, 2);
        assert!((own - 0.2f32.ln()).abs() < 1e-5, "{own}");
        assert!(best[0].0 == 1 && (best[0].1 - 0.5f32.ln()).abs() < 1e-5, "{best:?}");
        assert!(best[1].0 == 2 && best.len() == 2, "{best:?}");
        assert_eq!(logprobs(&logits, 2, 0).1, []);
        assert_eq!(logprobs(&logits, 2, 9).1.len(), 3);
    }

    struct Allowed(&'static [u32]);

    impl Constraint for Allowed {
        fn allows(&mut self, token: u32) -> Result<bool, GrammarError> {
            Ok(self.0.contains(&token))
        }

        fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
            (0u32..).zip(logits).filter(|(t, _)| !self.0.contains(t)).for_each(|(_, l)| *l = f32::NEG_INFINITY);
            Ok(())
        }
    }

    #[test]
    fn what_is_allowed_is_drawn_by_its_own_weights() {
        // Probabilities 0.5, 0.3, 0.1, 0.1; of those allowed 0.75 and 0.25.
        let logits = [5f32.ln(), 3f32.ln(), 0.0, 0.0];
        let mut counts = [0u32; 4];
        for seed in 0..4000 {
            let token = sample_within(&mut logits.clone(), &[1, 2], 0, &warm(seed), &mut Allowed(&[1, 3])).unwrap();
            counts[token as usize] += 1;
        }
        assert_eq!((counts[0], counts[2]), (0, 0));
        assert!((2880..3120).contains(&counts[1]), "{counts:?}");
        let greedy = sample_within(&mut logits.clone(), &[], 0, &Sampling::default(), &mut Allowed(&[2, 3])).unwrap();
        assert_eq!(greedy, 2);
    }

    #[test]
    fn the_cuts_cut() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        for seed in 0..200 {
            let k = Sampling { top_k: Some(2), ..warm(seed) };
            assert!(sample(&mut logits.clone(), &[], 0, &k).unwrap() < 2);
            // Probabilities are 0.64, 0.24, 0.09, 0.03.
            let p = Sampling { top_p: Some(0.7), ..warm(seed) };
            assert!(sample(&mut logits.clone(), &[], 0, &p).unwrap() < 2);
            let m = Sampling { min_p: Some(0.2), ..warm(seed) };
            assert!(sample(&mut logits.clone(), &[], 0, &m).unwrap() < 2);
            let tight = Sampling { top_p: Some(0.0), ..warm(seed) };
            assert_eq!(sample(&mut logits.clone(), &[], 0, &tight), Ok(0));
        }
    }

    #[test]
    fn the_best_are_kept_whatever_the_size() {
        // Weights fall by two parts in a thousand from token to token, in steps of 7 through the vocabulary.
        for count in [1, 5, 300, 5000usize] {
            let order: Vec<usize> = (0..count).map(|i| i * 7 % count).collect();
            let mut weights = vec![0.0; count];
            order.iter().enumerate().for_each(|(rank, at)| weights[*at] = 0.998f32.powi(rank as i32));
            for (top_k, top_p) in [(Some(3), None), (None, Some(0.5)), (Some(400), Some(0.9)), (None, Some(0.999))] {
                let mut kept = weights.clone();
                keep_best(&mut kept, &Sampling { top_k, top_p, ..Sampling::default() });
                let mut sorted = weights.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.truncate(top_k.map_or(count, |k| k as usize));
                let (total, mut sum) = (sorted.iter().sum::<f32>(), 0.0);
                let enough = top_p.unwrap_or(1.0) * total;
                let expected = sorted.iter().take_while(|weight| {
                    let more = sum < enough;
                    sum += **weight;
                    more
                });
                let (expected, got) = (expected.count(), kept.iter().filter(|w| **w > 0.0).count());
                assert!(expected.abs_diff(got) <= 1, "{count} {top_k:?} {top_p:?}: {got} kept, not {expected}");
                let least = kept.iter().copied().filter(|w| *w > 0.0).fold(1.0, f32::min);
                assert_eq!(weights.iter().filter(|w| **w >= least).count(), got, "the best");
            }
        }
    }

    #[test]
    fn a_draw_is_where_its_share_is() {
        let mut weights = vec![0.0; 1000];
        (weights[3], weights[300], weights[999]) = (1.0, 2.0, 1.0);
        for (share, token) in [(0.0, 3), (0.2, 3), (0.26, 300), (0.74, 300), (0.76, 999), (0.999, 999)] {
            assert_eq!(draw(&weights, share), Some(token));
        }
        assert_eq!(draw(&[0.0; 10], 0.5), None);
    }

    #[test]
    fn a_repeated_token_is_penalized() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.0], &[0], 0, &sampling), Ok(1));
        assert_eq!(sample(&mut [-1.0, -1.5], &[0], 0, &sampling), Ok(1));
    }

    #[test]
    fn what_was_written_is_penalized_and_the_prompt_is_not() {
        let often = Sampling { frequency_penalty: 0.5, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 3, &often), Ok(0));
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 2, &often), Ok(0), "once");
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 1, &often), Ok(1), "twice");
        let once = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 0, &once), Ok(0));
        assert_eq!(sample(&mut [3.0, 2.6], &[0, 0, 0], 0, &once), Ok(1));
    }

    proptest! {
        #[test]
        fn seed_and_position_decide(seed in any::<u64>(), len in 0usize..20, logits in proptest::collection::vec(-5f32..5.0, 1..50)) {
            let history = vec![7; len];
            let first = sample(&mut logits.clone(), &history, 0, &warm(seed));
            prop_assert_eq!(first, sample(&mut logits.clone(), &history, 0, &warm(seed)));
            prop_assert!((first.unwrap() as usize) < logits.len());
        }
    }
}
