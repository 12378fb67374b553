//! Memory estimate of a model, as a sum that can be printed.
//!
//! KV bytes per token = 2 x layers x KV heads x head dim x bytes per element. The KV pool gets the memory that is left
//! after weights, tables, scratch and reserve, up to a maximum number of tokens. A model whose smallest useful pool
//! does not fit is refused, and the error lists all terms. The temporary memory of a load is freed before the KV pool
//! and the scratch memory are used, so the estimate counts only the larger of two sizes: that of the temporary memory,
//! and that of pool and scratch memory together.

use std::fmt;

use crate::bytes::Bytes;
use crate::weights::WeightSum;

/// Dimensions of a model, from its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Number of layers.
    pub layers: u64,
    /// Number of attention heads in a layer.
    pub heads: u64,
    /// Number of key and value heads in a layer (fewer than `heads` for grouped-query attention).
    pub kv_heads: u64,
    /// Dimension of one attention head.
    pub head_dim: u64,
    /// Dimension of the hidden state (one token's vector between two layers).
    pub hidden: u64,
    /// Dimension of the feed-forward network's intermediate layer.
    pub feed_forward: u64,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u64,
    /// Longest sequence, in tokens.
    pub context: u64,
}

impl ModelShape {
    /// Bytes of the keys and values of one token in all layers, with `element` bytes per vector element.
    pub fn kv_per_token(&self, element: u64) -> u64 {
        [2, self.layers, self.kv_heads, self.head_dim, element].into_iter().fold(1, u64::saturating_mul)
    }

    /// Bytes of the F32 activations of one forward pass over `rows` tokens, of which `scored` get logits. It is the
    /// maximum over the phases of a pass (projections, attention, feed-forward network, logits) of the activations that
    /// are in memory at the same time.
    pub fn activations(&self, rows: u64, scored: u64) -> u64 {
        let sum = |parts: &[u64]| parts.iter().fold(0u64, |all, part| all.saturating_add(*part));
        let (queries, keys) = (self.heads.saturating_mul(self.head_dim), self.kv_heads.saturating_mul(self.head_dim));
        let heads = sum(&[queries, keys, keys]);
        // The residual stream and a normalized copy of it.
        let stream = self.hidden.saturating_mul(2);
        let project = sum(&[stream, product_input(self.hidden), heads, heads]);
        // The last term is a growing vector: 32 bytes per four rows of each head.
        let attend = sum(&[stream, heads, queries, self.heads.saturating_mul(6)]);
        // The output of attention, and the residual stream with a normalized copy.
        let mixed = sum(&[stream, queries, stream]);
        let output = mixed.saturating_add(product_input(queries));
        let wide = self.feed_forward.saturating_mul(2);
        let gate = sum(&[mixed, product_input(self.hidden), wide, wide]);
        let down = sum(&[mixed, wide, product_input(self.feed_forward), stream]);
        let angles = self.head_dim.saturating_mul(4);
        let layer = [project, attend, output, gate, down].into_iter().fold(0, u64::max).saturating_add(angles);
        // Each scored row has its logits and a copy of them for sampling.
        let logits =
            scored.saturating_mul(sum(&[self.vocabulary, self.vocabulary, stream, product_input(self.hidden)]));
        let output = rows.saturating_mul(self.hidden.saturating_add(angles)).saturating_add(logits);
        rows.saturating_mul(layer).max(output).saturating_mul(4)
    }
}

/// Temporary memory that a product with a quantized matrix needs per input row, as a number of F32 elements; a row has
/// `width` elements. It holds a copy of the row, and the row quantized to 8 bits with scales and sums. candle's kernels
/// need both; the engine's own kernels need only the quantized row.
fn product_input(width: u64) -> u64 {
    width.saturating_add(width.div_ceil(2))
}

/// Maximum measured overhead that is added to an estimate, in per mille. A larger measurement means that something else
/// used the memory.
pub const MAX_OVERHEAD_PER_MILLE: u64 = 500;

