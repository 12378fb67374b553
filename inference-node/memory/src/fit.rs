//! Whether a model fits, as a sum that can be printed.
//!
//! KV bytes per token = 2 x layers x KV heads x head dim x bytes per element. The pool gets what is left after weights,
//! scratch and reserve, at most what the node could ever run at once; a model whose smallest useful pool does not fit is
//! refused with the numbers.

use std::fmt;

use crate::bytes::Bytes;
use crate::weights::WeightSum;

/// What a header says about the model's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub layers: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub hidden: u64,
    pub feed_forward: u64,
    pub vocabulary: u64,
    /// Longest sequence, in tokens.
    pub context: u64,
}

impl Shape {
    /// KV bytes one token occupies, with `element` bytes per value.
    pub fn kv_per_token(&self, element: u64) -> u64 {
        [2, self.layers, self.kv_heads, self.head_dim, element].into_iter().fold(1, u64::saturating_mul)
    }

    /// Activations of one forward pass over `rows` tokens, of which `scored` get logits, in F32: the residual stream and
    /// its normalised and padded copies, queries with their rotated copies, the two halves of the feed-forward and
    /// their product, the logits and their copy for sampling.
    pub fn activations(&self, rows: u64, scored: u64) -> u64 {
        let width = (6 * self.hidden)
            .saturating_add(4 * self.heads.saturating_mul(self.head_dim))
            .saturating_add(4 * self.feed_forward);
        rows.saturating_mul(width)
            .saturating_add(scored.saturating_mul(self.vocabulary).saturating_mul(2))
            .saturating_mul(4)
    }
}

/// The sum for one model on one device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Weights as held.
    pub weights: u64,
    pub kv_per_token: u64,
    /// Tokens of the KV pool.
    pub kv_tokens: u64,
    /// Activations, or the largest temporary of loading, whichever is more.
    pub scratch: u64,
    /// Left alone for everything else in the process.
    pub reserve: u64,
}

impl Need {
    pub fn kv(&self) -> u64 {
        self.kv_per_token.saturating_mul(self.kv_tokens)
    }

    fn fixed(&self) -> u64 {
        [self.weights, self.scratch, self.reserve].into_iter().fold(0, u64::saturating_add)
    }

    pub fn total(&self) -> u64 {
        self.fixed().saturating_add(self.kv())
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weights {} + KV {} tokens x {} = {} + scratch {} + reserve {} = {}",
            Bytes(self.weights),
            self.kv_tokens,
            Bytes(self.kv_per_token),
            Bytes(self.kv()),
            Bytes(self.scratch),
            Bytes(self.reserve),
            Bytes(self.total()),
        )
    }
}

/// The refusal, with the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("needs {}, {} are available: {need}", Bytes(need.total()), Bytes(*have))]
pub struct DoesNotFit {
    pub need: Need,
    pub have: u64,
}

/// The need with the largest pool of `least..=most` tokens that fits into `have` bytes.
pub fn fit(
    weights: WeightSum,
    kv_per_token: u64,
    activations: u64,
    reserve: u64,
    tokens: std::ops::RangeInclusive<u64>,
    have: u64,
) -> Result<Need, DoesNotFit> {
    let need = Need {
        weights: weights.stored,
        kv_per_token,
        kv_tokens: *tokens.start(),
        scratch: activations.max(weights.transient),
        reserve,
    };
    if need.total() > have {
        return Err(DoesNotFit { need, have });
    }
    let room = (have - need.fixed()) / kv_per_token.max(1);
    Ok(Need { kv_tokens: room.min(*tokens.end()).max(*tokens.start()), ..need })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMOL: Shape = Shape {
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        hidden: 576,
        feed_forward: 1536,
        vocabulary: 49152,
        context: 8192,
    };

    #[test]
    fn kv_per_token_is_the_formula() {
        assert_eq!(SMOL.kv_per_token(4), 2 * 30 * 3 * 64 * 4);
    }

    #[test]
    fn a_refusal_prints_its_arithmetic() {
        let sum = WeightSum { stored: 200 << 20, transient: 0 };
        let refusal = fit(sum, SMOL.kv_per_token(4), 10 << 20, 64 << 20, 2048..=8192, 256 << 20).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 364.0 MiB, 256.0 MiB are available: weights 200.0 MiB + KV 2048 tokens x \
             45.0 KiB = 90.0 MiB + scratch 10.0 MiB + reserve 64.0 MiB = 364.0 MiB"
        );
    }

    proptest! {
        #[test]
        fn what_fits_is_within_what_there_is(
            stored in 0u64..1 << 41, per_token in 1u64..1 << 22,
            activations in 0u64..1 << 34, least in 1u64..8192, more in 0u64..1 << 20, have in 0u64..1 << 41,
        ) {
            let sum = WeightSum { stored, transient: 0 };
            match fit(sum, per_token, activations, 1 << 20, least..=least + more, have) {
                Ok(need) => {
                    prop_assert!(need.total() <= have);
                    prop_assert!((least..=least + more).contains(&need.kv_tokens));
                    // Nothing is left lying: one more token would overflow, or nobody could use it.
                    prop_assert!(need.total() + per_token > have || need.kv_tokens == least + more);
                }
                Err(refusal) => prop_assert!(refusal.need.total() > have),
            }
        }
    }
}
