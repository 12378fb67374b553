//! Log probabilities of tokens, as OpenAI's API reports them.

/// Smallest log probability that is returned: JSON has no number for that of an impossible token. OpenAI's API returns
/// the same number.
const MIN_LOGPROB: f32 = -9999.0;

/// Natural logarithms of the probabilities that `logits` give to `token` and to the `best` most likely tokens, most
/// likely first. Takes the logits before penalties, temperature and grammar.
pub fn logprobs(logits: &[f32], token: u32, best: usize) -> (f32, Vec<(u32, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let log_sum = max + sum.ln() as f32;
    let of = |logit: &f32| (logit - log_sum).max(MIN_LOGPROB);
    let own = logits.get(token as usize).map_or(MIN_LOGPROB, of);
    let mut candidates: Vec<(u32, f32)> = (0u32..).zip(logits.iter().map(of)).collect();
    let by_rank = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if best > 0 && best < candidates.len() {
        candidates.select_nth_unstable_by(best - 1, by_rank);
    }
    candidates.truncate(best);
    candidates.sort_unstable_by(by_rank);
    (own, candidates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        // Probabilities 0.2, 0.5, 0.3.
        let logits = [2f32.ln() + 7.0, 5f32.ln() + 7.0, 3f32.ln() + 7.0];
        let (own, best) = logprobs(&logits, 0, 2);
        assert!((own - 0.2f32.ln()).abs() < 1e-5, "{own}");
        assert!(best[0].0 == 1 && (best[0].1 - 0.5f32.ln()).abs() < 1e-5, "{best:?}");
        assert!(best[1].0 == 2 && best.len() == 2, "{best:?}");
        assert_eq!(logprobs(&logits, 2, 0).1, []);
        assert_eq!(logprobs(&logits, 2, 9).1.len(), 3);
    }

    #[test]
    fn logprob_of_an_impossible_token_is_finite() {
        let (own, best) = logprobs(&[1.0, f32::NEG_INFINITY], 1, 2);
        assert_eq!((own, best), (-9999.0, vec![(0, 0.0), (1, -9999.0)]));
        assert_eq!(logprobs(&[1.0], 7, 0).0, -9999.0);
    }
}
