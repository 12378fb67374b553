//! Memory estimate of a model on the host, as a function of the available bytes.

use std::path::PathBuf;

use cfq_engine::LoadError;
use cfq_memory::{DoesNotFit, MemoryEstimate};

use crate::node::unusable::MemoryShortage;

/// The terms of a model's memory estimate except the size of the KV pool, which gets the remaining memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostEstimate {
    /// The model's file.
    pub path: PathBuf,
    /// The estimate with the smallest KV pool.
    pub smallest: MemoryEstimate,
    /// Size of the largest KV pool, in tokens.
    pub max_kv_tokens: u64,
}

impl HostEstimate {
    /// The estimate with the largest KV pool that fits `bytes`; the same calculation as [`cfq_memory::fit_kv_pool`].
    ///
    /// # Errors
    /// If not even the smallest KV pool fits.
    pub fn fit(&self, bytes: u64) -> Result<MemoryEstimate, DoesNotFit> {
        let smallest = self.smallest;
        if smallest.total() > bytes {
            return Err(DoesNotFit { estimate: smallest, available: bytes });
        }
        let terms = [smallest.weights, smallest.tables, smallest.overhead, smallest.reserve, smallest.scratch];
        let without_pool = terms.into_iter().fold(0, u64::saturating_add);
        let tokens = bytes.saturating_sub(without_pool) / smallest.kv_per_token.max(1);
        Ok(smallest.with_kv_tokens(tokens.min(self.max_kv_tokens).max(smallest.kv_tokens)))
    }

    /// Total bytes with the smallest KV pool.
    pub fn smallest_bytes(&self) -> u64 {
        self.smallest.total()
    }

    /// The memory that the model needs and the memory that is available, as an error for the user.
    pub fn shortage(&self, source: DoesNotFit) -> MemoryShortage {
        MemoryShortage::new(LoadError::DoesNotFit { path: self.path.clone(), source }.to_string())
    }
}

/// Whether `estimate` gives a model enough memory, so that nothing more has to be freed for it. `last` is the total
/// memory of its last load, in bytes; `cached` is the size of the cached weights of other models.
///
/// To keep the cached weights, a smaller KV pool is accepted, at least half of the last one: otherwise, if two models
/// are used alternately and memory suffices for one, their cached weights would be dropped at every switch.
pub fn is_enough(estimate: &MemoryEstimate, last: u64, cached: u64) -> bool {
    let (total, pool) = (estimate.total(), estimate.kv_bytes());
    let last_pool = last.saturating_sub(total - pool);
    // A small difference is tolerated because pools consist of whole blocks.
    let nearly_last = last - last / 64;
    total >= last || (total.saturating_add(cached) >= nearly_last && pool >= last_pool / 2)
}

#[cfg(test)]
mod tests {
    use cfq_memory::{EstimateTerms, WeightSum, fit_kv_pool};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn estimate_is_that_of_the_memory_crate(
            stored in 0u64..1 << 40, transient in 0u64..1 << 40,
            per_token in 1u64..1 << 22, activations in 0u64..1 << 34,
            least in 1u64..8192, more in 0u64..1 << 20, bytes in 0u64..1 << 42, overhead_per_mille in 0u64..2_000,
        ) {
            let weights = WeightSum { stored, transient };
            let terms = EstimateTerms {
                weights, tables: 1 << 22, overhead_per_mille, kv_per_token: per_token, activations, reserve: 1 << 20,
            };
            let range = least..=least + more;
            let smallest = fit_kv_pool(terms, range.clone(), 0).unwrap_err().estimate;
            let max_kv_tokens = fit_kv_pool(terms, range.clone(), u64::MAX).unwrap().kv_tokens;
            let estimate = HostEstimate { path: PathBuf::new(), smallest, max_kv_tokens };
            prop_assert_eq!(estimate.fit(bytes), fit_kv_pool(terms, range, bytes));
        }
    }
}
