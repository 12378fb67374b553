//! Parsing of the critic's reply (L11): JSON of the review schema, possibly surrounded by other text (`object` finds
//! the review in it). A reply without a score is not a review. An incomplete review is an error, and another one is
//! requested ([`parse_review`]). If no try gives a complete review, the readable part is kept for the creator
//! ([`salvage_review`]). A critical defect is added that states what is missing, because the missing part may contain
//! the finding that must prevent convergence.

mod object;

use cfq_proto::early_stop::EarlyStop;
use cfq_proto::job::FinishReason;
use cfq_proto::review::{Defect, ReviewFeedback, Severity};
use cfq_proto::visible_text::{SOURCE_CHARACTERS, visible};
use object::{ReviewObject, is_only_an_object, review_object};
use serde_json::Value;

/// Maximum number of entries kept per list, for servers that do not enforce the schema's limits.
const MAX_REVIEW_ENTRIES: usize = 32;
/// Maximum number of characters kept per text, for servers that do not enforce the schema's limits.
const MAX_TEXT_CHARS: usize = 1000;

/// Error: the reply is not a complete review.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableReview {
    /// The reply contains no JSON object.
    #[error("the review has no JSON object")]
    NoObject,
    /// The object has no score.
    #[error("the review has no quality_score")]
    NoScore,
    /// The reply ends before the object does.
    #[error("the review was cut off at the maximum reply length")]
    Truncated,
    /// It is unclear which part of the reply is the critic's own review.
    #[error("the reply has more than one score or review, or only a quoted one")]
    Ambiguous,
    /// Some defects are incomplete or have an unknown severity.
    #[error("{count} defects of the review cannot be parsed: each needs a description and a known severity")]
    Defects { count: usize },
}

/// Parses a complete review. The score is clamped to 0..=100.
///
/// # Errors
/// [`UnreadableReview`] if the reply is not a review or if a part of it is missing.
pub fn parse_review(text: &str, finish: FinishReason) -> Result<ReviewFeedback, UnreadableReview> {
    let (review, missing) = read_review(text, finish)?;
    missing.map_or(Ok(review), Err)
}

/// Parses a review that ended early because one of `conditions` was met. `None` if none is met.
pub fn early_stopped_review(text: &str, conditions: &[EarlyStop]) -> Option<ReviewFeedback> {
    // Other replies may contain a draft or a quoted review.
    if !is_only_an_object(text) {
        return None;
    }
    conditions.iter().find_map(|condition| {
        let (review, unreadable) = lenient_review(&Value::Object(condition.met_by(text)?)).ok()?;
        // Also detects a critical defect under another name for the severity.
        let clean = condition.without.is_empty() || !review.has_critical();
        (unreadable == 0 && clean).then(|| limited(review))
    })
}

/// Parses the readable part of a review. If a part is missing, a critical defect is added, so that the review cannot
/// pass.
///
/// # Errors
/// [`UnreadableReview`] if the reply has no score.
pub fn salvage_review(text: &str, finish: FinishReason) -> Result<ReviewFeedback, UnreadableReview> {
    let (mut review, missing) = read_review(text, finish)?;
    if let Some(missing) = missing {
        let description = format!("this review is incomplete and may not list every defect: {missing}");
        review.defects.insert(
            0,
            Defect {
                severity: Severity::Critical,
                category: "review".to_owned(),
                location: "N/A".to_owned(),
                description,
                suggested_fix: None,
            },
        );
    }
    Ok(review)
}

/// Returns what is added to a review if the critic did not see the whole change. `left_out` and `all` are sizes of its
/// diff in bytes.
pub fn incomplete_review(left_out: usize, all: usize) -> ReviewFeedback {
    let description = format!(
        "this review is incomplete: {left_out} of {all} bytes of the diff were not shown to the critic, because they exceed \
         its context; review smaller parts of the change"
    );
    let (category, location) = ("review".to_owned(), "N/A".to_owned());
    let defect = Defect { severity: Severity::Major, category, location, description, suggested_fix: None };
    ReviewFeedback { quality_score: 100.0, defects: vec![defect], suggestions: vec![], required_changes: vec![] }
}

