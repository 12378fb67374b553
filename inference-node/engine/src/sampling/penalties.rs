//! Penalties on tokens that have occurred already, applied to the logits in place.

use std::collections::HashMap;

use cfq_proto::job::Sampling;

/// Number of last tokens that the repetition penalty covers; llama.cpp's default `repeat_last_n`.
const REPETITION_WINDOW: usize = 64;

/// The repetition penalty of CTRL, <https://arxiv.org/abs/1909.05858> (section 4.1), over the last
/// [`REPETITION_WINDOW`] tokens. Positive logits are divided by the penalty; negative logits are multiplied by it, as
/// in llama.cpp and transformers, so that they decrease as well.
pub(super) fn apply_repetition_penalty(logits: &mut [f32], history: &[u32], penalty: f32) {
    if penalty == 1.0 || penalty <= 0.0 {
        return;
    }
    let recent = &history[history.len().saturating_sub(REPETITION_WINDOW)..];
    let mut seen: Vec<u32> = recent.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for token in seen {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

/// The frequency and presence penalties as OpenAI's API defines them, over the `generated` tokens only, not the prompt.
pub(super) fn apply_output_penalties(logits: &mut [f32], generated: &[u32], sampling: &Sampling) {
    let Sampling { frequency_penalty, presence_penalty, .. } = *sampling;
    if frequency_penalty == 0.0 && presence_penalty == 0.0 {
        return;
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    for token in generated {
        *counts.entry(*token).or_default() += 1;
    }
    for (token, count) in counts {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit -= frequency_penalty * count as f32 + presence_penalty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::sample;

    #[test]
    fn repeated_token_is_penalized() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.0], &[0], 0, &sampling), Ok(1));
        assert_eq!(sample(&mut [-1.0, -1.5], &[0], 0, &sampling), Ok(1));
    }

    #[test]
    fn generated_tokens_are_penalized_and_the_prompt_is_not() {
        let frequency = Sampling { frequency_penalty: 0.5, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 3, &frequency), Ok(0));
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 2, &frequency), Ok(0), "once");
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 1, &frequency), Ok(1), "twice");
        let presence = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        assert_eq!(sample(&mut [3.0, 2.2], &[0, 0, 0], 0, &presence), Ok(0));
        assert_eq!(sample(&mut [3.0, 2.6], &[0, 0, 0], 0, &presence), Ok(1));
    }
}
