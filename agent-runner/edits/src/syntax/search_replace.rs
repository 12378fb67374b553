//! Search/replace blocks: `<<<<<<< SEARCH`, `=======`, `>>>>>>> REPLACE`. The first marker may state the line of the
//! place, `<<<<<<< SEARCH line 12`, which a model copies from a list of candidates, or the path of the file. The words
//! ORIGINAL and UPDATED, and markers of `-` and `+`, are variants of other tools.

use similar::{Algorithm, DiffOp, capture_diff_slices};

use super::MAX_HUNKS;
use crate::edit::{Hunk, HunkLine, Position};
use crate::label::{HunkLabel, hunk_label, is_path};
use crate::problem::ReplyProblem;

/// Maximum product of the numbers of old and new lines that are compared with each other.
const MAX_DIFF_PRODUCT: usize = 1_000_000;
/// Maximum number of lines that may separate the old lines from the new ones.
const MAX_SEPARATORS: usize = 8;

/// The marker that opens a hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SearchMarker {
    length: usize,
    stated: Option<usize>,
    path: Option<String>,
}

/// True for the line that opens a hunk.
pub(crate) fn is_search_marker(line: &str) -> bool {
    search_marker(line).is_some()
}

fn search_marker(line: &str) -> Option<SearchMarker> {
    let line = line.trim();
    let mark = line.chars().next().filter(|c| matches!(c, '<' | '-'))?;
    let text = line.trim_start_matches(mark);
    let length = line.len() - text.len();
    let mut words = text.split_whitespace().map(|word| word.trim_matches(['(', ')', ':']));
    let first = words.next()?;
    let is_marker = first.eq_ignore_ascii_case("search") || (mark == '<' && first.eq_ignore_ascii_case("original"));
    if length < 5 || !is_marker {
        return None;
    }
    let mut marker = SearchMarker { length, stated: None, path: None };
    match (words.next(), words.next()) {
        (Some(key), Some(number)) if key.eq_ignore_ascii_case("line") || key.eq_ignore_ascii_case("lines") => {
            // `lines 12-15`
            marker.stated = number.split('-').next().and_then(|number| number.parse().ok());
        }
        (Some(path), None) if is_path(path) => marker.path = Some(path.to_owned()),
        _ => {}
    }
    Some(marker)
}

/// Length of a separator.
fn separator(line: &str) -> Option<usize> {
    let line = line.trim_end();
    (line.len() >= 5 && line.bytes().all(|b| b == b'=')).then_some(line.len())
}

/// True for the line that ends a hunk.
pub(crate) fn is_replace_marker(line: &str) -> bool {
    let line = line.trim();
    let word = |mark: char| line.trim_start_matches(mark).trim();
    (line.starts_with(">>>>>") && ["replace", "updated"].iter().any(|end| word('>').eq_ignore_ascii_case(end)))
        || (line.starts_with("+++++") && word('+').eq_ignore_ascii_case("replace"))
}

/// Parses the hunks in `lines`. The line above a hunk may name its file; otherwise it is the file of the hunk before, or
/// `path`. Other lines between hunks are ignored. The paths are not validated.
///
/// # Errors
/// [`ReplyProblem::Incomplete`], [`ReplyProblem::TooManyEdits`], or [`ReplyProblem::UnnamedHunk`] if the line above a hunk
/// names several files.
pub(crate) fn parse(path: &str, lines: &[&str]) -> Result<Vec<(String, Vec<Hunk>)>, ReplyProblem> {
    let mut files: Vec<(String, Vec<Hunk>)> = Vec::new();
    let mut path = path.to_owned();
    let mut count = 0;
    let mut line_above = "";
    let mut rest = lines;
    while let Some((line, after)) = rest.split_first() {
        rest = after;
        let Some(marker) = search_marker(line) else {
            let is_fence = line.trim_start().starts_with("```") || line.trim_start().starts_with("~~~");
            if !is_fence && !line.trim().is_empty() {
                line_above = line;
            }
            continue;
        };
        count += 1;
        if count > MAX_HUNKS {
            return Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS });
        }
        path = match (marker.path, hunk_label(line_above)) {
            (Some(path), _) | (None, HunkLabel::Path(path)) => path,
            (None, HunkLabel::None) => path,
            (None, HunkLabel::Unclear) => return Err(ReplyProblem::UnnamedHunk),
        };
        line_above = "";
        let incomplete = || ReplyProblem::Incomplete { path: path.clone() };
        let end = rest.iter().position(|line| is_replace_marker(line)).ok_or_else(incomplete)?;
        let (body, after) = (&rest[..end], &rest[end + 1..]);
        if body.iter().any(|line| is_search_marker(line)) {
            return Err(incomplete());
        }
        // The file may have lines of equal signs itself, but rarely as many as the marker is long.
        let of_length = |wanted: Option<usize>| -> Vec<usize> {
            let is_separator = |line: &&str| separator(line).is_some_and(|found| wanted.is_none_or(|w| found == w));
            body.iter().enumerate().filter(|(_, line)| is_separator(line)).map(|(n, _)| n).collect()
        };
        let mut separators = of_length(Some(marker.length));
        if separators.is_empty() {
            separators = of_length(None);
        }
        let reading = |middle: &usize| (&body[..*middle], &body[*middle + 1..]);
        let mut readings: Vec<_> = separators.iter().take(MAX_SEPARATORS).map(reading).collect();
        if readings.is_empty() {
            return Err(incomplete());
        }
        let first = readings.remove(0);
        let hunk = hunk(first, &readings, marker.stated);
        rest = after;
        match files.last_mut().filter(|(last, _)| *last == path) {
            Some((_, hunks)) => hunks.push(hunk),
            None => files.push((path.clone(), vec![hunk])),
        }
    }
    Ok(files)
}

