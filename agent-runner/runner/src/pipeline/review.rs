//! A critic's answer to a review (L11): as the schema says, in whatever dress. A report without a score is none, and one of
//! which something is missing is not taken for a whole one: it is asked for again ([`parse_review`]). If it does not come
//! whole, what there is of it is kept for the creator, with a critical defect that says so ([`salvage_review`]): what a
//! report did not get to say may be the one thing that must keep the work from passing.

use cfq_proto::early::Enough;
use cfq_proto::job::FinishReason;
use cfq_proto::review::{Defect, ReviewFeedback, Severity};
use serde_json::Value;

/// Bounds for servers that do not hold the schema's: enough to see a flood, not enough to drown in it.
const MOST_ITEMS: usize = 32;
const LONGEST_TEXT: usize = 1000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableReview {
    #[error("the report has no JSON object")]
    NoObject,
    #[error("the report has no quality_score")]
    NoScore,
    #[error("the report was cut off at its longest length")]
    Cut,
    #[error("{count} of the report's defects cannot be read: each needs a description and a known severity")]
    Defects { count: usize },
}

/// A report with nothing missing. The score comes out within 0 to 100.
pub fn parse_review(text: &str, finish: FinishReason) -> Result<ReviewFeedback, UnreadableReview> {
    let (review, missing) = read(text, finish)?;
    missing.map_or(Ok(review), Err)
}

/// A report that was ended where it had said `enough`. `None`: it had not.
pub fn ended_review(text: &str, enough: &[Enough]) -> Option<ReviewFeedback> {
    // What a thought drafts is no report.
    if text.contains("<think>") {
        return None;
    }
    enough.iter().find_map(|enough| {
        let (review, unreadable) = partial(&Value::Object(enough.of(text)?)).ok()?;
        // However a critical defect was spelt.
        let clean = enough.without.is_empty() || !review.has_critical();
        (unreadable == 0 && clean).then(|| bounded(review))
    })
}

