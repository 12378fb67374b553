//! Which models to remove so that another fits the quota: the least recently used ones, as few as will do.
//!
//! Wished: nothing pinned, bound or in use is ever named; nothing is named unless the whole then fits; nothing is named
//! that the fit does not need.

/// A model that is here, as far as this decision goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// What its removal frees.
    pub bytes: u64,
    /// Seconds since 1970.
    pub used_at: i64,
    /// Pinned, bound in the configuration, or in use.
    pub kept: bool,
}

/// The quota cannot be met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Short {
    /// Bytes that all removals together leave missing.
    pub by: u64,
}

/// Indices into `candidates`, in the order of removal, so that `used` + `incoming` fits into `quota`.
pub fn plan(used: u64, incoming: u64, quota: u64, candidates: &[Candidate]) -> Result<Vec<usize>, Short> {
    let over = used.saturating_add(incoming).saturating_sub(quota);
    let mut order: Vec<usize> = (0..candidates.len()).filter(|i| !candidates[*i].kept).collect();
    order.sort_by_key(|i| (candidates[*i].used_at, *i));
    let mut freed = 0u64;
    let mut removed = Vec::new();
    for i in order {
        if freed >= over {
            break;
        }
        if candidates[i].bytes > 0 {
            freed = freed.saturating_add(candidates[i].bytes);
            removed.push(i);
        }
    }
    if freed < over {
        return Err(Short { by: over - freed });
    }
    // An old one taken early may not be needed beside a large one taken later.
    let mut spare = freed - over;
    removed.retain(|i| {
        let needed = candidates[*i].bytes > spare;
        if !needed {
            spare -= candidates[*i].bytes;
        }
        needed
    });
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(bytes: u64, used_at: i64, kept: bool) -> Candidate {
        Candidate { bytes, used_at, kept }
    }

    #[test]
    fn the_least_recently_used_goes_first_and_what_is_kept_never() {
        let here = [candidate(5, 30, false), candidate(5, 10, true), candidate(5, 20, false)];
        assert_eq!(plan(15, 3, 20, &here), Ok(vec![]));
        assert_eq!(plan(15, 6, 20, &here), Ok(vec![2]));
        assert_eq!(plan(15, 14, 20, &here), Ok(vec![2, 0]));
        assert_eq!(plan(15, 16, 20, &here), Err(Short { by: 1 }));
    }

    #[test]
    fn a_small_one_stays_if_a_large_one_alone_makes_room() {
        let here = [candidate(1, 10, false), candidate(9, 20, false)];
        assert_eq!(plan(10, 9, 10, &here), Ok(vec![1]));
    }

    proptest! {
        #[test]
        fn what_is_wished_holds(
            here in prop::collection::vec((0u64..50, 0i64..5, any::<bool>()), 0..8),
            incoming in 0u64..100,
            quota in 0u64..200,
        ) {
            let here: Vec<Candidate> = here.into_iter().map(|(b, u, k)| candidate(b, u, k)).collect();
            let used: u64 = here.iter().map(|c| c.bytes).sum();
            let removable: u64 = here.iter().filter(|c| !c.kept).map(|c| c.bytes).sum();
            match plan(used, incoming, quota, &here) {
                Ok(removed) => {
                    prop_assert!(removed.iter().all(|i| !here[*i].kept));
                    let freed: u64 = removed.iter().map(|i| here[*i].bytes).sum();
                    prop_assert!(used - freed + incoming <= quota);
                    for i in &removed {
                        prop_assert!(used - freed + here[*i].bytes + incoming > quota, "one too many");
                    }
                }
                Err(short) => prop_assert_eq!(used - removable + incoming, quota + short.by),
            }
        }
    }
}
