//! Top-k, top-p and min-p: sets the weights of unlikely tokens to zero.
//!
//! A vocabulary has tens of thousands of tokens, and at usual temperatures a few of them hold almost all of the
//! probability. Therefore the vocabulary is never sorted as a whole; only its most likely tokens are selected and
//! sorted.

use cfq_proto::job::Sampling;

/// Minimum number of tokens that top-p sorts at a time.
const MIN_SORTED: usize = 64;

/// Applies top-k, then top-p (nucleus sampling, <https://arxiv.org/abs/1904.09751>) to what top-k left. Of equal
/// weights the token with the lower id ranks first.
pub(super) fn apply_top_k_top_p(weights: &mut [f32], sampling: &Sampling) {
    let top_p = sampling.top_p.filter(|p| *p < 1.0);
    let top_k = sampling.top_k.filter(|k| *k > 0).map(|k| k as usize);
    if top_p.is_none() && top_k.is_none() {
        return;
    }
    let by_rank = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let mut candidates: Vec<(u32, f32)> =
        (0u32..).zip(weights.iter().copied()).filter(|(_, weight)| *weight > 0.0).collect();
    if let Some(k) = top_k.filter(|k| *k < candidates.len()) {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
    if let Some(p) = top_p {
        let target = p * candidates.iter().map(|(_, weight)| weight).sum::<f32>();
        let (mut sorted, mut sum) = (0, 0.0);
        // Sorts a growing prefix until its sum reaches the target.
        while sorted < candidates.len() {
            let end = (sorted * 4).clamp(MIN_SORTED, candidates.len().max(MIN_SORTED)).min(candidates.len());
            let rest = &mut candidates[sorted..];
            if end - sorted < rest.len() {
                rest.select_nth_unstable_by(end - sorted - 1, by_rank);
            }
            rest[..end - sorted].sort_unstable_by(by_rank);
            let last = candidates[sorted..end].iter().position(|(_, weight)| {
                sum += weight;
                sum >= target
            });
            if let Some(last) = last {
                candidates.truncate(sorted + last + 1);
                break;
            }
            sorted = end;
        }
    }
    weights.fill(0.0);
    for (token, weight) in candidates {
        weights[token as usize] = weight;
    }
}

/// Min-p, <https://arxiv.org/abs/2407.01082>: sets to zero the weight of each token that is less likely than `p` times
/// the most likely token. The most likely token must have the weight 1.
pub(super) fn apply_min_p(weights: &mut [f32], p: f32) {
    weights.iter_mut().filter(|weight| **weight < p).for_each(|weight| *weight = 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::sample;

    #[test]
    fn truncated_tokens_are_never_drawn() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        for seed in 0..200 {
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
            let k = Sampling { top_k: Some(2), ..sampling.clone() };
            assert!(sample(&mut logits.clone(), &[], 0, &k).unwrap() < 2);
            // Probabilities are 0.64, 0.24, 0.09, 0.03.
            let p = Sampling { top_p: Some(0.7), ..sampling.clone() };
            assert!(sample(&mut logits.clone(), &[], 0, &p).unwrap() < 2);
            let m = Sampling { min_p: Some(0.2), ..sampling.clone() };
            assert!(sample(&mut logits.clone(), &[], 0, &m).unwrap() < 2);
            let tight = Sampling { top_p: Some(0.0), ..sampling };
            assert_eq!(sample(&mut logits.clone(), &[], 0, &tight), Ok(0));
        }
    }

    #[test]
    fn best_tokens_are_kept_for_any_vocabulary_size() {
        // Each weight is 0.998 times the previous one; consecutive ranks are 7 ids apart in the vocabulary.
        for count in [1, 5, 300, 5000usize] {
            let order: Vec<usize> = (0..count).map(|i| i * 7 % count).collect();
            let mut weights = vec![0.0; count];
            order.iter().enumerate().for_each(|(rank, at)| weights[*at] = 0.998f32.powi(rank as i32));
            for (top_k, top_p) in [(Some(3), None), (None, Some(0.5)), (Some(400), Some(0.9)), (None, Some(0.999))] {
                let mut kept = weights.clone();
                apply_top_k_top_p(&mut kept, &Sampling { top_k, top_p, ..Sampling::default() });
                let mut sorted = weights.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.truncate(top_k.map_or(count, |k| k as usize));
                let (total, mut sum) = (sorted.iter().sum::<f32>(), 0.0);
                let target = top_p.unwrap_or(1.0) * total;
                let expected = sorted.iter().take_while(|weight| {
                    let more = sum < target;
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
}
