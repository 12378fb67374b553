//! Finds the review in a critic's reply, which may contain other text and other JSON.
//!
//! A critic may quote JSON from the files that it reviews, even a report with the fields of a review. A position in the
//! reply does not show which of two reviews is the critic's own, so a reply counts only if it leaves no choice:
//!
//! - Reasoning (`<think>` sections) is ignored.
//! - A review is a whole JSON object that has the score itself and is not a part of another object. If a reply has
//!   several, they must be equal, and the last one counts.
//! - The reply has no unfinished object, and no other score outside its reviews: neither in an object that is not valid
//!   JSON, nor in another object, nor a different score in prose.
//! - The review is not marked as a quotation (`>`) or as a line of a diff.
//!
//! Every other reply is unreadable. Only if it has no whole review, the readable part of an unfinished or malformed one
//! is used for the creator, never for the decision.

use std::ops::Range;

use cfq_proto::job::FinishReason;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::{UnreadableReview, lenient_score};

/// Field of a review that identifies it.
const SCORE: &str = "quality_score";
/// Maximum number of offsets at which a truncated object is cut, from its end.
const MAX_CUTS: usize = 256;
/// Maximum number of opening braces tried as the start of a truncated object.
const MAX_TRUNCATED_STARTS: usize = 16;

/// The review of a reply.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ReviewObject {
    /// The whole object.
    Whole(Value),
    /// The complete values of an object that is truncated or malformed.
    Truncated(Value),
}

/// Returns the review of a reply, by the rule of this module.
///
/// # Errors
/// [`UnreadableReview`] if the reply has no review, or several that differ.
pub(super) fn review_object(reply: &str, finish: FinishReason) -> Result<ReviewObject, UnreadableReview> {
    let text = without_reasoning(reply);
    let objects = json_objects(&text);
    let reviews: Vec<(&Range<usize>, &Value)> = objects
        .whole
        .iter()
        .filter(|(_, value)| value.get(SCORE).is_some())
        .map(|(range, value)| (range, value))
        .collect();
    let Some((range, review)) = reviews.last() else { return truncated_review(&text, &objects) };
    let cut_off = finish == FinishReason::Length && objects.failed.iter().any(|start| *start >= range.end);
    if objects.unfinished.is_some() || cut_off {
        return Err(UnreadableReview::Truncated);
    }
    let ranges: Vec<Range<usize>> = reviews.iter().map(|(range, _)| (*range).clone()).collect();
    let differ = reviews.iter().any(|(_, other)| other != review);
    let clear = has_unique_fields(&text[(*range).clone()]) && !is_quoted(&text, range.start);
    if differ || !clear || !other_scores(&text, &ranges, lenient_score(&review[SCORE])).is_empty() {
        return Err(UnreadableReview::Ambiguous);
    }
    Ok(ReviewObject::Whole((*review).clone()))
}

/// Returns the readable part of the only review of a text without a whole one.
fn truncated_review(text: &str, objects: &JsonObjects) -> Result<ReviewObject, UnreadableReview> {
    let missing = match (objects.whole.is_empty(), objects.failed.is_empty()) {
        (true, true) => UnreadableReview::NoObject,
        (false, true) => UnreadableReview::NoScore,
        (_, false) if objects.unfinished.is_some() => UnreadableReview::Truncated,
        (true, false) => UnreadableReview::NoObject,
        (false, false) => UnreadableReview::NoScore,
    };
    let scores = other_scores(text, &[], None);
    let [score] = scores.as_slice() else {
        return Err(if scores.is_empty() { missing } else { UnreadableReview::Ambiguous });
    };
    // An object that the reply ends in is the critic's own; one before it may be quoted.
    let first = objects.unfinished.unwrap_or(0);
    let is_start = |start: &&usize| (first..*score).contains(*start) && !is_quoted(text, **start);
    let starts = objects.failed.iter().rev().filter(is_start);
    let mut found = starts.take(MAX_TRUNCATED_STARTS).filter_map(|start| closed(&text[*start..]));
    found.find(|value| value.get(SCORE).is_some()).map(ReviewObject::Truncated).ok_or(missing)
}

/// True if `text` is the beginning of one JSON object, or a whole one, and nothing else.
pub(super) fn is_only_an_object(text: &str) -> bool {
    let text = text.trim();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    text.starts_with('{')
        && match values.next() {
            Some(Ok(_)) => values.byte_offset() == text.len(),
            Some(Err(error)) => error.is_eof(),
            None => false,
        }
}

/// The JSON objects of a text.
#[derive(Debug, Default)]
struct JsonObjects {
    /// Whole objects that are not inside another whole one, with their positions.
    whole: Vec<(Range<usize>, Value)>,
    /// Opening braces at which no whole object begins.
    failed: Vec<usize>,
    /// The first opening brace whose object is valid up to the end of the text, but unfinished.
    unfinished: Option<usize>,
}

