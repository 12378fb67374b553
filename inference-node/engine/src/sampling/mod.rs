//! Sampling: chooses the next token from the model's logits.
//!
//! The order is: penalties, temperature, top-k, top-p, min-p, then one draw. Draws come from a counter-based hash of
//! (seed, position), so the same seed gives the same text regardless of the other sequences in the batch, and a
//! generation that resumes on another machine continues with the same draws.
//!
//! With a grammar, a token is first drawn without it and kept if the grammar allows it. Otherwise the disallowed tokens
//! are masked, and a second draw is made among the allowed ones. Without top-k, top-p and min-p this gives exactly the
//! distribution of a draw after masking: let p be the probability of all allowed tokens together; an allowed token of
//! probability q is the result of the first draw with probability q, and of the second with probability (1 - p) q / p;
//! the sum is q / p. The mask is expensive, but seldom computed, since most first draws are allowed. Top-k, top-p and
//! min-p apply to the unmasked distribution, as in llama.cpp.
//!
//! A vocabulary has tens of thousands of tokens, so nothing here sorts all of them: the truncation selects the best
//! few, and the draw walks the vocabulary in order of ids.

pub mod grammar;
mod logprobs;
mod penalties;
pub mod text;
mod truncation;

use cfq_proto::job::Sampling;
use pulp::{Simd, WithSimd};

use crate::backend::cpu::simd::{LANES, add_lanes, exp, vectorized};
use crate::sampling::grammar::{Grammar, GrammarError};
pub use crate::sampling::logprobs::logprobs;
use crate::sampling::penalties::{apply_output_penalties, apply_repetition_penalty};
use crate::sampling::truncation::{apply_min_p, apply_top_k_top_p};

/// Distance from the maximum logit, after temperature, beyond which a token gets no weight: together such tokens have
/// less than one part in ten thousand of the probability even in a vocabulary of 300,000.
const NEGLIGIBLE_DISTANCE: f32 = 22.0;

/// The logits contain NaN, or none of them is finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the model's logits are not finite numbers")]
pub struct InvalidLogits;

/// Why a constrained token could not be sampled.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SampleError {
    /// The model's logits cannot be sampled from.
    #[error(transparent)]
    Logits(#[from] InvalidLogits),
    /// The grammar failed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
}

/// Identifies the draw: there are up to two for each position.
#[derive(Debug, Clone, Copy)]
enum Draw {
    /// The draw among all tokens.
    First,
    /// The draw among the allowed tokens, after the first draw gave a token that is not allowed.
    Second,
}

/// A constraint on the next token.
pub trait Constraint {
    /// Whether `token` may come next.
    ///
    /// # Errors
    /// If the constraint cannot be evaluated.
    fn allows(&mut self, token: u32) -> Result<bool, GrammarError>;

    /// Sets the logits of all tokens that may not come next to minus infinity.
    ///
    /// # Errors
    /// If the constraint cannot be evaluated.
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

/// Samples the next token after `history`, whose first `prompt_len` tokens are the prompt. Overwrites `logits`.
///
/// # Errors
/// [`InvalidLogits`].
pub fn sample(
    logits: &mut [f32],
    history: &[u32],
    prompt_len: usize,
    sampling: &Sampling,
) -> Result<u32, InvalidLogits> {
    sample_once(logits, history, prompt_len, sampling, Draw::First)
}

/// Same as [`sample`], restricted to the tokens that `constraint` allows.
///
/// # Errors
/// See [`SampleError`].
pub fn sample_constrained(
    logits: &mut [f32],
    history: &[u32],
    prompt_len: usize,
    sampling: &Sampling,
    constraint: &mut impl Constraint,
) -> Result<u32, SampleError> {
    let token = sample(&mut logits.to_vec(), history, prompt_len, sampling)?;
    if constraint.allows(token)? {
        return Ok(token);
    }
    constraint.mask(logits)?;
    Ok(sample_once(logits, history, prompt_len, sampling, Draw::Second)?)
}

fn sample_once(
    logits: &mut [f32],
    history: &[u32],
    prompt_len: usize,
    sampling: &Sampling,
    draw: Draw,
) -> Result<u32, InvalidLogits> {
    apply_repetition_penalty(logits, history, sampling.repetition_penalty);
    apply_output_penalties(logits, &history[prompt_len.min(history.len())..], sampling);
    let best = argmax(logits)?;
    if sampling.temperature <= 0.0 {
        return Ok(best);
    }
    let max = logits[best as usize];
    let weights = logits;
    vectorized(SoftmaxWeights { logits: weights, max, temperature: sampling.temperature });
    apply_top_k_top_p(weights, sampling);
    if let Some(p) = sampling.min_p {
        apply_min_p(weights, p);
    }
    // The second draw needs another random number: with that of the first, it would always fall near the rejected
    // token.
    let seed = match draw {
        Draw::First => sampling.seed,
        Draw::Second => !sampling.seed,
    };
    Ok(token_at(weights, uniform(seed, history.len() as u64)).unwrap_or(best))
}

/// Vectorized loop that replaces each logit by its weight: its softmax numerator relative to the maximum, so that the
/// most likely token has the weight 1.
struct SoftmaxWeights<'a> {
    logits: &'a mut [f32],
    max: f32,
    temperature: f32,
}

impl WithSimd for SoftmaxWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for logit in self.logits {
            let distance = (*logit - self.max) / self.temperature;
            *logit = if distance > -NEGLIGIBLE_DISTANCE { exp(distance) } else { 0.0 };
        }
    }
}