/// As much of a report as there is. What is missing stands in it as a critical defect, so that it cannot pass.
pub fn salvage_review(text: &str, finish: FinishReason) -> Result<ReviewFeedback, UnreadableReview> {
    let (mut review, missing) = read(text, finish)?;
    if let Some(missing) = missing {
        let description = format!("this review is incomplete, it may not name all that is wrong: {missing}");
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

/// The report, and what is missing of it.
fn read(text: &str, finish: FinishReason) -> Result<(ReviewFeedback, Option<UnreadableReview>), UnreadableReview> {
    let text = text.rsplit_once("</think>").map_or(text, |(_, rest)| rest);
    // A thought that does not end is no answer, whatever it drafts.
    let text = text.split_once("<think>").map_or(text, |(before, _)| before);
    let start = text.find('{').ok_or(UnreadableReview::NoObject)?;
    let (value, whole) = object(&text[start..], finish).ok_or(UnreadableReview::NoObject)?;
    let (review, unreadable) = match serde_json::from_value::<ReviewFeedback>(value.clone()) {
        Ok(review) => (review, 0),
        Err(_) => partial(&value)?,
    };
    let missing = match (whole, unreadable) {
        (false, _) => Some(UnreadableReview::Cut),
        (true, 0) => None,
        (true, count) => Some(UnreadableReview::Defects { count }),
    };
    Ok((bounded(review), missing))
}

/// The first object of a text, and whether it is whole; one that was cut off is closed after its last whole value.
fn object(text: &str, finish: FinishReason) -> Option<(Value, bool)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    if let Some(Ok(value)) = values.next() {
        // Cut in a second report: the first was a draft of it.
        let rest = text.get(values.byte_offset()..).unwrap_or_default();
        let whole = finish == FinishReason::Stop || !rest.contains("quality_score");
        return value.is_object().then_some((value, whole));
    }
    // Not after a digit: the number may have had more.
    let ends: Vec<usize> = text
        .char_indices()
        .filter(|(_, c)| matches!(c, '}' | ']' | '"' | ','))
        .map(|(i, c)| if c == ',' { i } else { i + c.len_utf8() })
        .collect();
    ends.iter().rev().take(MOST_ITEMS * 8).find_map(|end| {
        let head = &text[..*end];
        let value: Value = serde_json::from_str(&format!("{head}{}", closers(head)?)).ok()?;
        value.is_object().then_some((value, false))
    })
}

/// What is open at the end of `head`, closed; `None` inside a string.
fn closers(head: &str) -> Option<String> {
    let mut stack = Vec::new();
    let (mut string, mut escaped) = (false, false);
    for c in head.chars() {
        match (string, escaped, c) {
            (true, true, _) => escaped = false,
            (true, false, '\\') => escaped = true,
            (_, false, '"') => string = !string,
            (false, _, '{') => stack.push('}'),
            (false, _, '[') => stack.push(']'),
            (false, _, '}' | ']') => {
                stack.pop();
            }
            _ => {}
        }
    }
    (!string).then(|| stack.iter().rev().collect())
}

/// What can be read of an object that is not quite as the schema says, and how many of its defects cannot.
fn partial(value: &Value) -> Result<(ReviewFeedback, usize), UnreadableReview> {
    let quality_score = number(&value["quality_score"]).ok_or(UnreadableReview::NoScore)?;
    let list = |name: &str| value[name].as_array().into_iter().flatten();
    let texts = |name: &str| list(name).filter_map(|v| v.as_str().map(str::to_owned)).collect();
    let (mut defects, mut unreadable) = (Vec::new(), 0);
    match &value["defects"] {
        Value::Null => {}
        Value::String(none) if matches!(none.trim().to_ascii_lowercase().as_str(), "" | "none" | "n/a") => {}
        Value::Array(all) => {
            for value in all {
                let (defect, whole) = defect(value);
                unreadable += usize::from(!whole);
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

/// `85`, `"85"`, `"85/100"`.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::String(text) => text.split(['/', '%']).next()?.trim().parse().ok().filter(|n: &f64| n.is_finite()),
        _ => None,
    }
}

/// A defect, and whether all of it could be read. One whose severity is unknown is kept as major.
fn defect(value: &Value) -> (Option<Defect>, bool) {
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

fn bounded(mut review: ReviewFeedback) -> ReviewFeedback {
    let short = |text: &mut String| {
        if let Some((end, _)) = text.char_indices().nth(LONGEST_TEXT) {
            text.truncate(end);
        }
    };
    review.quality_score = if review.quality_score.is_nan() { 0.0 } else { review.quality_score.clamp(0.0, 100.0) };
    // What is cut from a flood is never what would keep it from passing.
    review.defects.sort_by_key(|d| d.severity);
    review.defects.truncate(MOST_ITEMS);
    review.suggestions.truncate(MOST_ITEMS);
    review.required_changes.truncate(MOST_ITEMS);
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
    use crate::pipeline::enough;
    use cfq_convergence::Certain;
    use proptest::prelude::*;

    const WHOLE: &str = r#"{"quality_score": 72, "defects": [{"severity": "major", "category": "correctness", "location": "a.py:1",
        "description": "wrong"}], "suggestions": ["s"], "required_changes": ["r", "q"]}"#;

    use FinishReason::{Length, Stop};

    #[test]
    fn as_the_schema_says_and_in_dress() {
        let review = parse_review(WHOLE, Stop).unwrap();
        assert_eq!((review.quality_score, review.defects.len(), review.required_changes.len()), (72.0, 1, 2));
        for dressed in [format!("Here:\n```json\n{WHOLE}\n```\nBye"), format!("<think>{{}}</think>{WHOLE}")] {
            assert_eq!(parse_review(&dressed, Stop).unwrap(), review);
        }
        // Talk behind a whole report may be cut, a second report may not.
        assert_eq!(parse_review(&format!("{WHOLE}\nIn other words"), Length).unwrap(), review);
        assert_eq!(parse_review(&format!("{WHOLE}\n{{\"quality_score\": 3"), Length), Err(UnreadableReview::Cut));
    }

    #[test]
    fn other_words_for_the_same_are_read() {
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
    fn a_defect_that_cannot_be_read_is_not_passed_over() {
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
    fn a_report_that_was_cut_off_is_not_a_whole_one() {
        let critical = r#"{"quality_score":92,"defects":[{"severity":"critical","#;
        for (cut, finish) in [(critical, Length), (critical, Stop), (&WHOLE[..WHOLE.len() - 30], Length)] {
            assert_eq!(parse_review(cut, finish), Err(UnreadableReview::Cut), "{cut}");
            let salvaged = salvage_review(cut, finish).unwrap();
            assert!(salvaged.has_critical() && salvaged.defects[0].description.contains("incomplete"), "{salvaged:?}");
        }
        let with_defect = salvage_review(&WHOLE[..WHOLE.len() - 30], Length).unwrap();
        assert_eq!((with_defect.quality_score, with_defect.defects[1].description.as_str()), (72.0, "wrong"));
        assert_eq!(salvage_review(WHOLE, Stop), parse_review(WHOLE, Stop), "nothing is missing of it");
        assert!(salvage_review(&WHOLE[..20], Length).is_err(), "it may have been 7, 72 or 7.5");
    }

    #[test]
    fn scores_are_clamped_and_nothing_is_made_up() {
        let score = |n: &str| parse_review(&format!("{{\"quality_score\": {n}}}"), Stop).unwrap().quality_score;
        assert_eq!((score("140"), score("-3"), score("0")), (100.0, 0.0, 0.0));
        assert_eq!(parse_review("looks good to me", Stop), Err(UnreadableReview::NoObject));
        assert_eq!(parse_review("{\"defects\": []}", Stop), Err(UnreadableReview::NoScore));
        assert_eq!(parse_review("", Stop), Err(UnreadableReview::NoObject));
        let draft = format!("<think>perhaps {WHOLE}");
        assert_eq!(parse_review(&draft, Length), Err(UnreadableReview::NoObject), "a draft in a thought is no report");
    }

    #[test]
    fn a_flood_of_small_defects_does_not_wash_a_critical_one_away() {
        let one = |severity: &str| format!("{{\"severity\": \"{severity}\", \"description\": \"d\"}}");
        let all: Vec<String> = (0..50).map(|_| one("info")).chain([one("critical")]).collect();
        let review =
            parse_review(&format!("{{\"quality_score\": 95, \"defects\": [{}]}}", all.join(",")), Stop).unwrap();
        assert!(review.has_critical() && review.defects.len() == MOST_ITEMS);
    }

    fn settled() -> [Enough; 2] {
        let rules = enough(&[Certain { from: 40.0, below: 85.0 }, Certain { from: 85.0, below: 101.0 }]);
        rules.try_into().unwrap()
    }

    #[test]
    fn a_report_ends_where_it_has_said_enough() {
        let rules = settled();
        let ended = |text: &str| ended_review(text, &rules);
        assert_eq!(ended(r#"{"quality_score": 90, "defects": [], "s"#).unwrap().quality_score, 90.0);
        assert_eq!(ended(r#"{"quality_score": 90, "defects": ["#), None, "there may be more");
        assert_eq!(ended(r#"{"quality_score": 30, "defects": [], "s"#), None);
        let some = &WHOLE[..WHOLE.find("\"suggestions\"").unwrap()];
        assert_eq!(ended(some).unwrap().defects, parse_review(WHOLE, Stop).unwrap().defects);
        let high = some.replace("72", "92");
        assert!(ended(&high).unwrap().defects.len() == 1 && ended(&high.replace("major", "critical")).is_none());
        assert_eq!(ended(&high.replace("major", "severe")), None);
        assert_eq!(ended(&format!("<think>{some}")), None);
        assert_eq!(ended_review(some, &[]), None);
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
        /// What counts for the decision is the same as in the whole report, wherever it was ended.
        #[test]
        fn an_ended_report_says_what_the_whole_one_says(review in any_review()) {
            let whole = serde_json::to_string(&review).unwrap();
            let mut ended = 0;
            for end in (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)) {
                for rule in settled() {
                    let Some(early) = ended_review(&whole[..end], std::slice::from_ref(&rule)) else { continue };
                    ended += 1;
                    prop_assert_eq!(early.quality_score, review.quality_score);
                    prop_assert!((rule.from..rule.below).contains(&review.quality_score));
                    prop_assert_eq!(&early.defects, &parse_review(&whole, Stop).unwrap().defects);
                    prop_assert!(!review.has_critical());
                }
            }
            // Who calls something critical without meaning it writes to the end.
            if review.quality_score >= 40.0 && !whole.contains("\"critical\"") {
                prop_assert!(ended > 1, "{whole}");
            }
        }

        #[test]
        fn no_prefix_of_a_report_is_a_report(end in 0usize..WHOLE.len(), stopped: bool) {
            let finish = if stopped { Stop } else { Length };
            prop_assert!(parse_review(&WHOLE[..end], finish).is_err());
            if let Ok(review) = salvage_review(&WHOLE[..end], finish) {
                prop_assert!(review.quality_score == 72.0 && review.has_critical());
            }
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,60}", json in "[{}\\[\\]\":,0-9a-z_\\\\ ]{0,60}") {
            for text in [text, json] {
                drop(parse_review(&text, Stop));
                drop(salvage_review(&text, Length));
            }
        }
    }
}
