//! What settles a decision early, in the words of a critic's report.

use cfq_convergence::Certain;
use cfq_proto::early::Enough;

const SCORE: &str = "quality_score";
const DEFECTS: &str = "defects";
/// As a severity is written.
const CRITICAL: &str = "\"critical\"";

/// Where a report has said enough.
pub fn enough(certain: &[Certain]) -> Vec<Enough> {
    let in_words = |certain: &Certain| Enough {
        number: SCORE.to_owned(),
        from: certain.from,
        below: certain.below,
        known: DEFECTS.to_owned(),
        without: CRITICAL.to_owned(),
    };
    certain.iter().map(in_words).collect()
}
