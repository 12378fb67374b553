//! Splits text into words by a regular expression of the model's file, in bounded time.
//!
//! The expressions of real tokenizers look one character ahead and match words of a few characters, but a file can
//! contain any expression, and backtracking can take exponential time. So one search sees only a window of the text,
//! may backtrack only a limited number of times, and the time limit is checked before each search. A match that reaches
//! the end of its window is searched again in a larger one, so ordinary expressions give the words that they give
//! without windows.

use fancy_regex::{Regex, RegexBuilder};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::pattern::{Invert, Pattern};
use tokenizers::tokenizer::{Offsets, PreTokenizedString, Result, SplitDelimiterBehavior};

use crate::model::time_limit::TimeLimit;

/// Maximum number of backtracking steps of one search: some steps for each character of a window.
const MAX_BACKTRACKS: usize = 1 << 18;
/// Size of the part of the text that a search sees at first, in bytes.
const WINDOW_BYTES: usize = 1 << 14;
/// Maximum size of the part of the text that a search sees, in bytes. A longer word is cut.
const MAX_WINDOW_BYTES: usize = 1 << 20;
/// Bytes at the end of a window without a match that the next search sees again.
const OVERLAP_BYTES: usize = 1 << 8;
/// Maximum size of the compiled expression, in bytes. A table of all letters takes some ten thousand bytes.
const MAX_REGEX_BYTES: usize = 4 << 20;

/// A regular expression that splits text into words.
#[derive(Debug)]
pub struct SplitRegex {
    regex: Regex,
    behavior: SplitDelimiterBehavior,
    invert: bool,
}

impl SplitRegex {
    /// Compiles the expression of `split`.
    ///
    /// # Errors
    /// If the expression is invalid or too large.
    pub fn new(split: &Split) -> std::result::Result<Self, String> {
        let pattern = match &split.pattern {
            SplitPattern::String(text) => fancy_regex::escape(text).into_owned(),
            SplitPattern::Regex(pattern) => pattern.clone(),
        };
        let mut builder = RegexBuilder::new(&pattern);
        let regex = builder.backtrack_limit(MAX_BACKTRACKS).delegate_size_limit(MAX_REGEX_BYTES).build();
        let regex = regex.map_err(|error| format!("its pre-tokenizer has an unusable expression: {error}"))?;
        Ok(Self { regex, behavior: split.behavior, invert: split.invert })
    }

    /// Splits the words further.
    ///
    /// # Errors
    /// [`crate::model::time_limit::Stopped`], or the error of a search that needs too many steps.
    pub fn split(&self, words: &mut PreTokenizedString, limit: &TimeLimit) -> Result<()> {
        let search = || Search { regex: &self.regex, limit };
        words.split(|_, word| match self.invert {
            true => word.split(Invert(search()), self.behavior),
            false => word.split(search(), self.behavior),
        })
    }
}

struct Search<'a> {
    regex: &'a Regex,
    limit: &'a TimeLimit,
}

impl Search<'_> {
    /// The first match at or after `from`.
    fn find(&self, text: &str, mut from: usize) -> Result<Option<Offsets>> {
        let mut window = WINDOW_BYTES;
        loop {
            self.limit.check()?;
            let end = text.floor_char_boundary(from.saturating_add(window));
            let is_whole = end == text.len();
            match self.regex.find_from_pos(&text[..end], from)? {
                Some(found) if is_whole || found.end() < end || window >= MAX_WINDOW_BYTES => {
                    return Ok(Some((found.start(), found.end())));
                }
                Some(_) => window *= 2,
                None if is_whole => return Ok(None),
                None => from = text.floor_char_boundary(end - OVERLAP_BYTES),
            }
        }
    }
}

impl Pattern for Search<'_> {
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut splits = Vec::new();
        let (mut from, mut end_of_last) = (0, None);
        let mut covered = 0;
        while from <= inside.len()
            && let Some((start, end)) = self.find(inside, from)?
        {
            from = end;
            if start == end {
                from += inside[end..].chars().next().map_or(1, char::len_utf8);
                // An empty match directly after another match is none.
                if end_of_last == Some(end) {
                    continue;
                }
            }
            end_of_last = Some(end);
            if covered != start {
                splits.push(((covered, start), false));
            }
            splits.push(((start, end), true));
            covered = end;
        }
        if covered != inside.len() {
            splits.push(((covered, inside.len()), false));
        }
        Ok(splits)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::time_limit::Stopped;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizer};

    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn split(pattern: &str, behavior: SplitDelimiterBehavior, invert: bool) -> Split {
        Split::new(SplitPattern::Regex(pattern.to_owned()), behavior, invert).unwrap()
    }

    fn words(split: impl FnOnce(&mut PreTokenizedString), text: &str) -> Vec<String> {
        let mut words = PreTokenizedString::from(text);
        split(&mut words);
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(word, _, _)| word.to_owned()).collect()
    }

    #[test]
    fn words_equal_those_of_the_library_across_windows() {
        let line = "fn  main() { let x = 12345;\t// don't\r\n\n   }  日本語 \u{a0}é\n";
        let spaces = format!("a{}b{}\n", " ".repeat(40_000), " ".repeat(20_000));
        let far = format!("1234567{}89", "x ".repeat(30_000));
        for text in [&line.repeat(2000), &spaces, &far, "", "a"] {
            for pattern in [QWEN2, r"\d{1,3}(?=(?:\d{3})*\b)", r"\p{N}{1,3}", "(?=[A-Z])", "x*"] {
                for (behavior, invert) in
                    [(SplitDelimiterBehavior::Isolated, false), (SplitDelimiterBehavior::Removed, true)]
                {
                    let split = split(pattern, behavior, invert);
                    let bounded = SplitRegex::new(&split).unwrap();
                    let own = words(|w| bounded.split(w, &TimeLimit::none()).unwrap(), text);
                    assert_eq!(own, words(|w| split.pre_tokenize(w).unwrap(), text), "{pattern}");
                }
            }
        }
    }

    #[test]
    fn slow_expression_is_stopped_by_its_time_limit() {
        // Every search scans the rest of its window, so the text takes quadratic time.
        let slow =
            SplitRegex::new(&split(r"(?=[^\x00]*\x00)|[\s\S]", SplitDelimiterBehavior::Isolated, false)).unwrap();
        let limit = TimeLimit::new(Duration::from_millis(20));
        let mut text = PreTokenizedString::from("a".repeat(8 << 20).as_str());
        let error = slow.split(&mut text, &limit).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Stopped::OutOfTime { .. })), "{error}");
    }

    #[test]
    fn exponential_expression_is_an_error() {
        let slow = SplitRegex::new(&split(r"(?:a|a|aa)+(?!a|b)\x00", SplitDelimiterBehavior::Isolated, false)).unwrap();
        let mut text = PreTokenizedString::from("a".repeat(64).as_str());
        assert!(slow.split(&mut text, &TimeLimit::none()).is_err());
    }

    #[test]
    fn huge_expression_is_rejected() {
        let huge = Split::new(SplitPattern::Regex(r"\p{L}{200}".to_owned()), SplitDelimiterBehavior::Isolated, false);
        if let Ok(huge) = huge {
            assert!(SplitRegex::new(&huge).unwrap_err().contains("unusable expression"));
        }
    }
}