fn json_objects(text: &str) -> JsonObjects {
    let mut objects = JsonObjects::default();
    let mut from = 0;
    while let Some(start) = text[from..].find('{').map(|at| from + at) {
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        from = match values.next() {
            Some(Ok(value)) => {
                let end = start + values.byte_offset();
                objects.whole.push((start..end, value));
                end
            }
            Some(Err(error)) => {
                objects.failed.push(start);
                if error.is_eof() {
                    objects.unfinished.get_or_insert(start);
                }
                start + 1
            }
            None => start + 1,
        };
    }
    objects
}

/// True if the object names neither its score nor its defects twice.
fn has_unique_fields(object: &str) -> bool {
    // The derived implementation refuses a field that occurs twice.
    #[derive(Deserialize)]
    struct Fields {
        #[serde(default, rename = "quality_score")]
        _score: IgnoredAny,
        #[serde(default, rename = "defects")]
        _defects: IgnoredAny,
    }
    serde_json::from_str::<Fields>(object).is_ok()
}

/// True if the line of `start` is marked as a quotation or as a line of a diff.
fn is_quoted(text: &str, start: usize) -> bool {
    let line = text[..start].rsplit('\n').next().unwrap_or_default();
    line.trim_start().starts_with(['>', '+']) || line == "-"
}

/// Offsets of the scores outside `reviews`: those in the form of a JSON field, and those in prose that differ from
/// `score`.
fn other_scores(text: &str, reviews: &[Range<usize>], score: Option<f64>) -> Vec<usize> {
    const MARKS: [char; 8] = ['"', '\'', '\\', '`', '*', ' ', '\t', '\n'];
    let text = text.to_ascii_lowercase();
    let is_other = |at: &usize| {
        let (before, after) = (&text[..*at], &text[at + SCORE.len()..]);
        let value = after.trim_start_matches(MARKS);
        let Some(value) = value.strip_prefix(':').or_else(|| value.strip_prefix('=')) else { return false };
        let quoted = before.ends_with(['"', '\'']) && after.starts_with(['"', '\'', '\\']);
        if quoted || before.trim_end_matches(MARKS).ends_with('{') {
            return true;
        }
        let value = value.trim_start_matches(MARKS);
        let digits = value.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(value.len());
        value[..digits].trim_end_matches('.').parse().is_ok_and(|other: f64| score.is_some_and(|score| score != other))
    };
    let outside = |at: &usize| !reviews.iter().any(|range| range.contains(at));
    text.match_indices(SCORE).map(|(at, _)| at).filter(outside).filter(is_other).collect()
}

/// Removes the reasoning of models that emit `<think>` sections before the answer. Tags in an object's strings are
/// text.
fn without_reasoning(reply: &str) -> String {
    const OPEN: &str = "<think>";
    const CLOSE: &str = "</think>";
    let mut tags: Vec<(usize, &str)> = [OPEN, CLOSE].iter().flat_map(|tag| reply.match_indices(tag)).collect();
    if tags.is_empty() {
        return reply.to_owned();
    }
    let objects = json_objects(reply).whole;
    tags.retain(|(at, _)| !objects.iter().any(|(range, _)| range.contains(at)));
    tags.sort_unstable();
    // Some chat templates put `<think>` into the prompt, so that the reply has only the closing tag.
    let opened_by_prompt = tags.first().is_some_and(|(_, tag)| *tag == CLOSE);
    let mut reasoning = opened_by_prompt && !reply.trim_start().starts_with(['{', '`']);
    let (mut answer, mut from) = (String::new(), 0);
    for (at, tag) in tags {
        match (reasoning, tag) {
            (false, OPEN) => answer.push_str(&reply[from..at]),
            (true, CLOSE) => from = at + CLOSE.len(),
            _ => continue,
        }
        reasoning = !reasoning;
    }
    if !reasoning {
        answer.push_str(&reply[from..]);
    }
    answer
}

/// Returns the truncated object at the start of `text`, closed after its last complete value.
fn closed(text: &str) -> Option<Value> {
    // Offsets where the text may be cut. Never after a digit, because further digits may be missing.
    let ends: Vec<usize> = text
        .char_indices()
        .filter(|(_, c)| matches!(c, '}' | ']' | '"' | ','))
        .map(|(i, c)| if c == ',' { i } else { i + c.len_utf8() })
        .collect();
    ends.iter().rev().take(MAX_CUTS).find_map(|end| {
        let head = &text[..*end];
        let value: Value = serde_json::from_str(&format!("{head}{}", closing_brackets(head)?)).ok()?;
        value.is_object().then_some(value)
    })
}

/// Returns the brackets that close everything that is open at the end of `head`. `None` if `head` ends inside a string.
fn closing_brackets(head: &str) -> Option<String> {
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

#[cfg(test)]
mod tests;