/// Memory of one model on one device, by term, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Size of the weights in the layout in which the engine holds them.
    pub weights: u64,
    /// Size of norms, biases, and the tokenizer's tables.
    pub tables: u64,
    /// Measured overhead: memory that earlier loads used in addition to the predicted weights and tables.
    pub overhead: u64,
    /// Size of the keys and values of one token in all layers.
    pub kv_per_token: u64,
    /// Size of the KV pool, in tokens.
    pub kv_tokens: u64,
    /// Scratch memory: activations of the largest forward pass.
    pub scratch: u64,
    /// Largest temporary memory during the load; it is freed before the KV pool is used.
    pub loading: u64,
    /// Reserve for all other memory of the process.
    pub reserve: u64,
}

impl MemoryEstimate {
    /// Bytes of the KV pool.
    pub fn kv_bytes(&self) -> u64 {
        self.kv_per_token.saturating_mul(self.kv_tokens)
    }

    /// Bytes that are needed both during the load and while running.
    fn base(&self) -> u64 {
        [self.weights, self.tables, self.overhead, self.reserve].into_iter().fold(0, u64::saturating_add)
    }

    /// Bytes that a loaded model holds between forward passes if its whole KV pool is allocated, without the reserve.
    pub fn resident(&self) -> u64 {
        [self.weights, self.tables, self.overhead, self.kv_bytes()].into_iter().fold(0, u64::saturating_add)
    }

    /// Peak memory, in bytes.
    pub fn total(&self) -> u64 {
        let running = self.kv_bytes().saturating_add(self.scratch);
        self.base().saturating_add(running.max(self.loading))
    }

    /// Adds the measured overhead, in per mille of weights and tables; at most [`MAX_OVERHEAD_PER_MILLE`].
    pub fn with_overhead(self, per_mille: u64) -> Self {
        let predicted = u128::from(self.weights) + u128::from(self.tables);
        let overhead = predicted * u128::from(per_mille.min(MAX_OVERHEAD_PER_MILLE)) / 1000;
        Self { overhead: u64::try_from(overhead).unwrap_or(u64::MAX), ..self }
    }

    /// The estimate with a KV pool of `kv_tokens` tokens.
    pub fn with_kv_tokens(self, kv_tokens: u64) -> Self {
        Self { kv_tokens, ..self }
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weights {} + tables {}{} + KV {} tokens x {} = {} + scratch {} + reserve {} = {}",
            Bytes(self.weights),
            Bytes(self.tables),
            match self.overhead {
                0 => String::new(),
                overhead => format!(" + measured overhead {}", Bytes(overhead)),
            },
            self.kv_tokens,
            Bytes(self.kv_per_token),
            Bytes(self.kv_bytes()),
            Bytes(self.scratch),
            Bytes(self.reserve),
            Bytes(self.total()),
        )?;
        let running = self.kv_bytes().saturating_add(self.scratch);
        if self.loading > running {
            write!(f, ", with {} for loading in place of KV and scratch", Bytes(self.loading))?;
        }
        Ok(())
    }
}

/// A model does not fit; the message lists the terms of its estimate and the available memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("needs {}, but only {} are available: {estimate}", Bytes(estimate.total()), Bytes(*available))]
pub struct DoesNotFit {
    /// Estimate with the smallest useful KV pool.
    pub estimate: MemoryEstimate,
    /// Available memory, in bytes.
    pub available: u64,
}

/// Terms of a memory estimate without the size of the KV pool, in bytes unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EstimateTerms {
    /// Size of the weights in the layout in which the engine holds them.
    pub weights: WeightSum,
    /// Size of norms, biases, and the tokenizer's tables.
    pub tables: u64,
    /// Measured overhead, in per mille, see [`MemoryEstimate::with_overhead`].
    pub overhead_per_mille: u64,
    /// Size of the keys and values of one token in all layers.
    pub kv_per_token: u64,
    /// Size of the activations of the largest forward pass.
    pub activations: u64,
    /// Reserve for all other memory of the process.
    pub reserve: u64,
}

