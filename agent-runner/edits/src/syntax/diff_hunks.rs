//! Hunks of unified diffs.
//!
//! A hunk whose counts agree with its lines is read by the counts, because a removed line `-- x` looks like a header. All
//! other hunks extend to the next header.

use super::MAX_HUNKS;
use super::unified_diff::is_file_header;
use crate::edit::{Hunk, HunkLine, Position};
use crate::problem::ReplyProblem;

/// Reads the hunks of a file, and returns the lines after them. Outside of a fenced block (`fenced` is false), prose may
/// follow the last one. `count` is the number of hunks so far.
///
/// # Errors
/// [`ReplyProblem::TooManyEdits`].
pub(super) fn hunks<'a, 't>(
    lines: &'a [&'t str],
    fenced: bool,
    count: &mut usize,
) -> Result<(Vec<Hunk>, &'a [&'t str]), ReplyProblem> {
    let mut hunks = Vec::new();
    let mut rest = lines;
    while let Some(header) = rest.first().and_then(|line| HunkHeader::parse(line)) {
        *count += 1;
        if *count > MAX_HUNKS {
            return Err(ReplyProblem::TooManyEdits { max: MAX_HUNKS });
        }
        let (lines, after) = match counted_lines(&rest[1..], &header, fenced) {
            Some(counted) => counted,
            None => uncounted_lines(&rest[1..], fenced),
        };
        rest = after;
        if !lines.is_empty() {
            hunks.push(build_hunk(lines, header.position()));
        }
        // Blank lines between hunks.
        let blank = rest.iter().take_while(|line| line.trim().is_empty()).count();
        if rest.get(blank).is_some_and(|line| HunkHeader::parse(line).is_some()) {
            rest = &rest[blank..];
        }
    }
    Ok((hunks, rest))
}

/// The changes in `lines`, which have no header at all, as one hunk; `None` if nothing is changed.
pub(super) fn bare_hunk(lines: &[&str]) -> Option<Hunk> {
    let (lines, _) = uncounted_lines(lines, true);
    let is_change = |(line, _): &MarkedLine| !matches!(line, HunkLine::Keep(_));
    lines.iter().any(is_change).then(|| build_hunk(lines, Position::After(Vec::new())))
}

/// Line of a hunk, and whether the file ends there without a newline.
type MarkedLine = (HunkLine, bool);

/// Header of a hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HunkHeader {
    /// First old line, and the numbers of old and new lines.
    range: Option<(usize, Option<(usize, usize)>)>,
    /// Text after the numbers.
    section: String,
    /// The number in `@@ line 12`, which a model copies from a list of candidates.
    stated: Option<usize>,
}

impl HunkHeader {
    /// `@@ -1,2 +1,3 @@ section`, also incomplete: `@@ -1 @@`, `@@ ... @@`, `@@ section`, `@@`.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let text = line.trim_end().strip_prefix("@@")?;
        let (numbers, section) = text.split_once("@@").unwrap_or((text, ""));
        let section = section.trim().to_owned();
        let stated = numbers.trim().strip_prefix("line ").and_then(|number| number.trim().parse().ok());
        let mut words = numbers.split_whitespace();
        let old = words.next().and_then(|word| range(word.strip_prefix('-')?));
        let new = words.next().and_then(|word| range(word.strip_prefix('+')?));
        Some(match (old, new) {
            (Some((line, old)), Some((_, new))) => Self { range: Some((line, Some((old, new)))), section, stated },
            (Some((line, _)), None) => Self { range: Some((line, None)), section, stated },
            (None, _) => {
                let is_numbers = numbers.trim().chars().all(|c| c.is_ascii_digit() || " .,+-".contains(c));
                let section = if is_numbers { section } else { numbers.trim().to_owned() };
                Self { range: None, section, stated }
            }
        })
    }

    fn position(&self) -> Position {
        match (&self.range, self.stated) {
            (Some((line, _)), _) => Position::OldLine(*line),
            (None, Some(line)) => Position::Line(line),
            (None, None) if self.section.is_empty() => Position::After(Vec::new()),
            (None, None) => Position::After(vec![self.section.clone()]),
        }
    }
}

/// `12,3` or `12`, which is one line.
fn range(text: &str) -> Option<(usize, usize)> {
    match text.split_once(',') {
        Some((line, count)) => Some((line.parse().ok()?, count.parse().ok()?)),
        None => Some((text.parse().ok()?, 1)),
    }
}

/// A line of a hunk with its mark.
enum Marked {
    Line(HunkLine),
    /// The file ends after the line above, without a newline.
    EndOfFile,
    /// The line has no mark.
    None,
}

