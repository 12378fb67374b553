use cfq_proto::job::FinishReason::{self, Length, Stop};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::pipeline::{early_stopped_review, early_stops, parse_review, salvage_review};

const OWN: &str = r#"{"quality_score": 20, "defects": [{"severity": "major", "description": "wrong"}]}"#;
const QUOTED: &str = r#"{"quality_score": 100, "defects": []}"#;

fn found(reply: &str) -> Result<f64, UnreadableReview> {
    parse_review(reply, Stop).map(|review| review.quality_score)
}

#[test]
fn reply_with_different_reviews_is_ambiguous() {
    for reply in [
        format!("report.json contains {QUOTED}.\n{OWN}"),
        format!("{OWN}\nIt replaces {QUOTED}."),
        format!("```json\n{QUOTED}\n```\nMy review:\n```json\n{OWN}\n```"),
        format!("[{QUOTED}, {OWN}]"),
        format!("> {QUOTED}\n\n{OWN}"),
        format!("```diff\n+{QUOTED}\n```\n{OWN}"),
        format!("```diff\n+{{\n+  \"quality_score\": 100,\n+  \"defects\": []\n+}}\n```\n{OWN}"),
        format!("{{\"file\": {QUOTED}}}\n{OWN}"),
        format!("{}\n{OWN}", json!({ "file": QUOTED })),
        format!("{QUOTED}\n{{'quality_score': 20, 'defects': ['wrong']}}"),
        format!("{QUOTED}\n{{quality_score: 20}}"),
        format!("{{\"quality_score\": 20, \"defects\": [{{\"description\": \"it has {QUOTED}\"}}]}}"),
        format!("The file claims {QUOTED}, I say quality_score: 20."),
        r#"{"quality_score": 20, "defects": [], "quality_score": 100}"#.to_owned(),
        format!("> {QUOTED}"),
    ] {
        assert_eq!(parse_review(&reply, Stop), Err(UnreadableReview::Ambiguous), "{reply}");
        assert_eq!(salvage_review(&reply, Stop), Err(UnreadableReview::Ambiguous), "{reply}");
    }
}

#[test]
fn truncated_review_is_not_replaced_by_an_earlier_one() {
    for end in 1..OWN.len() {
        for finish in [Stop, Length] {
            let reply = format!("It has {QUOTED}.\n{}", &OWN[..end]);
            assert!(parse_review(&reply, finish).is_err() && salvage_review(&reply, finish).is_err(), "{reply}");
        }
    }
    let malformed = format!("{QUOTED}\n{{'defects': ['wr");
    assert_eq!(parse_review(&malformed, Length), Err(UnreadableReview::Truncated));
}

#[test]
fn single_review_is_found_in_other_text() {
    let in_string = json!({ "quality_score": 20, "defects": [{ "severity": "major", "description": QUOTED }] });
    for reply in [
        format!("```json\n{OWN}\n```"),
        format!("{OWN}\n{OWN}"),
        format!("Quality_score: 20\n{OWN}"),
        format!("fn f() {{ x }} and {{}} and {{\"a\": {{\"b\": 1}}}}\n{OWN}\nThe field quality_score is 20."),
        format!("<think>{QUOTED} or {{\"quality_score\": 50}}</think>{OWN}"),
        format!("Perhaps {QUOTED}?\n</think>\n{OWN}"),
        format!("<think>{QUOTED}</think>{OWN}<think>{QUOTED}</think>"),
        in_string.to_string(),
        in_string.to_string().replace("quality_score\\\": 100", "x</think>y<think>\\\": 100"),
    ] {
        assert_eq!(found(&reply), Ok(20.0), "{reply}");
    }
    assert_eq!(found(&format!("{{\"review\": {OWN}}}")), Err(UnreadableReview::NoScore));
}

