//! How the rows of one forward pass are shared among the sequences that want some.
//!
//! A decoding sequence gets its one row in every pass. What the pass can compute beside those in its time is shared by the
//! prompts, evenly, so that a short one does not wait for a long one to end. Where there are more prompts than useful
//! pieces, those that got nothing longest come first. So a pass takes its time whatever number of prompts arrives, each
//! prompt gets on, and decoding waits for none of them longer than one pass.

/// Rows of the smallest piece of a prompt worth a place in a pass.
pub const PIECE_LEAST: usize = 8;

/// One sequence's wish.
#[derive(Debug, Clone, Copy)]
pub struct Want {
    /// Known tokens that are not computed yet; a decoding sequence has one.
    pub waiting: usize,
    /// The pass in which it last got rows.
    pub served: u64,
}

/// Rows for each, in the order given. Together at most `budget`, but that everybody who decodes gets a row and the prompts
/// [`PIECE_LEAST`] among them.
pub fn share(wants: &[Want], budget: usize) -> Vec<usize> {
    let mut rows: Vec<usize> = wants.iter().map(|want| want.waiting.min(1)).collect();
    let mut prompts: Vec<usize> = (0..wants.len()).filter(|at| wants[*at].waiting > 1).collect();
    let decoding = rows.iter().sum::<usize>() - prompts.len();
    let mut left = budget.saturating_sub(decoding).max(PIECE_LEAST);
    prompts.sort_by_key(|at| (wants[*at].served, *at));
    for (done, at) in prompts.iter().enumerate() {
        // What shorter ones did not need goes to those after them.
        let even = (left / (prompts.len() - done)).max(PIECE_LEAST).min(left);
        rows[*at] = wants[*at].waiting.min(even);
        left -= rows[*at];
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wants(waiting: &[usize]) -> Vec<Want> {
        waiting.iter().map(|waiting| Want { waiting: *waiting, served: 0 }).collect()
    }

    #[test]
    fn a_short_prompt_does_not_wait_for_a_long_one() {
        assert_eq!(share(&wants(&[1, 5000, 30, 1]), 102), [1, 50, 30, 1]);
        assert_eq!(share(&wants(&[1, 30, 5000, 1]), 102), [1, 30, 70, 1]);
        assert_eq!(share(&wants(&[5000]), 0), [PIECE_LEAST]);
        assert_eq!(share(&wants(&[1, 1]), 0), [1, 1]);
    }

    proptest! {
        /// Sixty prompts at once make no longer a pass than one, and all of them come to their end.
        #[test]
        fn a_pass_keeps_its_time_and_nobody_starves(
            mut waiting in prop::collection::vec(1usize..400, 1..80), budget in 0usize..600,
        ) {
            let decoding = waiting.iter().filter(|w| **w == 1).count();
            let mut wants = wants(&waiting);
            let work = waiting.iter().sum::<usize>();
            for pass in 1.. {
                let rows = share(&wants, budget);
                let prompts: usize = rows.iter().zip(&wants).filter(|(_, w)| w.waiting > 1).map(|(r, _)| r).sum();
                let most = budget.saturating_sub(decoding).max(PIECE_LEAST);
                prop_assert!(prompts <= most, "{prompts} rows of prompts, {most} allowed");
                for ((want, rows), waiting) in wants.iter_mut().zip(&rows).zip(&mut waiting) {
                    prop_assert!(*rows <= *waiting && (*waiting != 1 || *rows == 1));
                    if *waiting > 1 {
                        // The last token stays: its scores are the next pass's.
                        *waiting = (*waiting - rows).max(1);
                        want.waiting = *waiting;
                    }
                    if *rows > 0 {
                        want.served = pass;
                    }
                }
                if waiting.iter().all(|w| *w == 1) {
                    break;
                }
                prop_assert!(pass as usize <= work, "somebody never ends");
            }
        }

        #[test]
        fn whoever_waits_longest_is_served_next(prompts in 2usize..80, budget in 0usize..64) {
            let mut wants = wants(&vec![100_000; prompts]);
            let each = budget.max(PIECE_LEAST) / PIECE_LEAST;
            for pass in 1..=prompts.div_ceil(each) as u64 {
                for (want, rows) in share(&wants, budget).into_iter().enumerate() {
                    if rows > 0 {
                        wants[want].served = pass;
                    }
                }
            }
            prop_assert!(wants.iter().all(|w| w.served > 0));
        }
    }
}
