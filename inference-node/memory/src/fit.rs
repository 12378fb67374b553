//! Whether a model fits, as a sum that can be printed.
//!
//! KV bytes per token = 2 x layers x KV heads x head dim x bytes per element. The pool gets what is left after weights,
//! tables, scratch and reserve, at most what the node could ever run at once; a model whose smallest useful pool does not
//! fit is refused with the numbers. Loading takes room of its own, before there are any keys or values: the sum is the
//! larger of the two.

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

    /// Activations of one forward pass over `rows` tokens, of which `scored` get logits, in F32: the largest of what lives
    /// at once in the projections, the attention, the feed-forward and the logits.
    pub fn activations(&self, rows: u64, scored: u64) -> u64 {
        let sum = |parts: &[u64]| parts.iter().fold(0u64, |all, part| all.saturating_add(*part));
        let (queries, keys) = (self.heads.saturating_mul(self.head_dim), self.kv_heads.saturating_mul(self.head_dim));
        let heads = sum(&[queries, keys, keys]);
        // The stream and its normalised copy.
        let stream = self.hidden.saturating_mul(2);
        let project = sum(&[stream, input(self.hidden), heads, heads]);
        // And a list, which grows, of which four rows of a head belong together: 32 bytes each.
        let attend = sum(&[stream, heads, queries, self.heads.saturating_mul(6)]);
        // What attention said, and the stream normalised again.
        let mixed = sum(&[stream, queries, stream]);
        let output = mixed.saturating_add(input(queries));
        let wide = self.feed_forward.saturating_mul(2);
        let gate = sum(&[mixed, input(self.hidden), wide, wide]);
        let down = sum(&[mixed, wide, input(self.feed_forward), stream]);
        let angles = self.head_dim.saturating_mul(4);
        let layer = [project, attend, output, gate, down].into_iter().fold(0, u64::max).saturating_add(angles);
        // The product and its copy for sampling.
        let logits = scored.saturating_mul(sum(&[self.vocabulary, self.vocabulary, stream, input(self.hidden)]));
        let output = rows.saturating_mul(self.hidden.saturating_add(angles)).saturating_add(logits);
        rows.saturating_mul(layer).max(output).saturating_mul(4)
    }
}

/// What a product with a quantised matrix makes of each row of its input, in values: a copy and the row in 8 bits with
/// scales and sums. So candle's kernels do, which copy what comes out too; our own need only the latter.
fn input(width: u64) -> u64 {
    width.saturating_add(width.div_ceil(2))
}

/// What was measured raises a prediction by half at the most: beyond that something else took the memory.
pub const MOST_CORRECTION: u64 = 500;

/// The sum for one model on one device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Weights as held.
    pub weights: u64,
    /// Norms, biases, and the tokenizer's tables.
    pub tables: u64,
    /// By how much earlier loads took more than weights and tables come to.
    pub correction: u64,
    pub kv_per_token: u64,
    /// Tokens of the KV pool.
    pub kv_tokens: u64,
    /// Activations of the largest forward pass.
    pub scratch: u64,
    /// The largest temporary of loading. It is gone before the pool is used.
    pub loading: u64,
    /// Left alone for everything else in the process.
    pub reserve: u64,
}

impl Need {
    pub fn kv(&self) -> u64 {
        self.kv_per_token.saturating_mul(self.kv_tokens)
    }

    /// What is there whatever happens.
    fn base(&self) -> u64 {
        [self.weights, self.tables, self.correction, self.reserve].into_iter().fold(0, u64::saturating_add)
    }

    /// What it holds once it runs, with the pool in use and nothing to compute.
    pub fn held(&self) -> u64 {
        [self.weights, self.tables, self.correction, self.kv()].into_iter().fold(0, u64::saturating_add)
    }

    /// The most it takes at once.
    pub fn total(&self) -> u64 {
        let running = self.kv().saturating_add(self.scratch);
        self.base().saturating_add(running.max(self.loading))
    }

    /// The same where earlier loads took so many thousandths more than was predicted.
    pub fn corrected(self, thousandths: u64) -> Self {
        let predicted = u128::from(self.weights) + u128::from(self.tables);
        let more = predicted * u128::from(thousandths.min(MOST_CORRECTION)) / 1000;
        Self { correction: u64::try_from(more).unwrap_or(u64::MAX), ..self }
    }

    /// The same with a pool of another size.
    pub fn with_tokens(self, kv_tokens: u64) -> Self {
        Self { kv_tokens, ..self }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weights {} + tables {}{} + KV {} tokens x {} = {} + scratch {} + reserve {} = {}",
            Bytes(self.weights),
            Bytes(self.tables),
            match self.correction {
                0 => String::new(),
                more => format!(" + {} more by what earlier loads took", Bytes(more)),
            },
            self.kv_tokens,
            Bytes(self.kv_per_token),
            Bytes(self.kv()),
            Bytes(self.scratch),
            Bytes(self.reserve),
            Bytes(self.total()),
        )?;
        let running = self.kv().saturating_add(self.scratch);
        if self.loading > running {
            write!(f, ", with {} for loading where KV and scratch are later", Bytes(self.loading))?;
        }
        Ok(())
    }
}