fn marked(line: &str) -> Marked {
    match line.split_at_checked(1) {
        Some((" ", text)) => Marked::Line(HunkLine::Keep(text.to_owned())),
        Some(("-", text)) => Marked::Line(HunkLine::Remove(text.to_owned())),
        Some(("+", text)) => Marked::Line(HunkLine::Add(text.to_owned())),
        Some(("\\", _)) => Marked::EndOfFile,
        Some(_) | None => Marked::None,
    }
}

/// True for the first line of something else than a hunk.
fn is_header(lines: &[&str]) -> bool {
    let is_other =
        |line: &&str| line.starts_with("@@") || line.starts_with("diff --git ") || line.starts_with("Index: ");
    lines.first().is_some_and(is_other) || is_file_header(lines)
}

/// The lines of a hunk whose counts are right: no change follows up to the next header.
fn counted_lines<'a, 't>(
    lines: &'a [&'t str],
    header: &HunkHeader,
    fenced: bool,
) -> Option<(Vec<MarkedLine>, &'a [&'t str])> {
    let (mut old, mut new) = header.range.as_ref()?.1?;
    let mut hunk: Vec<MarkedLine> = Vec::new();
    let mut rest = lines;
    while old > 0 || new > 0 {
        let (line, after) = rest.split_first()?;
        rest = after;
        let line = match marked(line) {
            Marked::Line(line) => line,
            Marked::EndOfFile => {
                hunk.last_mut()?.1 = true;
                continue;
            }
            // Some programs remove blanks at the end of a line.
            Marked::None if line.trim_end_matches('\r').is_empty() => HunkLine::Keep((*line).to_owned()),
            Marked::None => return None,
        };
        if !matches!(line, HunkLine::Add(_)) {
            old = old.checked_sub(1)?;
        }
        if !matches!(line, HunkLine::Remove(_)) {
            new = new.checked_sub(1)?;
        }
        hunk.push((line, false));
    }
    if let Some((line, after)) = rest.split_first()
        && matches!(marked(line), Marked::EndOfFile)
    {
        hunk.last_mut()?.1 = true;
        rest = after;
    }
    let mut tail = rest;
    let mut after_blank = false;
    while let Some((line, after)) = tail.split_first()
        && !is_header(tail)
    {
        // Outside of a block, a list of prose may follow.
        let is_list = !fenced && after_blank && line.get(1..).is_some_and(|text| text.starts_with(' '));
        if line.starts_with(['+', '-']) && !is_list {
            return None;
        }
        if line.starts_with(' ') && !after_blank && !line.trim().is_empty() {
            return None;
        }
        after_blank |= line.trim().is_empty();
        tail = after;
    }
    Some((hunk, rest))
}

/// The lines of a hunk up to the next header, or to the end; outside of a fenced block, up to prose.
fn uncounted_lines<'a, 't>(lines: &'a [&'t str], fenced: bool) -> (Vec<MarkedLine>, &'a [&'t str]) {
    let mut hunk: Vec<MarkedLine> = Vec::new();
    let mut rest = lines;
    while let Some((line, after)) = rest.split_first()
        && !is_header(rest)
    {
        let line = match marked(line) {
            Marked::Line(line) => line,
            Marked::EndOfFile => {
                if let Some(last) = hunk.last_mut() {
                    last.1 = true;
                }
                rest = after;
                continue;
            }
            Marked::None if !fenced && !line.trim().is_empty() => break,
            // A model forgot the blank.
            Marked::None => HunkLine::Keep((*line).to_owned()),
        };
        rest = after;
        hunk.push((line, false));
    }
    while hunk.last().is_some_and(|(line, _)| matches!(line, HunkLine::Keep(text) if text.trim().is_empty())) {
        hunk.pop();
    }
    (hunk, rest)
}

fn build_hunk(lines: Vec<MarkedLine>, position: Position) -> Hunk {
    let has_marker = lines.iter().any(|(_, marked)| *marked);
    let new_has_marker = lines.iter().any(|(line, marked)| *marked && !matches!(line, HunkLine::Remove(_)));
    let has_carriage_return = |(line, _): &MarkedLine| match line {
        HunkLine::Keep(text) | HunkLine::Remove(text) | HunkLine::Add(text) => text.ends_with('\r'),
    };
    let states_line_ends = lines.iter().any(has_carriage_return);
    let lines: Vec<HunkLine> = lines.into_iter().map(|(line, _)| line).collect();
    // Blank lines at the end may be those after the hunk.
    let is_blank = |line: &HunkLine| matches!(line, HunkLine::Keep(text) if text.trim().is_empty());
    let end = lines.iter().rposition(|line| !is_blank(line)).map_or(0, |last| last + 1);
    let other_readings = if (1..lines.len()).contains(&end) { vec![lines[..end].to_vec()] } else { Vec::new() };
    Hunk {
        position,
        final_newline: has_marker.then_some(!new_has_marker),
        states_line_ends,
        lines,
        other_readings,
        has_marks: true,
    }
}
