//! A critic's answer to a review (L11): as the schema says, or as much of it as is valid. A report without a score is none.

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
}

/// The score comes out within 0 to 100.
pub fn parse_review(text: &str) -> Result<ReviewFeedback, UnreadableReview> {
    let text = text.rsplit_once("</think>").map_or(text, |(_, rest)| rest);
    let start = text.find('{').ok_or(UnreadableReview::NoObject)?;
    let value = object(&text[start..]).ok_or(UnreadableReview::NoObject)?;
    let review = match serde_json::from_value::<ReviewFeedback>(value.clone()) {
        Ok(review) => review,
        Err(_) => partial(&value)?,
    };
    Ok(bounded(review))
}

/// The first object of a text; one that was cut off is closed after its last whole value.
fn object(text: &str) -> Option<Value> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    if let Some(Ok(value)) = values.next() {
        return value.is_object().then_some(value);
    }
    let ends: Vec<usize> = text
        .char_indices()
        .filter(|(_, c)| matches!(c, '}' | ']' | '"' | ',') || c.is_ascii_digit())
        .map(|(i, c)| if c == ',' { i } else { i + c.len_utf8() })
        .collect();
    ends.iter().rev().take(MOST_ITEMS * 8).find_map(|end| {
        let head = &text[..*end];
        let value: Value = serde_json::from_str(&format!("{head}{}", closers(head)?)).ok()?;
        value.is_object().then_some(value)
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

fn partial(value: &Value) -> Result<ReviewFeedback, UnreadableReview> {
    let quality_score = number(&value["quality_score"]).ok_or(UnreadableReview::NoScore)?;
    let list = |name: &str| value[name].as_array().into_iter().flatten();
    let texts = |name: &str| list(name).filter_map(|v| v.as_str().map(str::to_owned)).collect();
    Ok(ReviewFeedback {
        quality_score,
        defects: list("defects").filter_map(defect).collect(),
        suggestions: texts("suggestions"),
        required_changes: texts("required_changes"),
    })
}

/// `85`, `"85"`, `"85/100"`.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::String(text) => text.split(['/', '%']).next()?.trim().parse().ok().filter(|n: &f64| n.is_finite()),
        _ => None,
    }
}

fn defect(value: &Value) -> Option<Defect> {
    let text = |name: &str| value[name].as_str().map(str::to_owned);
    let severity = match value["severity"].as_str()?.to_ascii_lowercase().as_str() {
        "critical" | "blocker" => Severity::Critical,
        "major" | "high" => Severity::Major,
        "minor" | "medium" | "low" => Severity::Minor,
        "info" => Severity::Info,
        _ => return None,
    };
    Some(Defect {
        severity,
        category: text("category").unwrap_or_else(|| "general".to_owned()),
        location: text("location").unwrap_or_else(|| "N/A".to_owned()),
        description: text("description")?,
        suggested_fix: text("suggested_fix"),
    })
}

fn bounded(mut review: ReviewFeedback) -> ReviewFeedback {
    let short = |text: &mut String| {
        if let Some((end, _)) = text.char_indices().nth(LONGEST_TEXT) {
            text.truncate(end);
        }
    };
    review.quality_score = if review.quality_score.is_nan() { 0.0 } else { review.quality_score.clamp(0.0, 100.0) };
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
    use proptest::prelude::*;

    const WHOLE: &str = r#"{"quality_score": 72, "defects": [{"severity": "major", "category": "correctness", "location": "a.py:1",
        "description": "wrong"}], "suggestions": ["s"], "required_changes": ["r", "q"]}"#;

    #[test]
    fn as_the_schema_says_and_in_dress() {
        let review = parse_review(WHOLE).unwrap();
        assert_eq!((review.quality_score, review.defects.len(), review.required_changes.len()), (72.0, 1, 2));
        for dressed in [format!("Here:\n```json\n{WHOLE}\n```\nBye"), format!("<think>{{}}</think>{WHOLE}")] {
            assert_eq!(parse_review(&dressed).unwrap(), review);
        }
    }

    #[test]
    fn what_is_valid_is_kept() {
        let text = r#"{"quality_score": "85/100", "defects": [{"severity": "High", "description": "d"}, {"severity": "odd",
            "description": "x"}, 7], "suggestions": "none"}"#;
        let review = parse_review(text).unwrap();
        assert_eq!(review.quality_score, 85.0);
        assert_eq!(review.defects.len(), 1);
        assert_eq!(review.defects[0].severity, Severity::Major);
        assert_eq!(review.defects[0].location, "N/A");
    }

    #[test]
    fn a_report_that_was_cut_off_is_closed() {
        let cut = &WHOLE[..WHOLE.find("\"description\"").unwrap() + 18];
        let review = parse_review(cut).unwrap();
        assert_eq!(review.quality_score, 72.0);
        assert_eq!(parse_review(&WHOLE[..22]).unwrap().quality_score, 72.0);
    }

    #[test]
    fn scores_are_clamped_and_nothing_is_made_up() {
        let score = |n: &str| parse_review(&format!("{{\"quality_score\": {n}}}")).unwrap().quality_score;
        assert_eq!((score("140"), score("-3"), score("0")), (100.0, 0.0, 0.0));
        assert_eq!(parse_review("looks good to me"), Err(UnreadableReview::NoObject));
        assert_eq!(parse_review("{\"defects\": []}"), Err(UnreadableReview::NoScore));
        assert_eq!(parse_review(""), Err(UnreadableReview::NoObject));
    }

    proptest! {
        #[test]
        fn any_prefix_is_read_or_refused(end in 0usize..WHOLE.len()) {
            if let Ok(review) = parse_review(&WHOLE[..end]) {
                prop_assert!(review.quality_score == 72.0 || review.quality_score == 7.0);
            }
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,60}", json in "[{}\\[\\]\":,0-9a-z_\\\\ ]{0,60}") {
            drop(parse_review(&text));
            drop(parse_review(&json));
        }
    }
}