/// Estimates a model with the largest KV pool that fits into `available` bytes. `tokens` is the permitted range of the
/// pool's size; its start is the smallest useful pool.
///
/// # Errors
/// [`DoesNotFit`] if the smallest pool does not fit.
pub fn fit_kv_pool(
    terms: EstimateTerms,
    tokens: std::ops::RangeInclusive<u64>,
    available: u64,
) -> Result<MemoryEstimate, DoesNotFit> {
    let estimate = MemoryEstimate {
        weights: terms.weights.stored,
        tables: terms.tables,
        overhead: 0,
        kv_per_token: terms.kv_per_token,
        kv_tokens: *tokens.start(),
        scratch: terms.activations,
        // The vocabulary of the header stays in memory until the tokenizer's tables are built.
        loading: terms.weights.transient.saturating_add(terms.tables),
        reserve: terms.reserve,
    }
    .with_overhead(terms.overhead_per_mille);
    if estimate.total() > available {
        return Err(DoesNotFit { estimate, available });
    }
    let without_pool = estimate.base().saturating_add(estimate.scratch);
    let kv_tokens = available.saturating_sub(without_pool) / estimate.kv_per_token.max(1);
    Ok(estimate.with_kv_tokens(kv_tokens.min(*tokens.end()).max(*tokens.start())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMOLLM: ModelShape = ModelShape {
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
        assert_eq!(SMOLLM.kv_per_token(4), 2 * 30 * 3 * 64 * 4);
    }

    #[test]
    fn measured_overhead_raises_the_estimate_up_to_a_limit() {
        let weights = WeightSum { stored: 200 << 20, transient: 0 };
        let terms =
            EstimateTerms { weights, tables: 0, overhead_per_mille: 0, kv_per_token: 1, activations: 0, reserve: 0 };
        let plain = fit_kv_pool(terms, 1..=1, u64::MAX).unwrap();
        let with =
            |per_mille| fit_kv_pool(EstimateTerms { overhead_per_mille: per_mille, ..terms }, 1..=1, u64::MAX).unwrap();
        assert_eq!(with(100).total() - plain.total(), 20 << 20);
        assert_eq!(with(100), plain.with_overhead(100));
        assert_eq!(with(5_000), with(MAX_OVERHEAD_PER_MILLE));
        assert!(with(100).to_string().contains("measured overhead 20.0 MiB"), "{}", with(100));
    }

    #[test]
    fn error_lists_the_terms_of_the_estimate() {
        let sum = WeightSum { stored: 200 << 20, transient: 0 };
        let terms = EstimateTerms {
            weights: sum,
            tables: 4 << 20,
            overhead_per_mille: 0,
            kv_per_token: SMOLLM.kv_per_token(4),
            activations: 10 << 20,
            reserve: 64 << 20,
        };
        let refusal = fit_kv_pool(terms, 2048..=8192, 256 << 20).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 368.0 MiB, but only 256.0 MiB are available: weights 200.0 MiB + tables 4.0 MiB + KV 2048 \
             tokens x 45.0 KiB = 90.0 MiB + scratch 10.0 MiB + reserve 64.0 MiB = 368.0 MiB"
        );
        let heavy = EstimateTerms { weights: WeightSum { transient: 300 << 20, ..sum }, ..terms };
        let refusal = fit_kv_pool(heavy, 2048..=8192, 256 << 20).unwrap_err().to_string();
        let end = "= 572.0 MiB, with 304.0 MiB for loading in place of KV and scratch";
        assert!(refusal.ends_with(end), "{refusal}");
    }

    proptest! {
        #[test]
        fn largest_pool_that_fits_is_chosen(
            stored in 0u64..1 << 41, kv_per_token in 1u64..1 << 22,
            transient in 0u64..1 << 40, activations in 0u64..1 << 34, min_tokens in 1u64..8192, span in 0u64..1 << 20,
            available in 0u64..1 << 41, overhead_per_mille in 0u64..2_000,
        ) {
            let weights = WeightSum { stored, transient };
            let (tables, reserve) = (1 << 22, 1 << 20);
            let terms = EstimateTerms { weights, tables, overhead_per_mille, kv_per_token, activations, reserve };
            let max_tokens = min_tokens + span;
            match fit_kv_pool(terms, min_tokens..=max_tokens, available) {
                Ok(estimate) => {
                    prop_assert!(estimate.total() <= available);
                    prop_assert!((min_tokens..=max_tokens).contains(&estimate.kv_tokens));
                    // One more token would not fit, or exceed the limit.
                    let larger = estimate.with_kv_tokens(estimate.kv_tokens + 1).total();
                    prop_assert!(larger > available || estimate.kv_tokens == max_tokens);
                }
                Err(refusal) => prop_assert!(refusal.estimate.total() > available),
            }
        }
    }
}
