//! What settles a decision early, in the words of a critic's report.

use cfq_convergence::{Certain, Known};
use cfq_proto::early::Enough;

const SCORE: &str = "quality_score";
const DEFECTS: &str = "defects";
/// As a severity is written.
const CRITICAL: &str = "\"critical\"";

/// Where a report has said enough.
pub fn enough(certain: &[Certain]) -> Vec<Enough> {
    let in_words = |certain: &Certain| {
        let (known, without) = match certain.known {
            Known::Nothing => (SCORE, ""),
            Known::NoneCritical => (DEFECTS, CRITICAL),
            Known::Defects => (DEFECTS, ""),
        };
        Enough {
            number: SCORE.to_owned(),
            from: certain.from,
            below: certain.below,
            known: known.to_owned(),
            without: without.to_owned(),
        }
    };
    certain.iter().map(in_words).collect()
}