/// Number of tokens in a chunk: chunks are summed first to find the one that contains the quantile.
const SUM_CHUNK_TOKENS: usize = 256;

/// The token at the `quantile` (0 to 1) of the distribution that `weights` are proportional to; `None` if all are zero.
fn token_at(weights: &[f32], quantile: f64) -> Option<u32> {
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
    let sums: Vec<f64> = weights.chunks(SUM_CHUNK_TOKENS).map(sum).collect();
    let mut left = quantile * sums.iter().sum::<f64>();
    let chunks = || weights.chunks(SUM_CHUNK_TOKENS).zip(&sums).enumerate().filter(|(_, (_, sum))| **sum > 0.0);
    let containing = chunks().find(|(_, (_, sum))| {
        let here = left < **sum;
        if !here {
            left -= **sum;
        }
        here
    });
    // No chunk is found only because of rounding, since the quantile is less than one.
    let (chunk, (weights, _)) = containing.or_else(|| chunks().next_back())?;
    let mut last = None;
    for (token, weight) in ((chunk * SUM_CHUNK_TOKENS) as u32..).zip(weights).filter(|(_, weight)| **weight > 0.0) {
        last = Some(token);
        left -= f64::from(*weight);
        if left < 0.0 {
            break;
        }
    }
    last
}

/// The token with the maximum logit; of equal ones the lowest id.
fn argmax(logits: &[f32]) -> Result<u32, InvalidLogits> {
    let max = vectorized(MaxLogit(logits)).ok_or(InvalidLogits)?;
    logits.iter().position(|logit| *logit == max).map(|at| at as u32).ok_or(InvalidLogits)
}

/// Vectorized loop that returns the maximum of the logits; `None` if one is NaN or none is finite.
struct MaxLogit<'a>(&'a [f32]);

impl WithSimd for MaxLogit<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Option<f32> {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let (mut max, mut nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
        for chunk in chunks {
            for lane in 0..LANES {
                max[lane] = if chunk[lane] > max[lane] { chunk[lane] } else { max[lane] };
                nan[lane] |= chunk[lane].is_nan();
            }
        }
        let highest = max.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
        let nan = nan.contains(&true) || rest.iter().any(|logit| logit.is_nan());
        (!nan && highest.is_finite()).then_some(highest)
    }
}

/// A pseudo-random number in [0, 1) for (seed, position): two rounds of SplitMix64's finalizer
/// (<https://doi.org/10.1145/2660193.2660195>).
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

    fn at_temperature_one(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::default() }
    }

    #[test]
    fn greedy_returns_the_first_maximum_or_an_error() {
        assert_eq!(sample(&mut [0.0, 2.0, 2.0], &[], 0, &Sampling::default()), Ok(1));
        assert_eq!(sample(&mut [0.0, f32::NAN], &[], 0, &Sampling::default()), Err(InvalidLogits));
        assert_eq!(sample(&mut [f32::NEG_INFINITY; 3], &[], 0, &Sampling::default()), Err(InvalidLogits));
    }

    #[test]
    fn draws_follow_the_probabilities() {
        // Probabilities 0.5, 0.25, 0.25.
        let logits = [2f32.ln(), 0.0, 0.0];
        let mut counts = [0u32; 3];
        for seed in 0..4000 {
            counts[sample(&mut logits.clone(), &[1, 2, 3], 0, &at_temperature_one(seed)).unwrap() as usize] += 1;
        }
        assert!((1850..2150).contains(&counts[0]), "{counts:?}");
        assert!((850..1150).contains(&counts[1]), "{counts:?}");
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
    fn allowed_tokens_are_drawn_by_their_own_probabilities() {
        // The probabilities are 0.5, 0.3, 0.1 and 0.1; among the two allowed tokens they are 0.75 and 0.25.
        let logits = [5f32.ln(), 3f32.ln(), 0.0, 0.0];
        let mut counts = [0u32; 4];
        for seed in 0..4000 {
            let sampling = at_temperature_one(seed);
            let token = sample_constrained(&mut logits.clone(), &[1, 2], 0, &sampling, &mut Allowed(&[1, 3]));
            counts[token.unwrap() as usize] += 1;
        }
        assert_eq!((counts[0], counts[2]), (0, 0));
        assert!((2880..3120).contains(&counts[1]), "{counts:?}");
        let greedy = Sampling::default();
        let token = sample_constrained(&mut logits.clone(), &[], 0, &greedy, &mut Allowed(&[2, 3]));
        assert_eq!(token.unwrap(), 2);
    }

    #[test]
    fn token_at_walks_the_cumulative_distribution() {
        let mut weights = vec![0.0; 1000];
        (weights[3], weights[300], weights[999]) = (1.0, 2.0, 1.0);
        for (quantile, token) in [(0.0, 3), (0.2, 3), (0.26, 300), (0.74, 300), (0.76, 999), (0.999, 999)] {
            assert_eq!(token_at(&weights, quantile), Some(token));
        }
        assert_eq!(token_at(&[0.0; 10], 0.5), None);
    }

    proptest! {
        #[test]
        fn draw_depends_on_seed_and_position_only(seed in any::<u64>(), len in 0usize..20, logits in proptest::collection::vec(-5f32..5.0, 1..50)) {
            let history = vec![7; len];
            let first = sample(&mut logits.clone(), &history, 0, &at_temperature_one(seed));
            prop_assert_eq!(first, sample(&mut logits.clone(), &history, 0, &at_temperature_one(seed)));
            prop_assert!((first.unwrap() as usize) < logits.len());
        }
    }
}
