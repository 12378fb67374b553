//! Early-stop conditions of a review, in the field names of the critic's reply.

use cfq_convergence::DecidedRange;
use cfq_proto::early_stop::EarlyStop;

const SCORE: &str = "quality_score";
const DEFECTS: &str = "defects";
/// JSON spelling of the critical severity.
const CRITICAL: &str = "\"critical\"";

/// Returns one early-stop condition for each range of scores that fixes the decision.
pub fn early_stops(ranges: &[DecidedRange]) -> Vec<EarlyStop> {
    let condition = |range: &DecidedRange| EarlyStop {
        number: SCORE.to_owned(),
        from: range.from,
        below: range.below,
        known: DEFECTS.to_owned(),
        without: CRITICAL.to_owned(),
    };
    ranges.iter().map(condition).collect()
}
