//! Search/replace blocks: `<<<<<<< SEARCH`, `=======`, `>>>>>>> REPLACE`. The first marker may state the line of the
//! place, `<<<<<<< SEARCH line 12`, which a model copies from a list of candidates.

use similar::{Algorithm, DiffOp, capture_diff_slices};

use crate::edit::{Hunk, HunkLine, Position};
use crate::label::path_in_line;
use crate::problem::Problem;

/// Maximum number of hunks in one reply.
pub(crate) const MAX_HUNKS: usize = 512;
/// Maximum product of the numbers of old and new lines that are compared with each other.
const MAX_DIFF_PRODUCT: usize = 1_000_000;

/// True for the line that opens a hunk.
pub(crate) fn is_search_marker(line: &str) -> bool {
    search_marker(line).is_some()
}

/// Length of the marker and the stated line.
fn search_marker(line: &str) -> Option<(usize, Option<usize>)> {
    let line = line.trim();
    let text = line.trim_start_matches('<');
    let length = line.len() - text.len();
    let mut words = text.split_whitespace();
    let is_marker = length >= 5 && words.next().is_some_and(|word| word.eq_ignore_ascii_case("search"));
    if !is_marker {
        return None;
    }
    match (words.next(), words.next(), words.next()) {
        (None, ..) => Some((length, None)),
        (Some(word), Some(number), None) if word.eq_ignore_ascii_case("line") => {
            Some((length, Some(number.trim_end_matches(':').parse().ok()?)))
        }
        (Some(_), ..) => None,
    }
}

/// Length of a separator.
fn separator(line: &str) -> Option<usize> {
    let line = line.trim_end();
    (line.len() >= 5 && line.bytes().all(|b| b == b'=')).then_some(line.len())
}

fn is_replace_marker(line: &str) -> bool {
    let line = line.trim();
    line.starts_with(">>>>>") && line.trim_start_matches('>').trim().eq_ignore_ascii_case("replace")
}

/// Parses the hunks in `lines`. A line above a hunk may name its file; otherwise it is the file of the hunk before, or
/// `path`. Other lines between hunks are ignored. The paths are not validated.
///
/// # Errors
/// [`Problem::Incomplete`], [`Problem::TooManyEdits`] or, if a hunk has no path, [`Problem::NoBlock`].
pub(crate) fn parse(path: Option<&str>, lines: &[&str]) -> Result<Vec<(String, Vec<Hunk>)>, Problem> {
    let mut files: Vec<(String, Vec<Hunk>)> = Vec::new();
    let mut path = path.map(str::to_owned);
    let mut count = 0;
    let mut label: Option<String> = None;
    let mut rest = lines;
    while let Some((line, after)) = rest.split_first() {
        rest = after;
        let Some((length, stated)) = search_marker(line) else {
            let is_fence = line.trim_start().starts_with("```") || line.trim_start().starts_with("~~~");
            if !is_fence && !line.trim().is_empty() {
                label = path_in_line(line);
            }
            continue;
        };
        count += 1;
        if count > MAX_HUNKS {
            return Err(Problem::TooManyEdits { max: MAX_HUNKS });
        }
        path = label.take().or(path);
        let Some(path) = &path else { return Err(Problem::NoBlock) };
        let incomplete = || Problem::Incomplete { path: path.clone() };
        let end = rest.iter().position(|line| is_replace_marker(line)).ok_or_else(incomplete)?;
        let (body, after) = (&rest[..end], &rest[end + 1..]);
        if body.iter().any(|line| is_search_marker(line)) {
            return Err(incomplete());
        }
        // The file may have lines of equal signs itself, but rarely as many as the marker is long.
        let same_length = body.iter().position(|line| separator(line) == Some(length));
        let middle = same_length.or_else(|| body.iter().position(|line| separator(line).is_some()));
        let middle = middle.ok_or_else(incomplete)?;
        let hunk = hunk(&body[..middle], &body[middle + 1..], stated);
        rest = after;
        match files.last_mut().filter(|(last, _)| last == path) {
            Some((_, hunks)) => hunks.push(hunk),
            None => files.push((path.clone(), vec![hunk])),
        }
    }
    Ok(files)
}

fn hunk(search: &[&str], replace: &[&str], stated: Option<usize>) -> Hunk {
    let plain = |lines: &[&str]| lines.iter().map(|l| l.trim_end_matches('\r').to_owned()).collect::<Vec<_>>();
    let (mut search, replace) = (plain(search), plain(replace));
    if search.iter().all(|line| line.trim().is_empty()) {
        // Appends to the file, or creates it.
        search.clear();
    }
    Hunk {
        lines: hunk_lines(search, replace),
        position: stated.map_or(Position::Unstated, Position::Line),
        final_newline: None,
        states_line_ends: false,
    }
}

