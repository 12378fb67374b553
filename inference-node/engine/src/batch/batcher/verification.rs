//! Applying the scores of a pass: sampling, verification of draft tokens, and the KV positions that are kept.

use candle_core::Tensor;
use cfq_proto::job::JobFailure;

use super::plan::StepEntry;
use super::{Batcher, Running};
use crate::backend::forward::ForwardModel;
use crate::batch::sequence::TokenOutcome;

impl<M: ForwardModel> Batcher<M> {
    /// Samples the next tokens of every sequence whose scores were computed, accepts the draft tokens that equal the
    /// sampled ones, and advances the KV positions by the known and accepted tokens.
    pub(super) fn apply_scores(
        &mut self,
        scores: Option<Tensor>,
        plan: &[StepEntry],
    ) -> candle_core::Result<Vec<TokenOutcome>> {
        let mut scores = match scores {
            Some(scores) => scores.to_vec2::<f32>()?.into_iter(),
            None => Vec::new().into_iter(),
        };
        let (pool, vocabulary) = (&mut self.pool, &self.vocabulary);
        let outcomes = self.running.iter_mut().zip(plan).map(|(Running { sequence, kv, .. }, entry)| {
            if entry.tokens.is_empty() {
                return TokenOutcome::Continue;
            }
            if entry.scored == 0 {
                pool.advance(kv, &sequence.tokens, entry.tokens.len());
                sequence.outbox.report_step("");
                return TokenOutcome::Continue;
            }
            // The first scored row follows the known tokens; each further row follows a draft token and is valid only
            // if that token was accepted.
            let known = sequence.tokens.len();
            let drafts = &entry.tokens[entry.tokens.len() - entry.drafted..];
            let mut rows = scores.by_ref().take(entry.scored);
            let mut accepted = 0;
            let mut outcome = None;
            for at in 0..entry.scored {
                let Some(mut logits) = rows.next() else { break };
                // Tokens that the grammar forced need no scores.
                if sequence.tokens.len() <= known + at {
                    // The output matrix may be padded with rows that stand for no token; their scores are dropped.
                    logits.truncate(vocabulary.len());
                    outcome = Some(sequence.next_token(&mut logits, vocabulary));
                }
                let matches = drafts.get(at).is_some_and(|draft| sequence.tokens.get(known + at) == Some(draft));
                accepted += usize::from(matches);
                // The rows after a rejected draft token were computed from a wrong prefix and are not used.
                if !matches || !matches!(outcome, Some(TokenOutcome::Continue)) {
                    break;
                }
            }
            rows.for_each(drop);
            let computed = (entry.tokens.len() - entry.drafted + accepted).min(sequence.tokens.len() - kv.len());
            pool.advance(kv, &sequence.tokens, computed);
            sequence.lookup.record_verified(entry.drafted, accepted, sequence.tokens.len());
            outcome.unwrap_or_else(|| {
                let reason = "the forward pass returned no logits".to_owned();
                TokenOutcome::Failed(JobFailure::Engine { reason })
            })
        });
        Ok(outcomes.collect())
    }
}