/// A hunk that replaces the first lines of `first` by the second ones, or of one of the `others`.
fn hunk(first: (&[&str], &[&str]), others: &[(&[&str], &[&str])], stated: Option<usize>) -> Hunk {
    Hunk {
        lines: reading(first),
        other_readings: others.iter().copied().map(reading).collect(),
        position: stated.map_or(Position::Unstated, Position::Line),
        final_newline: None,
        states_line_ends: false,
        has_marks: false,
    }
}

fn reading((search, replace): (&[&str], &[&str])) -> Vec<HunkLine> {
    let plain = |lines: &[&str]| lines.iter().map(|l| l.trim_end_matches('\r').to_owned()).collect::<Vec<_>>();
    let (mut search, replace) = (plain(search), plain(replace));
    if search.iter().all(|line| line.trim().is_empty()) {
        // Appends to the file, or creates it.
        search.clear();
    }
    hunk_lines(search, replace)
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
        let mut files = parse("f", lines).unwrap();
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
    fn marker_may_state_a_line_or_a_path() {
        let marker =
            |length, stated, path: Option<&str>| Some(SearchMarker { length, stated, path: path.map(str::to_owned) });
        for (line, expected) in [
            ("<<<<<<< SEARCH", marker(7, None, None)),
            ("<<<<<<< search", marker(7, None, None)),
            ("<<<<<<< SEARCH line 12", marker(7, Some(12), None)),
            ("<<<<<<< SEARCH lines 12-15", marker(7, Some(12), None)),
            ("<<<<<<< SEARCH (line 12):", marker(7, Some(12), None)),
            ("<<<<<<< SEARCH src/a.py", marker(7, None, Some("src/a.py"))),
            ("<<<<<<< ORIGINAL", marker(7, None, None)),
            ("------- SEARCH", marker(7, None, None)),
            ("<<<<<<< HEAD", None),
            ("<<<< SEARCH", None),
            ("------- ORIGINAL", None),
            ("SEARCH", None),
        ] {
            assert_eq!(search_marker(line), expected, "{line}");
        }
        for line in [">>>>>>> REPLACE", ">>>>>>> UPDATED", "+++++++ REPLACE"] {
            assert!(is_replace_marker(line), "{line}");
        }
        assert!(!is_replace_marker(">>>>>>> branch") && !is_replace_marker("+++++++ UPDATED"));
    }

    #[test]
    fn every_line_that_may_separate_is_a_reading() {
        let lines = ["<<<<<<< SEARCH", "News", "=======", "a", "=======", "b", ">>>>>>> REPLACE"];
        let hunk = one(&lines);
        assert_eq!((hunk.old_lines(), hunk.other_readings.len()), (vec!["News"], 1));
        let second = Hunk { lines: hunk.other_readings[0].clone(), ..hunk };
        assert_eq!((second.old_lines(), second.new_lines()), (vec!["News", "=======", "a"], vec!["b"]));
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
        lines.push("In `c.py` and `d.py`:");
        let files = parse("f", &lines).unwrap();
        let counts: Vec<_> = files.iter().map(|(path, hunks)| (path.as_str(), hunks.len())).collect();
        assert_eq!(counts, [("a.py", 1), ("src/b.py", 2)]);
        assert_eq!(parse("f", &BLOCK).unwrap()[0].0, "f");
        lines.extend(BLOCK);
        assert_eq!(parse("f", &lines), Err(ReplyProblem::UnnamedHunk));
    }

    #[test]
    fn blank_search_appends_and_incomplete_hunk_is_reported() {
        let hunk = one(&["<<<<<<< SEARCH", "", "=======", "z", ">>>>>>> REPLACE"]);
        assert_eq!(hunk.lines, [HunkLine::Add("z".into())]);
        assert!(matches!(parse("f", &BLOCK[..5]), Err(ReplyProblem::Incomplete { .. })));
        assert!(matches!(
            parse("f", &["<<<<<<< SEARCH", "a", ">>>>>>> REPLACE"]),
            Err(ReplyProblem::Incomplete { .. })
        ));
        let two: Vec<_> = BLOCK[..6].iter().chain(&BLOCK).copied().collect();
        assert!(matches!(parse("f", &two), Err(ReplyProblem::Incomplete { .. })));
    }
}
