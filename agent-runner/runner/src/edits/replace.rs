//! Search/replace hunks: `<<<<<<< SEARCH`, `=======`, `>>>>>>> REPLACE`. The search lines must occur in the file
//! exactly once. Only differences in trailing white space are tolerated, because models drop it and it rarely matters.

use super::ReplyProblem;

/// Maximum number of hunks of one file.
const MAX_HUNKS: usize = 512;
/// Maximum number of lines compared to find the hunks of one reply. An ordinary hunk needs one comparison for each line
/// of its file.
pub(super) const MAX_LINE_COMPARISONS: usize = 5_000_000;

/// Bytes of a file whose copy counts as one comparison.
const BYTES_PER_COMPARISON: usize = 64;

/// One search/replace hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hunk {
    /// Lines to search for; empty to append to the file.
    pub search: Vec<String>,
    /// Lines that replace the search lines.
    pub replace: Vec<String>,
}

/// True for the line that opens a hunk.
pub(super) fn is_search_marker(line: &str) -> bool {
    let line = line.trim();
    line.starts_with("<<<<<") && line.trim_start_matches('<').trim().eq_ignore_ascii_case("search")
}

fn is_separator(line: &str) -> bool {
    let line = line.trim_end();
    line.len() >= 5 && line.bytes().all(|b| b == b'=')
}

fn is_replace_marker(line: &str) -> bool {
    let line = line.trim();
    line.starts_with(">>>>>") && line.trim_start_matches('>').trim().eq_ignore_ascii_case("replace")
}

/// Parses the hunks in a block's lines. Lines between hunks are ignored.
pub(super) fn hunks(path: &str, lines: &[&str]) -> Result<Vec<Hunk>, ReplyProblem> {
    let incomplete = || ReplyProblem::Incomplete { path: path.to_owned() };
    let mut hunks = Vec::new();
    let mut lines = lines.iter();
    while let Some(line) = lines.next() {
        if !is_search_marker(line) {
            continue;
        }
        if hunks.len() == MAX_HUNKS {
            return Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS });
        }
        let mut hunk = Hunk { search: Vec::new(), replace: Vec::new() };
        loop {
            let line = lines.next().ok_or_else(incomplete)?;
            if is_separator(line) {
                break;
            }
            hunk.search.push((*line).to_owned());
        }
        loop {
            let line = lines.next().ok_or_else(incomplete)?;
            if is_replace_marker(line) {
                break;
            }
            hunk.replace.push((*line).to_owned());
        }
        hunks.push(hunk);
    }
    Ok(hunks)
}

/// Returns the text with one hunk applied. A hunk without search lines creates the file or appends to it.
/// `comparisons` is the number of lines that may still be compared.
pub(super) fn replace(path: &str, text: &str, hunk: &Hunk, comparisons: &mut usize) -> Result<String, ReplyProblem> {
    // Also limits how often a file of few long lines is copied.
    *comparisons = comparisons.saturating_sub(text.len() / BYTES_PER_COMPARISON);
    if *comparisons == 0 {
        return Err(ReplyProblem::TooManyComparisons { path: path.to_owned() });
    }
    let mut lines: Vec<&str> = text.lines().collect();
    let replacement: Vec<&str> = hunk.replace.iter().map(String::as_str).collect();
    let range = if hunk.search.iter().all(|l| l.trim().is_empty()) {
        lines.len()..lines.len()
    } else {
        let n = hunk.search.len();
        let mut find = |lines_equal: fn(&str, &str) -> bool| -> Vec<usize> {
            let mut is_equal = |a: &str, b: &str| {
                *comparisons = comparisons.saturating_sub(1);
                *comparisons > 0 && lines_equal(a, b)
            };
            let mut matches = |w: &[&str]| w.iter().zip(&hunk.search).all(|(a, b)| is_equal(a, b));
            lines.windows(n).enumerate().filter(|(_, w)| matches(w)).map(|(i, _)| i).collect()
        };
        let mut found = find(|a, b| a == b);
        if found.is_empty() {
            found = find(|a, b| a.trim_end() == b.trim_end());
        }
        if *comparisons == 0 {
            return Err(ReplyProblem::TooManyComparisons { path: path.to_owned() });
        }
        let line = hunk.search.iter().find(|l| !l.trim().is_empty()).map(|l| l.trim().to_owned()).unwrap_or_default();
        match found.as_slice() {
            [] => return Err(ReplyProblem::NotFound { path: path.to_owned(), line }),
            [one] => *one..*one + n,
            many => return Err(ReplyProblem::Ambiguous { path: path.to_owned(), line, count: many.len() }),
        }
    };
    lines.splice(range, replacement);
    let mut new = lines.join("\n");
    if !new.is_empty() {
        new.push('\n');
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replace_in(text: &str, hunk: &Hunk) -> Result<String, ReplyProblem> {
        replace("f", text, hunk, &mut 1_000)
    }

    const BLOCK: [&str; 7] = ["<<<<<<< SEARCH", "b", "=======", "x", "y", ">>>>>>> REPLACE", "said"];

    #[test]
    fn hunk_must_match_exactly_once() {
        let hunks = hunks("f", &BLOCK).unwrap();
        assert_eq!(hunks.len(), 1);
        assert_eq!(replace_in("a\nb  \nc\n", &hunks[0]).unwrap(), "a\nx\ny\nc\n");
        assert!(matches!(replace_in("a\n", &hunks[0]), Err(ReplyProblem::NotFound { .. })));
        assert!(matches!(replace_in("b\nb\n", &hunks[0]), Err(ReplyProblem::Ambiguous { count: 2, .. })));
    }

    #[test]
    fn empty_search_appends_and_incomplete_hunk_is_reported() {
        let hunk = Hunk { search: vec![], replace: vec!["z".into()] };
        assert_eq!(replace_in("a\n", &hunk).unwrap(), "a\nz\n");
        assert_eq!(replace_in("", &hunk).unwrap(), "z\n");
        assert!(matches!(hunks("f", &BLOCK[..4]), Err(ReplyProblem::Incomplete { .. })));
    }

    #[test]
    fn repetitive_search_is_refused() {
        let text = "\n".repeat(50_000) + "x\n";
        let mut search = vec![String::new(); 20_000];
        search.push("y".to_owned());
        let hunk = Hunk { search, replace: vec![] };
        let mut comparisons = MAX_LINE_COMPARISONS;
        let problem = replace("f", &text, &hunk, &mut comparisons).unwrap_err();
        assert_eq!(problem, ReplyProblem::TooManyComparisons { path: "f".into() });
    }
}