/// Old and new lines as one list, in which the lines that both have are kept.
fn hunk_lines(old: Vec<String>, new: Vec<String>) -> Vec<HunkLine> {
    let equal = |(a, b): &(&String, &String)| a == b;
    let before = old.iter().zip(&new).take_while(equal).count();
    let most = old.len().min(new.len()) - before;
    let after = old.iter().rev().zip(new.iter().rev()).take(most).take_while(equal).count();
    let (old_middle, new_middle) = (&old[before..old.len() - after], &new[before..new.len() - after]);
    let keep = |lines: &[String]| lines.iter().cloned().map(HunkLine::Keep).collect::<Vec<_>>();
    let mut lines = keep(&old[..before]);
    if old_middle.len().saturating_mul(new_middle.len()) > MAX_DIFF_PRODUCT {
        lines.extend(old_middle.iter().cloned().map(HunkLine::Remove));
        lines.extend(new_middle.iter().cloned().map(HunkLine::Add));
    } else {
        for op in capture_diff_slices(Algorithm::Myers, old_middle, new_middle) {
            match op {
                DiffOp::Equal { .. } => lines.extend(keep(&old_middle[op.old_range()])),
                DiffOp::Delete { .. } | DiffOp::Insert { .. } | DiffOp::Replace { .. } => {
                    lines.extend(old_middle[op.old_range()].iter().cloned().map(HunkLine::Remove));
                    lines.extend(new_middle[op.new_range()].iter().cloned().map(HunkLine::Add));
                }
            }
        }
    }
    lines.extend(keep(&old[old.len() - after..]));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: [&str; 7] = ["<<<<<<< SEARCH", "a", "b", "=======", "a", "x", ">>>>>>> REPLACE"];

    fn one(lines: &[&str]) -> Hunk {
        let mut files = parse(Some("f"), lines).unwrap();
        assert_eq!((files.len(), files[0].1.len()), (1, 1), "{files:?}");
        files.remove(0).1.remove(0)
    }

    #[test]
    fn lines_that_both_sides_have_are_kept() {
        let lines = [HunkLine::Keep("a".into()), HunkLine::Remove("b".into()), HunkLine::Add("x".into())];
        assert_eq!(one(&BLOCK).lines, lines);
        let old: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let new: Vec<String> = ["a", "x", "c", "y", "d"].map(str::to_owned).to_vec();
        let kept = hunk_lines(old, new).into_iter().filter(|l| matches!(l, HunkLine::Keep(_))).count();
        assert_eq!(kept, 3);
    }

    #[test]
    fn marker_may_state_a_line() {
        assert_eq!(search_marker("<<<<<<< SEARCH line 12"), Some((7, Some(12))));
        assert_eq!(search_marker("<<<<<<< search"), Some((7, None)));
        for other in ["<<<<<<< HEAD", "<<<< SEARCH", "<<<<<<< SEARCH line", "<<<<<<< SEARCH line x", "SEARCH"] {
            assert_eq!(search_marker(other), None, "{other}");
        }
    }

    #[test]
    fn heading_underlined_with_equal_signs_is_no_separator() {
        let block = ["<<<<<<< SEARCH", "Title", "=====", "text", "=======", "Title", "=====", "new", ">>>>>>> REPLACE"];
        let hunk = one(&block);
        assert_eq!(
            (hunk.old_lines(), hunk.new_lines()),
            (vec!["Title", "=====", "text"], vec!["Title", "=====", "new"])
        );
        // A marker of another length than the separator.
        let block = ["<<<<< SEARCH", "a", "=======", "b", ">>>>>>> REPLACE"];
        assert_eq!(one(&block).old_lines(), ["a"]);
    }

    #[test]
    fn line_above_a_hunk_names_its_file() {
        let mut lines = vec!["a.py"];
        lines.extend(BLOCK);
        lines.extend(["```", "", "### src/b.py", "```python"]);
        lines.extend(BLOCK);
        lines.extend(BLOCK);
        let files = parse(None, &lines).unwrap();
        let counts: Vec<_> = files.iter().map(|(path, hunks)| (path.as_str(), hunks.len())).collect();
        assert_eq!(counts, [("a.py", 1), ("src/b.py", 2)]);
        assert_eq!(parse(None, &BLOCK), Err(Problem::NoBlock));
    }

    #[test]
    fn blank_search_appends_and_incomplete_hunk_is_reported() {
        let hunk = one(&["<<<<<<< SEARCH", "", "=======", "z", ">>>>>>> REPLACE"]);
        assert_eq!(hunk.lines, [HunkLine::Add("z".into())]);
        assert!(matches!(parse(Some("f"), &BLOCK[..5]), Err(Problem::Incomplete { .. })));
        assert!(matches!(
            parse(Some("f"), &["<<<<<<< SEARCH", "a", ">>>>>>> REPLACE"]),
            Err(Problem::Incomplete { .. })
        ));
        let two: Vec<_> = BLOCK[..6].iter().chain(&BLOCK).copied().collect();
        assert!(matches!(parse(Some("f"), &two), Err(Problem::Incomplete { .. })));
    }
}