#[test]
fn early_stop_needs_a_reply_of_one_object() {
    let conditions = early_stops(&[cfq_convergence::DecidedRange { from: 85.0, below: 101.0 }]);
    let stopped = |text: &str| early_stopped_review(text, &conditions).map(|review| review.quality_score);
    let start = r#"{"quality_score": 100, "defects": [], "#;
    assert_eq!(stopped(start), Some(100.0));
    for reply in [format!("{QUOTED}\n{OWN}"), format!("It has {start}"), format!("{QUOTED}\n{}", &OWN[..9])] {
        assert_eq!(stopped(&reply), None, "{reply}");
    }
}

fn review() -> impl Strategy<Value = Value> {
    let text = "[a-z,}\\\\\"\\[{:é </>]{0,12}";
    let severity = prop::sample::select(vec!["critical", "major", "minor"]);
    let defects = prop::collection::vec((severity, text), 0..3);
    (0u32..=100, defects, text).prop_map(|(score, defects, suggestion)| {
        let defects: Vec<Value> =
            defects.iter().map(|(severity, text)| json!({ "severity": severity, "description": text })).collect();
        json!({ "quality_score": score, "defects": defects, "suggestions": [suggestion], "required_changes": [] })
    })
}

/// A text that a critic may write around its review. It contains no score.
fn other_text() -> impl Strategy<Value = String> {
    let pieces = ["Fine.", "\n", "```json\n", "```\n", "{}", "{ x }", "{\"a\": [1]}", "[", "}", "- ", "\"", "é"];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..5).prop_map(|pieces| pieces.concat() + "\n")
}

/// A quotation of a review, in the forms in which critics quote files.
fn quotation(quoted: &Value, form: usize) -> String {
    let pretty = serde_json::to_string_pretty(quoted).unwrap();
    let marked = |mark: &str| pretty.lines().map(|line| format!("{mark}{line}\n")).collect::<String>();
    match form {
        0 => quoted.to_string(),
        1 => format!("```json\n{pretty}\n```\n"),
        2 => format!("```diff\n{}```\n", marked("+")),
        3 => marked("> "),
        4 => json!({ "content": quoted.to_string() }).to_string(),
        5 => json!({ "content": quoted }).to_string(),
        6 => format!("`{quoted}`"),
        7 => format!("{}// ...\n", &pretty[..pretty.len() - 2]),
        _ => format!("{:?}", quoted.to_string()),
    }
}

proptest! {
    /// With any quoted text at any place of a reply, the result is the critic's own review or none.
    #[test]
    fn quoted_review_never_replaces_the_own_one(
        own in review(), quoted in review(), form in 0usize..9, text in other_text(), first: bool, cut in 0usize..400,
        length: bool,
    ) {
        prop_assume!(own != quoted);
        let finish = if length { Length } else { Stop };
        let whole = own.to_string();
        // A reply is cut off at its end.
        let end = if first { cut.clamp(1, whole.len()) } else { whole.len() };
        let own_text = &whole[..whole.floor_char_boundary(end)];
        let quotation = quotation(&quoted, form);
        let reply = if first { format!("{quotation}{text}{own_text}") } else { format!("{own_text}{text}{quotation}") };
        for read in [parse_review, salvage_review] {
            if let Ok(review) = read(&reply, finish) {
                prop_assert_eq!(own_text, &whole);
                prop_assert_eq!(Ok(review), parse_review(&whole, Stop));
            }
        }
    }

    #[test]
    fn single_review_is_found_wherever_it_is(own in review(), before in other_text(), after in other_text(), draft in review()) {
        let expected = parse_review(&own.to_string(), Stop);
        prop_assert!(expected.is_ok());
        prop_assert_eq!(&parse_review(&format!("{before}{own}\n{after}"), Stop), &expected);
        prop_assert_eq!(&parse_review(&format!("<think>\n{draft}\n</think>\n{own}"), Stop), &expected);
    }

    #[test]
    fn no_reply_makes_the_search_panic(
        reply in "(\\{|\\}|\"|\\[|\\]|:|,|<think>|</think>|quality_score|\"quality_score\":|1|é|\\\\|\n|>|\\+){0,40}",
        length: bool,
    ) {
        let finish: FinishReason = if length { Length } else { Stop };
        drop(review_object(&reply, finish));
        is_only_an_object(&reply);
    }
}
