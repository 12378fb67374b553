//! Early-stop conditions of a review, expressed in the field names of the critic's JSON reply.

use cfq_convergence::DecidedRange;
use cfq_proto::early_stop::EarlyStop;

const SCORE: &str = "quality_score";
const DEFECTS: &str = "defects";
/// The critical severity as it is written in JSON.
const CRITICAL: &str = "\"critical\"";

/// Returns one early-stop condition for each range of scores within which the decision is the same.
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