/// Returns the readable part of a review, and the reason if it is incomplete.
fn read_review(
    text: &str,
    finish: FinishReason,
) -> Result<(ReviewFeedback, Option<UnreadableReview>), UnreadableReview> {
    let (value, complete) = match review_object(text, finish)? {
        ReviewObject::Whole(value) => (value, true),
        ReviewObject::Truncated(value) => (value, false),
    };
    let (review, unreadable) = match serde_json::from_value::<ReviewFeedback>(value.clone()) {
        Ok(review) => (review, 0),
        Err(_) => lenient_review(&value)?,
    };
    let missing = match (complete, unreadable) {
        (false, _) => Some(UnreadableReview::Truncated),
        (true, 0) => None,
        (true, count) => Some(UnreadableReview::Defects { count }),
    };
    Ok((limited(review), missing))
}

/// Reads an object that may deviate from the schema. Also returns the number of defects that cannot be parsed
/// completely.
fn lenient_review(value: &Value) -> Result<(ReviewFeedback, usize), UnreadableReview> {
    let quality_score = lenient_score(&value["quality_score"]).ok_or(UnreadableReview::NoScore)?;
    let list = |name: &str| value[name].as_array().into_iter().flatten();
    let texts = |name: &str| list(name).filter_map(|v| v.as_str().map(str::to_owned)).collect();
    let (mut defects, mut unreadable) = (Vec::new(), 0);
    match &value["defects"] {
        Value::Null => {}
        Value::String(none) if matches!(none.trim().to_ascii_lowercase().as_str(), "" | "none" | "n/a") => {}
        Value::Array(all) => {
            for value in all {
                let (defect, complete) = lenient_defect(value);
                unreadable += usize::from(!complete);
                defects.extend(defect);
            }
        }
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => unreadable += 1,
    }
    let review = ReviewFeedback {
        quality_score,
        defects,
        suggestions: texts("suggestions"),
        required_changes: texts("required_changes"),
    };
    Ok((review, unreadable))
}

/// Reads a score written as `85`, `"85"` or `"85/100"`.
fn lenient_score(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::String(text) => text.split(['/', '%']).next()?.trim().parse().ok().filter(|n: &f64| n.is_finite()),
        _ => None,
    }
}

/// Reads a defect. Also returns whether the defect could be parsed completely. A defect of unknown severity is kept as
/// major.
fn lenient_defect(value: &Value) -> (Option<Defect>, bool) {
    let text = |name: &str| value[name].as_str().map(str::to_owned);
    let severity = match text("severity").unwrap_or_default().to_ascii_lowercase().as_str() {
        "critical" | "blocker" | "severe" | "fatal" => Some(Severity::Critical),
        "major" | "high" => Some(Severity::Major),
        "minor" | "medium" | "moderate" | "low" => Some(Severity::Minor),
        "info" => Some(Severity::Info),
        _ => None,
    };
    let Some(description) = text("description") else { return (None, false) };
    let defect = Defect {
        severity: severity.unwrap_or(Severity::Major),
        category: text("category").unwrap_or_else(|| "general".to_owned()),
        location: text("location").unwrap_or_else(|| "N/A".to_owned()),
        description,
        suggested_fix: text("suggested_fix"),
    };
    (Some(defect), severity.is_some())
}

