//! What of a review settles the decision before the review is whole.
//!
//! A decision depends on a review's score and on whether a defect is critical, on nothing else. So for each stretch of scores
//! between the figures that matter (the threshold, the gain that ends a stagnation) a review without a critical defect is
//! decided in one way. Where that is the end of the work, the rest need not be written. A revision is never settled early:
//! its feedback is what the rest of the review is for. Nor is an escalation: somebody may answer it with another iteration.

use cfq_proto::looping::Decision;
use cfq_proto::review::{Defect, ReviewFeedback, Severity};

use crate::decide::decide;
use crate::history::History;
use crate::limits::Limits;

/// A review with a score in `from..below` and no critical defect settles the decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Certain {
    pub from: f64,
    pub below: f64,
}

/// Above every score.
const END: f64 = 101.0;

/// Where the review of the last iteration, which is checked and not quarantined, may end early. Nothing where the limits do
/// not allow it.
pub fn certain(limits: &Limits, history: &History) -> Vec<Certain> {
    if !limits.early_stop {
        return Vec::new();
    }
    let best = history.window().iter().filter_map(|i| i.score()).fold(f64::NEG_INFINITY, f64::max);
    let figures = [limits.threshold, best + limits.min_gain];
    let mut cuts: Vec<f64> = figures.into_iter().filter(|cut| *cut > 0.0 && *cut < END).chain([0.0, END]).collect();
    cuts.sort_by(f64::total_cmp);
    cuts.dedup();
    let stretches = cuts.windows(2).filter_map(|stretch| {
        let &[from, below] = stretch else { return None };
        let converges = decided(limits, history, from, false) == Some(Decision::Converged);
        converges.then_some(Certain { from, below })
    });
    stretches.collect()
}

fn decided(limits: &Limits, history: &History, score: f64, critical: bool) -> Option<Decision> {
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

    fn limits() -> Limits {
        Limits { early_stop: true, ..Limits::default() }
    }

    #[test]
    fn a_first_review_ends_early_only_where_it_passes() {
        let history = Records::started().made(1, "a", None).history();
        let passes = Certain { from: 85.0, below: END };
        assert_eq!(certain(&limits(), &history), [passes]);
        assert_eq!(certain(&Limits::default(), &history), [], "off unless it is allowed");
    }

    #[test]
    fn an_escalation_is_written_whole_for_the_iteration_that_may_follow() {
        let history = Records::started().made(1, "a", None).history();
        let last = Limits { max_iterations: 1, ..limits() };
        assert_eq!(certain(&last, &history), [Certain { from: 85.0, below: END }]);
    }

    proptest! {
        /// Whatever came before: a review that is cut where it is certain decides what the whole one would have.
        #[test]
        fn what_is_certain_stays_so(
            scores in prop::collection::vec(0.0..84.0f64, 0..4),
            same in any::<bool>(),
            score in 0.0..=100.0f64,
            critical: bool,
            max_iterations in 1u32..6,
            threshold in 0.0..100.0f64,
            active_ms in 0u64..40 * 60 * 1000,
        ) {
            let limits = Limits { threshold, max_iterations, ..limits() };
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
            let settled: Vec<Certain> = certain(&limits, &history);
            let whole = decided(&limits, &history, score, critical).unwrap();
            let early = settled.iter().any(|c| (c.from..c.below).contains(&score));
            prop_assert_eq!(early && !critical, whole == Decision::Converged);
        }
    }
}
