//! Chunked prefill: how the rows of one forward pass are divided among the sequences.
//!
//! A decoding sequence gets one row in every pass. The remaining rows that fit the time limit of the pass are divided
//! evenly among the prompts, so that a short prompt does not wait for a long one to finish. If there are too many
//! prompts to give each a chunk of useful size, the prompts that were least recently computed come first. So the
//! duration of a pass does not depend on the number of prompts, every prompt makes progress, and decoding waits no
//! longer than one pass.

/// Minimum number of rows of a prefill chunk; smaller chunks are inefficient.
pub const MIN_CHUNK_ROWS: usize = 8;

/// A sequence's demand for rows of the next pass.
#[derive(Debug, Clone, Copy)]
pub struct PrefillDemand {
    /// Number of tokens that are not computed yet; a decoding sequence has one.
    pub uncomputed: usize,
    /// Number of the last step that computed tokens of this sequence.
    pub last_step: u64,
}

/// Divides the `budget` of rows of one pass among the sequences; the result has the order of `demands`. Every decoding
/// sequence gets one row. The rest of the budget, or [`MIN_CHUNK_ROWS`] rows if the rest is smaller, is divided among
/// the prompts; a prompt may get none.
pub fn split_rows(demands: &[PrefillDemand], budget: usize) -> Vec<usize> {
    let mut rows: Vec<usize> = demands.iter().map(|demand| demand.uncomputed.min(1)).collect();
    let mut prompts: Vec<usize> = (0..demands.len()).filter(|at| demands[*at].uncomputed > 1).collect();
    let decoding = rows.iter().sum::<usize>() - prompts.len();
    let mut left = budget.saturating_sub(decoding).max(MIN_CHUNK_ROWS);
    prompts.sort_by_key(|at| (demands[*at].last_step, *at));
    for (done, at) in prompts.iter().enumerate() {
        // Rows that a short prompt does not need are divided among the prompts after it.
        let even = (left / (prompts.len() - done)).max(MIN_CHUNK_ROWS).min(left);
        rows[*at] = demands[*at].uncomputed.min(even);
        left -= rows[*at];
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demands(uncomputed: &[usize]) -> Vec<PrefillDemand> {
        uncomputed.iter().map(|tokens| PrefillDemand { uncomputed: *tokens, last_step: 0 }).collect()
    }

    #[test]
    fn short_prompt_does_not_wait_for_a_long_one() {
        assert_eq!(split_rows(&demands(&[1, 5000, 30, 1]), 102), [1, 50, 30, 1]);
        assert_eq!(split_rows(&demands(&[1, 30, 5000, 1]), 102), [1, 30, 70, 1]);
        assert_eq!(split_rows(&demands(&[5000]), 0), [MIN_CHUNK_ROWS]);
        assert_eq!(split_rows(&demands(&[1, 1]), 0), [1, 1]);
    }

    proptest! {
        /// However many prompts there are, their rows stay within the budget of one pass, and every prompt is
        /// eventually computed.
        #[test]
        fn prompt_rows_stay_within_the_budget_and_every_prompt_ends(
            mut uncomputed in prop::collection::vec(1usize..400, 1..80), budget in 0usize..600,
        ) {
            let decoding = uncomputed.iter().filter(|w| **w == 1).count();
            let mut demands = demands(&uncomputed);
            let work = uncomputed.iter().sum::<usize>();
            for pass in 1.. {
                let rows = split_rows(&demands, budget);
                let prompts: usize = rows.iter().zip(&demands).filter(|(_, d)| d.uncomputed > 1).map(|(r, _)| r).sum();
                let max = budget.saturating_sub(decoding).max(MIN_CHUNK_ROWS);
                prop_assert!(prompts <= max, "{prompts} prompt rows, {max} allowed");
                for ((demand, rows), uncomputed) in demands.iter_mut().zip(&rows).zip(&mut uncomputed) {
                    prop_assert!(*rows <= *uncomputed && (*uncomputed != 1 || *rows == 1));
                    if *uncomputed > 1 {
                        // One token remains uncomputed: from now on the sequence decodes.
                        *uncomputed = (*uncomputed - rows).max(1);
                        demand.uncomputed = *uncomputed;
                    }
                    if *rows > 0 {
                        demand.last_step = pass;
                    }
                }
                if uncomputed.iter().all(|w| *w == 1) {
                    break;
                }
                prop_assert!(pass as usize <= work, "a prompt never ends");
            }
        }

        #[test]
        fn prompt_computed_longest_ago_comes_first(prompts in 2usize..80, budget in 0usize..64) {
            let mut demands = demands(&vec![100_000; prompts]);
            let chunks = budget.max(MIN_CHUNK_ROWS) / MIN_CHUNK_ROWS;
            for pass in 1..=prompts.div_ceil(chunks) as u64 {
                for (at, rows) in split_rows(&demands, budget).into_iter().enumerate() {
                    if rows > 0 {
                        demands[at].last_step = pass;
                    }
                }
            }
            prop_assert!(demands.iter().all(|d| d.last_step > 0));
        }
    }
}
