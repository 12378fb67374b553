//! Early decision: determines when the generated part of a review makes the decision certain, so that the rest need not
//! be generated.
//!
//! A decision depends only on a review's score and on whether a defect is critical. The decision can therefore change
//! only at two scores: the threshold, and the lowest score that ends a stagnation. In each range of scores between
//! them, all reviews without a critical defect lead to the same decision. If that decision is to converge, the review
//! may end early. A revision is never decided early, because the creator needs the rest of the review as feedback.
//! Neither is an escalation, because a human may answer it with another iteration.

use cfq_proto::loop_step::Decision;
use cfq_proto::review::{Defect, ReviewFeedback, Severity};

use crate::decide::decide;
use crate::history::History;
use crate::limits::LoopLimits;

/// Range of scores `from..below` in which a review without a critical defect converges, whatever else it contains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecidedRange {
    /// Lower end of the range, inclusive.
    pub from: f64,
    /// Upper end of the range, exclusive.
    pub below: f64,
}

/// Upper end of the highest score range, above every possible score.
const ABOVE_ALL_SCORES: f64 = 101.0;

/// Returns the ranges of scores in which the review of the last iteration may end early. The iteration must be checked
/// and not quarantined. Empty if `limits` do not allow an early stop.
pub fn decided_ranges(limits: &LoopLimits, history: &History) -> Vec<DecidedRange> {
    if !limits.early_stop {
        return Vec::new();
    }
    let best = history.window().iter().filter_map(|i| i.score()).fold(f64::NEG_INFINITY, f64::max);
    let cuts = [limits.threshold, best + limits.min_gain];
    let mut cuts: Vec<f64> =
        cuts.into_iter().filter(|cut| *cut > 0.0 && *cut < ABOVE_ALL_SCORES).chain([0.0, ABOVE_ALL_SCORES]).collect();
    cuts.sort_by(f64::total_cmp);
    cuts.dedup();
    let ranges = cuts.windows(2).filter_map(|range| {
        let &[from, below] = range else { return None };
        let converges = decision_for(limits, history, from, false) == Some(Decision::Converged);
        converges.then_some(DecidedRange { from, below })
    });
    ranges.collect()
}

/// Returns the decision that follows if the last iteration gets a review with `score`, with a critical defect if
/// `critical` is true.
fn decision_for(limits: &LoopLimits, history: &History, score: f64, critical: bool) -> Option<Decision> {
    let mut history = history.clone();
    let last = history.iterations.last_mut()?;
    let defect = || Defect {
        severity: Severity::Critical,
        category: String::new(),
        location: String::new(),
        description: String::new(),
        suggested_fix: None,
    };
    last.review = Some(ReviewFeedback {
        quality_score: score,
        defects: critical.then(defect).into_iter().collect(),
        suggestions: Vec::new(),
        required_changes: Vec::new(),
    });
    decide(limits, &history).ok().map(|decided| decided.decision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::tests::Records;
    use proptest::prelude::*;

    fn limits() -> LoopLimits {
        LoopLimits { early_stop: true, ..LoopLimits::default() }
    }

    #[test]
    fn first_review_ends_early_only_where_it_passes() {
        let history = Records::started().made(1, "a", None).history();
        let passes = DecidedRange { from: 85.0, below: ABOVE_ALL_SCORES };
        assert_eq!(decided_ranges(&limits(), &history), [passes]);
        assert_eq!(decided_ranges(&LoopLimits::default(), &history), [], "off by default");
    }

    #[test]
    fn review_that_leads_to_an_escalation_does_not_end_early() {
        let history = Records::started().made(1, "a", None).history();
        let last = LoopLimits { max_iterations: 1, ..limits() };
        assert_eq!(decided_ranges(&last, &history), [DecidedRange { from: 85.0, below: ABOVE_ALL_SCORES }]);
    }

    proptest! {
        /// For every history, a review converges exactly if its score is in one of the ranges and it has no critical
        /// defect. Ending it early therefore does not change the decision.
        #[test]
        fn early_and_complete_review_lead_to_the_same_decision(
            scores in prop::collection::vec(0.0..84.0f64, 0..4),
            same in any::<bool>(),
            score in 0.0..=100.0f64,
            critical: bool,
            max_iterations in 1u32..6,
            threshold in 0.0..100.0f64,
            active_ms in 0u64..40 * 60 * 1000,
        ) {
            let limits = LoopLimits { threshold, max_iterations, ..limits() };
            let mut records = Records::started();
            let mut number = 0;
            for score in &scores {
                number += 1;
                records = records.made(number, &number.to_string(), None).reviewed(number, *score);
                let decided = decide(&limits, &records.history()).unwrap();
                if decided.decision != Decision::Revise {
                    return Ok(());
                }
                records = records.decided(number, decided);
            }
            let content = if same { "1".to_owned() } else { "new".to_owned() };
            let mut history = records.made(number + 1, &content, None).history();
            history.active_ms += active_ms;
            let ranges: Vec<DecidedRange> = decided_ranges(&limits, &history);
            let complete = decision_for(&limits, &history, score, critical).unwrap();
            let early = ranges.iter().any(|range| (range.from..range.below).contains(&score));
            prop_assert_eq!(early && !critical, complete == Decision::Converged);
        }
    }
}
