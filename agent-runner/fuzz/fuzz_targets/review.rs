//! Fuzz target for a critic's replies: any text must result in a review with a valid score or an error. Text before a
//! review must never change its score.

#![no_main]

use std::sync::LazyLock;

use cfq_agent_runner::pipeline::{early_stopped_review, parse_review, salvage_review};
use cfq_proto::early_stop::EarlyStop;
use cfq_proto::job::FinishReason::{Length, Stop};
use libfuzzer_sys::fuzz_target;

/// The critic's own review, which follows the text that is fuzzed.
const OWN: &str = r#"{"quality_score": 20, "defects": [{"severity": "major", "category": "correctness", "location": "a.py:1", "description": "wrong"}], "suggestions": [], "required_changes": []}"#;

/// Stops at scores from 90, unless a defect is critical.
static EARLY_STOP: LazyLock<EarlyStop> = LazyLock::new(|| {
    assert_eq!(parse_review(OWN, Stop).unwrap().quality_score, 20.0);
    EarlyStop {
        number: "quality_score".to_owned(),
        from: 90.0,
        below: 101.0,
        known: "defects".to_owned(),
        without: "\"critical\"".to_owned(),
    }
});

fuzz_target!(|reply: &str| {
    if let Some(review) = early_stopped_review(reply, std::slice::from_ref(&EARLY_STOP)) {
        assert!((90.0..=100.0).contains(&review.quality_score) && !review.has_critical());
    }
    for finish in [Stop, Length] {
        let complete = parse_review(reply, finish);
        let salvaged = salvage_review(reply, finish);
        for review in [&complete, &salvaged].into_iter().flatten() {
            assert!((0.0..=100.0).contains(&review.quality_score));
        }
        // An incomplete review must not pass.
        assert!(complete.is_ok() || salvaged.is_err() || salvaged.is_ok_and(|review| review.has_critical()));
    }
    // An unclosed `<think>` before the review, or reasoning that ends after it, makes it a draft.
    if !reply.contains("think>") {
        let review = parse_review(&format!("{reply}\n{OWN}"), Stop);
        assert!(review.is_err() || review.is_ok_and(|review| review.quality_score == 20.0));
    }
});
