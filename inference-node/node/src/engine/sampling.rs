//! Choosing the next token.
//!
//! The order is: penalties, temperature, top-k, top-p, min-p, then one draw. Draws come from a counter-based hash
//! of (seed, position), so the same seed gives the same text whatever else is in the batch, and a continuation on
//! another machine goes on with the same draws.

use std::collections::HashMap;

use cfq_proto::job::Sampling;

/// Tokens back that the repetition penalty looks at; llama.cpp's default.
const PENALTY_WINDOW: usize = 64;

/// Natural-log distance from the best token beyond which a token is not considered: together such tokens hold less
/// than one part in ten thousand even of a vocabulary of 300,000.
const NEGLIGIBLE: f32 = 22.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the model's scores are not numbers")]
pub struct NotNumbers;

/// The next token for a sequence whose tokens so far are `history`, the prompt's `prompt` first. `logits` is used as
/// working space.
pub fn sample(logits: &mut [f32], history: &[u32], prompt: usize, sampling: &Sampling) -> Result<u32, NotNumbers> {
    penalize(logits, history, sampling.repetition_penalty);
    penalize_written(logits, &history[prompt.min(history.len())..], sampling);
    let best = argmax(logits)?;
    if sampling.temperature <= 0.0 {
        return Ok(best);
    }
    let top = logits[best as usize];
    let mut candidates: Vec<(u32, f32)> = (0u32..)
        .zip(logits.iter())
        .map(|(token, logit)| (token, (logit - top) / sampling.temperature))
        .filter(|(_, score)| *score > -NEGLIGIBLE)
        .map(|(token, score)| (token, score.exp()))
        .collect();
    // Equal weights keep vocabulary order, so the result does not depend on the sort.
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if let Some(k) = sampling.top_k.filter(|k| *k > 0) {
        candidates.truncate(k as usize);
    }
    if let Some(p) = sampling.top_p.filter(|p| *p < 1.0) {
        let total: f32 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let kept = candidates.iter().take_while(|(_, weight)| {
            let keep = sum < p * total;
            sum += weight;
            keep
        });
        let kept = kept.count().max(1);
        candidates.truncate(kept);
    }
    if let Some(p) = sampling.min_p {
        let least = p * candidates.first().map_or(0.0, |(_, weight)| *weight);
        candidates.retain(|(_, weight)| *weight >= least);
    }
    let total: f64 = candidates.iter().map(|(_, weight)| f64::from(*weight)).sum();
    let mut left = uniform(sampling.seed, history.len() as u64) * total;
    for (token, weight) in &candidates {
        left -= f64::from(*weight);
        if left < 0.0 {
            return Ok(*token);
        }
    }
    Ok(candidates.last().map_or(best, |(token, _)| *token))
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
    let mut best: Option<(u32, f32)> = None;
    for (token, logit) in (0u32..).zip(logits) {
        if logit.is_nan() || *logit == f32::INFINITY {
            return Err(NotNumbers);
        }
        if best.is_none_or(|(_, high)| *logit > high) {
            best = Some((token, *logit));
        }
    }
    match best {
        Some((token, high)) if high > f32::NEG_INFINITY => Ok(token),
        Some(_) | None => Err(NotNumbers),
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