/// The refusal, with the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("needs {}, {} are available: {need}", Bytes(need.total()), Bytes(*have))]
pub struct DoesNotFit {
    pub need: Need,
    pub have: u64,
}

/// What the sum is made of, but for the pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    pub weights: WeightSum,
    pub tables: u64,
    /// Thousandths that earlier loads took more than weights and tables come to, see [`Need::corrected`].
    pub correction: u64,
    pub kv_per_token: u64,
    pub activations: u64,
    pub reserve: u64,
}

/// The need with the largest pool of `least..=most` tokens that fits into `have` bytes.
pub fn fit(parts: Parts, tokens: std::ops::RangeInclusive<u64>, have: u64) -> Result<Need, DoesNotFit> {
    let need = Need {
        weights: parts.weights.stored,
        tables: parts.tables,
        correction: 0,
        kv_per_token: parts.kv_per_token,
        kv_tokens: *tokens.start(),
        scratch: parts.activations,
        // What the header said is in memory until its tables are made.
        loading: parts.weights.transient.saturating_add(parts.tables),
        reserve: parts.reserve,
    }
    .corrected(parts.correction);
    if need.total() > have {
        return Err(DoesNotFit { need, have });
    }
    let without_pool = need.base().saturating_add(need.scratch);
    let room = have.saturating_sub(without_pool) / need.kv_per_token.max(1);
    Ok(need.with_tokens(room.min(*tokens.end()).max(*tokens.start())))
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
    fn what_loads_took_only_raises_the_sum_and_is_bounded() {
        let weights = WeightSum { stored: 200 << 20, transient: 0 };
        let parts = Parts { weights, tables: 0, correction: 0, kv_per_token: 1, activations: 0, reserve: 0 };
        let plain = fit(parts, 1..=1, u64::MAX).unwrap();
        let more = |thousandths| fit(Parts { correction: thousandths, ..parts }, 1..=1, u64::MAX).unwrap();
        assert_eq!(more(100).total() - plain.total(), 20 << 20);
        assert_eq!(more(100), plain.corrected(100));
        assert_eq!(more(5_000), more(MOST_CORRECTION));
        assert!(more(100).to_string().contains("20.0 MiB more by what earlier loads took"), "{}", more(100));
    }

    #[test]
    fn a_refusal_prints_its_arithmetic() {
        let sum = WeightSum { stored: 200 << 20, transient: 0 };
        let parts = Parts {
            weights: sum,
            tables: 4 << 20,
            correction: 0,
            kv_per_token: SMOL.kv_per_token(4),
            activations: 10 << 20,
            reserve: 64 << 20,
        };
        let refusal = fit(parts, 2048..=8192, 256 << 20).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 368.0 MiB, 256.0 MiB are available: weights 200.0 MiB + tables 4.0 MiB + KV 2048 \
             tokens x 45.0 KiB = 90.0 MiB + scratch 10.0 MiB + reserve 64.0 MiB = 368.0 MiB"
        );
        let heavy = Parts { weights: WeightSum { transient: 300 << 20, ..sum }, ..parts };
        let refusal = fit(heavy, 2048..=8192, 256 << 20).unwrap_err().to_string();
        let said = "= 572.0 MiB, with 304.0 MiB for loading where KV and scratch are later";
        assert!(refusal.ends_with(said), "{refusal}");
    }

    proptest! {
        #[test]
        fn what_fits_is_within_what_there_is(
            stored in 0u64..1 << 41, per_token in 1u64..1 << 22,
            transient in 0u64..1 << 40, activations in 0u64..1 << 34, least in 1u64..8192, more in 0u64..1 << 20,
            have in 0u64..1 << 41, correction in 0u64..2_000,
        ) {
            let weights = WeightSum { stored, transient };
            let parts = Parts { weights, tables: 1 << 22, correction, kv_per_token: per_token, activations, reserve: 1 << 20 };
            match fit(parts, least..=least + more, have) {
                Ok(need) => {
                    prop_assert!(need.total() <= have);
                    prop_assert!((least..=least + more).contains(&need.kv_tokens));
                    // Nothing is left lying: one more token would overflow, or nobody could use it.
                    let more_would = need.with_tokens(need.kv_tokens + 1).total();
                    prop_assert!(more_would > have || need.kv_tokens == least + more);
                }
                Err(refusal) => prop_assert!(refusal.need.total() > have),
            }
        }
    }
}