/// Limits the number of a review's entries and the length of its texts, makes hidden characters visible in them, and
/// clamps its score.
fn limited(mut review: ReviewFeedback) -> ReviewFeedback {
    let short = |text: &mut String| {
        *text = visible(text, SOURCE_CHARACTERS).into_owned();
        if let Some((end, _)) = text.char_indices().nth(MAX_TEXT_CHARS) {
            text.truncate(end);
        }
    };
    review.quality_score = if review.quality_score.is_nan() { 0.0 } else { review.quality_score.clamp(0.0, 100.0) };
    // Sorted before truncation, so that a critical defect is dropped last.
    review.defects.sort_by_key(|d| d.severity);
    review.defects.truncate(MAX_REVIEW_ENTRIES);
    review.suggestions.truncate(MAX_REVIEW_ENTRIES);
    review.required_changes.truncate(MAX_REVIEW_ENTRIES);
    for defect in &mut review.defects {
        short(&mut defect.description);
        short(&mut defect.location);
        short(&mut defect.category);
        defect.suggested_fix.iter_mut().for_each(short);
    }
    review.suggestions.iter_mut().chain(&mut review.required_changes).for_each(short);
    review
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::early_stops;
    use cfq_convergence::DecidedRange;
    use proptest::prelude::*;

    const WHOLE: &str = r#"{"quality_score": 72, "defects": [{"severity": "major", "category": "correctness", "location": "a.py:1",
        "description": "wrong"}], "suggestions": ["s"], "required_changes": ["r", "q"]}"#;

    use FinishReason::{Length, Stop};

    #[test]
    fn review_is_parsed_with_or_without_surrounding_text() {
        let review = parse_review(WHOLE, Stop).unwrap();
        assert_eq!((review.quality_score, review.defects.len(), review.required_changes.len()), (72.0, 1, 2));
        for wrapped in [format!("Here:\n```json\n{WHOLE}\n```\nBye"), format!("<think>{{}}</think>{WHOLE}")] {
            assert_eq!(parse_review(&wrapped, Stop).unwrap(), review);
        }
        // Text after a complete review may be truncated, a second review may not.
        assert_eq!(parse_review(&format!("{WHOLE}\nIn other words"), Length).unwrap(), review);
        assert_eq!(parse_review(&format!("{WHOLE}\n{{\"quality_score\": 3"), Length), Err(UnreadableReview::Truncated));
    }

    #[test]
    fn deviations_from_the_schema_are_accepted() {
        let text = r#"{"quality_score": "85/100", "defects": [{"severity": "High", "description": "d"}], "suggestions": "none"}"#;
        let review = parse_review(text, Stop).unwrap();
        assert_eq!((review.quality_score, review.defects.len()), (85.0, 1));
        assert_eq!((review.defects[0].severity, review.defects[0].location.as_str()), (Severity::Major, "N/A"));
        let severe =
            r#"{"quality_score": 92, "defects": [{"severity": "severe", "description": "deletes the table"}]}"#;
        assert!(parse_review(severe, Stop).unwrap().has_critical());
        assert!(parse_review(r#"{"quality_score": 92, "defects": "none"}"#, Stop).unwrap().defects.is_empty());
    }

    #[test]
    fn unparsable_defect_is_an_error_and_salvaged_as_critical() {
        for (defects, kept) in [
            (r#"[{"severity": "odd", "description": "x"}]"#, 1),
            (r#"[{"severity": "critical"}]"#, 0),
            ("[7]", 0),
            (r#"{"severity": "critical", "description": "not in a list"}"#, 0),
            (r#""it deletes everything""#, 0),
        ] {
            let text = format!("{{\"quality_score\": 92, \"defects\": {defects}}}");
            assert_eq!(parse_review(&text, Stop), Err(UnreadableReview::Defects { count: 1 }), "{defects}");
            let salvaged = salvage_review(&text, Stop).unwrap();
            assert!(salvaged.has_critical(), "{defects}");
            assert_eq!(salvaged.defects.len(), kept + 1, "{defects}");
        }
    }

    #[test]
    fn truncated_review_is_an_error_and_salvaged_as_critical() {
        let critical = r#"{"quality_score":92,"defects":[{"severity":"critical","#;
        for (cut, finish) in [(critical, Length), (critical, Stop), (&WHOLE[..WHOLE.len() - 30], Length)] {
            assert_eq!(parse_review(cut, finish), Err(UnreadableReview::Truncated), "{cut}");
            let salvaged = salvage_review(cut, finish).unwrap();
            assert!(salvaged.has_critical() && salvaged.defects[0].description.contains("incomplete"), "{salvaged:?}");
        }
        let with_defect = salvage_review(&WHOLE[..WHOLE.len() - 30], Length).unwrap();
        assert_eq!((with_defect.quality_score, with_defect.defects[1].description.as_str()), (72.0, "wrong"));
        assert_eq!(salvage_review(WHOLE, Stop), parse_review(WHOLE, Stop), "it is complete");
        assert!(salvage_review(&WHOLE[..20], Length).is_err(), "the score may have been 7, 72 or 7.5");
    }

    #[test]
    fn score_is_clamped_and_never_invented() {
        let score = |n: &str| parse_review(&format!("{{\"quality_score\": {n}}}"), Stop).unwrap().quality_score;
        assert_eq!((score("140"), score("-3"), score("0")), (100.0, 0.0, 0.0));
        assert_eq!(parse_review("looks good to me", Stop), Err(UnreadableReview::NoObject));
        assert_eq!(parse_review("{\"defects\": []}", Stop), Err(UnreadableReview::NoScore));
        assert_eq!(parse_review("", Stop), Err(UnreadableReview::NoObject));
        let draft = format!("<think>perhaps {WHOLE}");
        let draft = parse_review(&draft, Length);
        assert_eq!(draft, Err(UnreadableReview::NoObject), "a draft in the reasoning is not a review");
    }

    #[test]
    fn hidden_characters_of_a_review_are_visible() {
        let text = "{\"quality_score\": 9, \"suggestions\": [\"a\\u202eb\\u001b[2J\"]}";
        assert_eq!(parse_review(text, Stop).unwrap().suggestions, ["a<U+202E>b<U+001B>[2J"]);
    }

    #[test]
    fn critical_defect_survives_the_limit_on_defects() {
        let one = |severity: &str| format!("{{\"severity\": \"{severity}\", \"description\": \"d\"}}");
        let all: Vec<String> = (0..50).map(|_| one("info")).chain([one("critical")]).collect();
        let review =
            parse_review(&format!("{{\"quality_score\": 95, \"defects\": [{}]}}", all.join(",")), Stop).unwrap();
        assert!(review.has_critical() && review.defects.len() == MAX_REVIEW_ENTRIES);
    }

    fn conditions() -> [EarlyStop; 2] {
        let ranges = [DecidedRange { from: 40.0, below: 85.0 }, DecidedRange { from: 85.0, below: 101.0 }];
        early_stops(&ranges).try_into().unwrap()
    }

    #[test]
    fn review_ends_early_where_a_condition_is_met() {
        let conditions = conditions();
        let ended = |text: &str| early_stopped_review(text, &conditions);
        assert_eq!(ended(r#"{"quality_score": 90, "defects": [], "s"#).unwrap().quality_score, 90.0);
        assert_eq!(ended(r#"{"quality_score": 90, "defects": ["#), None, "more defects may follow");
        assert_eq!(ended(r#"{"quality_score": 30, "defects": [], "s"#), None);
        let some = &WHOLE[..WHOLE.find("\"suggestions\"").unwrap()];
        assert_eq!(ended(some).unwrap().defects, parse_review(WHOLE, Stop).unwrap().defects);
        let high = some.replace("72", "92");
        assert!(ended(&high).unwrap().defects.len() == 1 && ended(&high.replace("major", "critical")).is_none());
        assert_eq!(ended(&high.replace("major", "severe")), None);
        assert_eq!(ended(&format!("<think>{some}")), None);
        assert_eq!(early_stopped_review(some, &[]), None);
    }

    fn any_review() -> impl Strategy<Value = ReviewFeedback> {
        let severity = prop::sample::select(vec![Severity::Critical, Severity::Major, Severity::Minor, Severity::Info]);
        let text = || "[a-z,}\\\\\"\\[{:é ]{0,12}";
        let category = prop::sample::select(vec!["critical", "style"]);
        let defect = (severity, category, text()).prop_map(|(severity, category, description)| Defect {
            severity,
            category: category.into(),
            location: "a:1".into(),
            description,
            suggested_fix: None,
        });
        let lists = (prop::collection::vec(defect, 0..3), prop::collection::vec(text(), 0..3));
        (0u32..=1000, lists).prop_map(|(score, (defects, suggestions))| ReviewFeedback {
            quality_score: f64::from(score) / 10.0,
            defects,
            suggestions,
            required_changes: vec!["r".into()],
        })
    }

    proptest! {
        /// An early-stopped review has the score and the defects of the complete one, wherever it ends.
        #[test]
        fn early_stopped_review_equals_the_complete_one(review in any_review()) {
            let whole = serde_json::to_string(&review).unwrap();
            let mut ended = 0;
            for end in (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)) {
                for condition in conditions() {
                    let conditions = std::slice::from_ref(&condition);
                    let Some(early) = early_stopped_review(&whole[..end], conditions) else { continue };
                    ended += 1;
                    prop_assert_eq!(early.quality_score, review.quality_score);
                    prop_assert!((condition.from..condition.below).contains(&review.quality_score));
                    prop_assert_eq!(&early.defects, &parse_review(&whole, Stop).unwrap().defects);
                    prop_assert!(!review.has_critical());
                }
            }
            // A review that contains the word "critical" elsewhere is generated to completion.
            if review.quality_score >= 40.0 && !whole.contains("\"critical\"") {
                prop_assert!(ended > 1, "{whole}");
            }
        }

        #[test]
        fn no_prefix_of_a_review_is_a_complete_review(end in 0usize..WHOLE.len(), stopped: bool) {
            let finish = if stopped { Stop } else { Length };
            prop_assert!(parse_review(&WHOLE[..end], finish).is_err());
            if let Ok(review) = salvage_review(&WHOLE[..end], finish) {
                prop_assert!(review.quality_score == 72.0 && review.has_critical());
            }
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}", json in "[{}\\[\\]\":,0-9a-z_\\\\ ]{0,60}") {
            for text in [text, json] {
                drop(parse_review(&text, Stop));
                drop(salvage_review(&text, Length));
            }
        }
    }
}
