//! Choice of the models that are evicted to meet the disk quota: the least recently used ones, and no more than
//! necessary.
//!
//! Invariants, tested below: no protected model is ever evicted; nothing is evicted unless the incoming model then
//! fits; no model is evicted if the other evictions alone make enough space.

/// A model on disk, reduced to the fields needed to choose which models to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvictionCandidate {
    /// Bytes that the removal of the model frees.
    pub bytes: u64,
    /// Time of the last use, in seconds since 1970.
    pub used_at: i64,
    /// Whether the model must not be evicted: it is pinned, named in the configuration, or in use.
    pub protected: bool,
}

/// The quota cannot be met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaShortfall {
    /// Bytes that are missing even after all permitted evictions.
    pub bytes: u64,
}

/// Plans evictions so that `used` + `incoming` bytes fit into `quota`. Returns indices into `candidates`, in the order
/// of removal.
///
/// # Errors
/// [`QuotaShortfall`] if all permitted evictions do not suffice.
pub fn plan_evictions(
    used: u64,
    incoming: u64,
    quota: u64,
    candidates: &[EvictionCandidate],
) -> Result<Vec<usize>, QuotaShortfall> {
    let excess = used.saturating_add(incoming).saturating_sub(quota);
    let mut lru: Vec<usize> = (0..candidates.len()).filter(|i| !candidates[*i].protected).collect();
    lru.sort_by_key(|i| (candidates[*i].used_at, *i));
    let mut freed = 0u64;
    let mut evicted = Vec::new();
    for i in lru {
        if freed >= excess {
            break;
        }
        if candidates[i].bytes > 0 {
            freed = freed.saturating_add(candidates[i].bytes);
            evicted.push(i);
        }
    }
    if freed < excess {
        return Err(QuotaShortfall { bytes: excess - freed });
    }
    // A small model that was chosen first may be unnecessary if a large one was chosen after it.
    let mut spare = freed - excess;
    evicted.retain(|i| {
        let needed = candidates[*i].bytes > spare;
        if !needed {
            spare -= candidates[*i].bytes;
        }
        needed
    });
    Ok(evicted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(bytes: u64, used_at: i64, protected: bool) -> EvictionCandidate {
        EvictionCandidate { bytes, used_at, protected }
    }

    #[test]
    fn least_recently_used_models_are_evicted_first_and_protected_models_stay() {
        let here = [candidate(5, 30, false), candidate(5, 10, true), candidate(5, 20, false)];
        assert_eq!(plan_evictions(15, 3, 20, &here), Ok(vec![]));
        assert_eq!(plan_evictions(15, 6, 20, &here), Ok(vec![2]));
        assert_eq!(plan_evictions(15, 14, 20, &here), Ok(vec![2, 0]));
        assert_eq!(plan_evictions(15, 16, 20, &here), Err(QuotaShortfall { bytes: 1 }));
    }

    #[test]
    fn small_model_stays_if_a_large_one_suffices() {
        let here = [candidate(1, 10, false), candidate(9, 20, false)];
        assert_eq!(plan_evictions(10, 9, 10, &here), Ok(vec![1]));
    }

    proptest! {
        #[test]
        fn evictions_free_enough_space_and_no_more_models_than_needed(
            here in prop::collection::vec((0u64..50, 0i64..5, any::<bool>()), 0..8),
            incoming in 0u64..100,
            quota in 0u64..200,
        ) {
            let here: Vec<EvictionCandidate> = here.into_iter().map(|(b, u, p)| candidate(b, u, p)).collect();
            let used: u64 = here.iter().map(|c| c.bytes).sum();
            let removable: u64 = here.iter().filter(|c| !c.protected).map(|c| c.bytes).sum();
            match plan_evictions(used, incoming, quota, &here) {
                Ok(evicted) => {
                    prop_assert!(evicted.iter().all(|i| !here[*i].protected));
                    let freed: u64 = evicted.iter().map(|i| here[*i].bytes).sum();
                    prop_assert!(used - freed + incoming <= quota);
                    for i in &evicted {
                        prop_assert!(used - freed + here[*i].bytes + incoming > quota, "one too many");
                    }
                }
                Err(missing) => prop_assert_eq!(used - removable + incoming, quota + missing.bytes),
            }
        }
    }
}
