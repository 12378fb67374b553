//! Refuses rules in tokenizer.json that could take unbounded time or memory for a text.
//!
//! Text is normalized before it is split, without a time limit. Here a replacement that is much longer than the text it
//! replaces, or an expression that backtracks, could exhaust memory or time. No published tokenizer has either.

use serde_json::Value;

/// Maximum length of a text that a rule inserts, in bytes.
const MAX_INSERTED_BYTES: usize = 64;
/// Maximum length of a piece of a Unigram vocabulary, in bytes. All pieces are tried at each position of a text.
const MAX_UNIGRAM_PIECE_BYTES: usize = 256;
/// Parts of regular expressions that need backtracking; all other expressions take linear time.
const BACKTRACKING: [&str; 11] = ["(?=", "(?!", "(?<=", "(?<!", "(?>", "(?(", "++", "*+", "?+", "}+", "\\k"];

/// Checks the rules of tokenizer.json.
///
/// # Errors
/// What is refused, as continuation of "FILE cannot be used: ".
pub(super) fn check(json: &Value) -> Result<(), String> {
    check_normalizer(json.get("normalizer").unwrap_or(&Value::Null))?;
    let model = json.get("model").unwrap_or(&Value::Null);
    if model.get("type").and_then(Value::as_str) == Some("Unigram") {
        let pieces = model.get("vocab").and_then(Value::as_array).into_iter().flatten();
        let longest = pieces.filter_map(|piece| piece.get(0)?.as_str()).map(str::len).max().unwrap_or_default();
        if longest > MAX_UNIGRAM_PIECE_BYTES {
            return Err(format!(
                "a piece of its Unigram vocabulary has {longest} bytes, more than {MAX_UNIGRAM_PIECE_BYTES}"
            ));
        }
    }
    Ok(())
}

fn check_normalizer(rule: &Value) -> Result<(), String> {
    for step in rule.get("normalizers").and_then(Value::as_array).into_iter().flatten() {
        check_normalizer(step)?;
    }
    for key in ["content", "prepend"] {
        let length = rule.get(key).and_then(Value::as_str).map_or(0, str::len);
        if length > MAX_INSERTED_BYTES {
            return Err(format!("its normalizer inserts a text of {length} bytes, more than {MAX_INSERTED_BYTES}"));
        }
    }
    let expression = rule.get("pattern").and_then(|pattern| pattern.get("Regex")).and_then(Value::as_str);
    let refers_back = |expression: &str| {
        let after = expression.match_indices('\\').filter_map(|(at, _)| expression[at + 1..].chars().next());
        after.into_iter().any(|c| matches!(c, '1'..='9'))
    };
    match expression {
        Some(expression) if BACKTRACKING.iter().any(|part| expression.contains(part)) || refers_back(expression) => {
            Err(format!("the expression {expression:?} in its normalizer needs backtracking, which is not supported"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rules_of_published_tokenizers_are_accepted() {
        for normalizer in [
            json!(null),
            json!({ "type": "NFC" }),
            json!({ "type": "Sequence", "normalizers": [
                { "type": "Prepend", "prepend": "\u{2581}" },
                { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
                { "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " },
            ] }),
        ] {
            assert_eq!(check(&json!({ "normalizer": normalizer })), Ok(()));
        }
    }

    #[test]
    fn unbounded_rules_are_refused() {
        let refused = |normalizer| check(&json!({ "normalizer": { "normalizers": [normalizer] } })).unwrap_err();
        let long = "x".repeat(65);
        assert!(refused(json!({ "type": "Prepend", "prepend": long })).contains("65 bytes"));
        assert!(refused(json!({ "pattern": { "String": " " }, "content": long })).contains("65 bytes"));
        for expression in ["(?=[^a]*a)|b", "(a*)*\\1", "(?:a*+)*b"] {
            let rule = json!({ "type": "Replace", "pattern": { "Regex": expression }, "content": "" });
            assert!(refused(rule).contains("backtracking"), "{expression}");
        }
        let piece = json!({ "model": { "type": "Unigram", "vocab": [["x".repeat(257), -1.0]] } });
        assert!(check(&piece).unwrap_err().contains("257 bytes"));
    }
}
