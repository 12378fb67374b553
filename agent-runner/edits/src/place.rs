//! Finds the place of a hunk in its file.

use std::ops::Range;

use crate::comparison::{ComparisonBudget, Reindent, Tolerance, compare};
use crate::edit::{Hunk, Position};
use crate::problem::{Candidate, Problem};
use crate::text::Line;

/// Maximum length of a line in a message, in characters.
const MAX_SHOWN_CHARS: usize = 120;

/// Place of a hunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// The old lines begin at this index.
    Found { start: usize, reindent: Reindent },
    /// The new lines are in the file already.
    AlreadyApplied { start: usize },
}

/// Finds hunks in the lines of one file.
#[derive(Debug)]
pub(crate) struct Finder<'a> {
    pub path: &'a str,
    pub lines: &'a [Line],
    pub budget: &'a mut ComparisonBudget,
    /// How many lines the earlier hunks of the same edit added or removed.
    pub offset: isize,
    /// Index of the first line after the previous hunk, if hunks are in the order of the file.
    pub previous_end: Option<usize>,
}

/// Start of a match, and the difference in indentation.
type Match = (usize, Reindent);

impl Finder<'_> {
    /// Finds the place of a hunk that has old lines, in the first step of tolerance that finds any.
    ///
    /// # Errors
    /// A [`Problem`] if there is no place, or more than one.
    pub(crate) fn find(&mut self, hunk: &Hunk) -> Result<Place, Problem> {
        let (old, new) = (hunk.old_lines(), hunk.new_lines());
        let expected = self.expected(&hunk.position);
        if let Some(start) = expected {
            for tolerance in [Tolerance::Exact, Tolerance::TrailingBlanks] {
                if let Some(reindent) = self.at(tolerance, start, &old)? {
                    let at_end = start + old.len() == self.lines.len();
                    let is_certain = hunk.has_trailing_context() || at_end;
                    if !is_certain && self.is_applied_at(start, hunk, &new)? {
                        return Ok(Place::AlreadyApplied { start });
                    }
                    return Ok(Place::Found { start, reindent });
                }
            }
        }
        let within = self.range(&hunk.position)?;
        for tolerance in Tolerance::ALL {
            let mut found = self.all(tolerance, &old, &within, hunk)?;
            if found.len() > 1 {
                self.narrow(&mut found, &hunk.position, old.len());
            }
            match found.as_slice() {
                [] => {}
                [(start, reindent)] => {
                    if self.is_applied_at(*start, hunk, &new)? {
                        return Ok(Place::AlreadyApplied { start: *start });
                    }
                    return Ok(Place::Found { start: *start, reindent: reindent.clone() });
                }
                many => return Err(self.ambiguous(many, &old, &hunk.position)),
            }
        }
        self.already_applied(hunk, &new, &within)?.map_or_else(|| Err(self.not_found(&old)?), Ok)
    }

    /// Index at which a position states that the first old line is.
    fn expected(&self, position: &Position) -> Option<usize> {
        match position {
            Position::Line(line) => line.checked_sub(1),
            Position::OldLine(line) => line.checked_sub(1)?.checked_add_signed(self.offset),
            Position::Unstated | Position::After(_) | Position::EndAfter(_) => None,
        }
    }

    /// The indices among which the hunk is searched.
    fn range(&mut self, position: &Position) -> Result<Range<usize>, Problem> {
        let all = 0..self.lines.len();
        let (Position::After(anchors) | Position::EndAfter(anchors)) = position else { return Ok(all) };
        match self.anchors_end(anchors)?.as_slice() {
            [one] => Ok(*one..all.end),
            // Without a unique anchor, the old lines alone must be.
            [] | [_, _, ..] => Ok(all),
        }
    }

    /// Indices after which all anchors have been seen, in order: one for each place of the first anchor.
    pub(crate) fn anchors_end(&mut self, anchors: &[String]) -> Result<Vec<usize>, Problem> {
        let Some((first, rest)) = anchors.split_first() else { return Ok(Vec::new()) };
        let mut starts = self.lines_equal_to(first, 0)?;
        if let (true, Some(after)) = (starts.len() > 1, self.previous_end) {
            starts.retain(|start| *start >= after);
        }
        let mut ends = Vec::new();
        'starts: for start in starts {
            let mut end = start + 1;
            for anchor in rest {
                match self.lines_equal_to(anchor, end)?.first() {
                    Some(line) => end = line + 1,
                    None => continue 'starts,
                }
            }
            ends.push(end);
        }
        Ok(ends)
    }

    /// Indices from `from` whose line is `text`, without blanks at both ends.
    fn lines_equal_to(&mut self, text: &str, from: usize) -> Result<Vec<usize>, Problem> {
        self.budget.take(self.path, self.lines.len().saturating_sub(from))?;
        let equal = |(_, line): &(usize, &Line)| line.text.trim() == text.trim();
        Ok(self.lines.iter().enumerate().skip(from).filter(equal).map(|(n, _)| n).collect())
    }

    /// Compares the old lines with those at `start`.
    fn at(&mut self, tolerance: Tolerance, start: usize, old: &[&str]) -> Result<Option<Reindent>, Problem> {
        match start.checked_add(old.len()).and_then(|end| self.lines.get(start..end)) {
            Some(lines) => compare(tolerance, lines, old, (self.path, self.budget)),
            None => Ok(None),
        }
    }

    /// All places of the old lines at which the added lines can be indented too.
    fn all(
        &mut self,
        tolerance: Tolerance,
        old: &[&str],
        within: &Range<usize>,
        hunk: &Hunk,
    ) -> Result<Vec<Match>, Problem> {
        let mut found = Vec::new();
        for start in within.clone() {
            if let Some(reindent) = self.at(tolerance, start, old)?
                && hunk.added_lines().all(|line| reindent.line(line).is_some())
            {
                found.push((start, reindent));
            }
        }
        Ok(found)
    }

    /// Removes the places that the position of the hunk rules out, if others are left.
    fn narrow(&self, found: &mut Vec<Match>, position: &Position, length: usize) {
        let mut keep = |keep: &dyn Fn(usize) -> bool| {
            if found.iter().any(|(start, _)| keep(*start)) {
                found.retain(|(start, _)| keep(*start));
            }
        };
        if let Position::EndAfter(_) = position {
            keep(&|start| start + length == self.lines.len());
        }
        if let Some(expected) = self.expected(position) {
            keep(&|start| start == expected);
        }
        if let Some(after) = self.previous_end {
            keep(&|start| start >= after);
        }
        if let Position::After(anchors) | Position::EndAfter(anchors) = position
            && !anchors.is_empty()
            && let [anchor] = self.anchor_before(anchors, found).as_slice()
        {
            let anchor = *anchor;
            found.retain(|(start, _)| *start == anchor);
        }
    }

    /// The first place after each occurrence of the last anchor, without duplicates.
    fn anchor_before(&self, anchors: &[String], found: &[Match]) -> Vec<usize> {
        let Some(last) = anchors.last() else { return Vec::new() };
        let is_anchor = |line: &Line| line.text.trim() == last.trim();
        let mut starts: Vec<usize> = Vec::new();
        for (n, _) in self.lines.iter().enumerate().filter(|(_, line)| is_anchor(line)) {
            if let Some((start, _)) = found.iter().find(|(start, _)| *start > n)
                && starts.last() != Some(start)
            {
                starts.push(*start);
            }
        }
        starts
    }

    /// True if the file has the added lines already at the place where the hunk would add them. A hunk that also removes
    /// lines cannot have been applied, because its old lines are there.
    fn is_applied_at(&mut self, start: usize, hunk: &Hunk, new: &[&str]) -> Result<bool, Problem> {
        if hunk.removes_lines() || !has_added_text(hunk) {
            return Ok(false);
        }
        match start.checked_sub(hunk.leading_added_lines()) {
            Some(start) => Ok(self.at(Tolerance::Exact, start, new)?.is_some()),
            None => Ok(false),
        }
    }

    /// The only place of the new lines, if the hunk adds any text.
    fn already_applied(&mut self, hunk: &Hunk, new: &[&str], within: &Range<usize>) -> Result<Option<Place>, Problem> {
        if !has_added_text(hunk) {
            return Ok(None);
        }
        for tolerance in [Tolerance::Exact, Tolerance::TrailingBlanks] {
            let mut found = Vec::new();
            for start in within.clone() {
                if let Some(reindent) = self.at(tolerance, start, new)? {
                    found.push((start, reindent));
                }
            }
            if found.len() > 1 {
                self.narrow(&mut found, &hunk.position, new.len());
            }
            if let [(start, _)] = found.as_slice() {
                return Ok(Some(Place::AlreadyApplied { start: *start }));
            }
        }
        Ok(None)
    }

    pub(crate) fn ambiguous(&self, found: &[Match], old: &[&str], position: &Position) -> Problem {
        let candidate = |(start, _): &Match| Candidate {
            // A diff counts the lines of the file before it.
            line: match position {
                Position::OldLine(_) => (*start + 1).saturating_add_signed(-self.offset),
                Position::Unstated | Position::Line(_) | Position::After(_) | Position::EndAfter(_) => start + 1,
            },
            below: self.lines[..*start].iter().rev().find(|l| !l.text.trim().is_empty()).map(|l| shown(&l.text)),
        };
        let candidates: Vec<_> = found.iter().map(candidate).collect();
        let line = candidates.first().map_or(1, |c| c.line);
        let how = match position {
            Position::Unstated | Position::Line(_) => format!("`<<<<<<< SEARCH line {line}`"),
            Position::OldLine(_) => format!("`@@ -{line} @@`"),
            Position::After(_) | Position::EndAfter(_) => format!("`@@ line {line}`"),
        };
        let path = self.path.to_owned();
        Problem::Ambiguous { path, line: first_line(old), count: found.len(), candidates, how }
    }

    /// The problem of old lines that are nowhere, with the place at which the most lines are equal.
    fn not_found(&mut self, old: &[&str]) -> Result<Problem, Problem> {
        let mut best: Option<(usize, usize)> = None;
        for start in 0..self.lines.len() {
            let lines = &self.lines[start..self.lines.len().min(start + old.len())];
            self.budget.take(self.path, lines.len())?;
            let is_equal = |(line, text): &(&Line, &&str)| {
                let text = text.trim();
                !text.is_empty() && line.text.trim() == text
            };
            let equal = lines.iter().zip(old).filter(is_equal).count();
            if equal > best.map_or(0, |(_, most)| most) {
                best = Some((start, equal));
            }
        }
        let closest = best.map(|(start, _)| (start + 1, shown(&self.lines[start].text)));
        Ok(Problem::NotFound { path: self.path.to_owned(), line: first_line(old), closest })
    }
}

/// True if the hunk adds a line with a letter or digit. Others are too common to be recognized.
fn has_added_text(hunk: &Hunk) -> bool {
    hunk.added_lines().any(|line| line.contains(char::is_alphanumeric))
}

/// The first line that is not blank.
fn first_line(lines: &[&str]) -> String {
    lines.iter().find(|line| !line.trim().is_empty()).map(|line| shown(line)).unwrap_or_default()
}

fn shown(line: &str) -> String {
    line.trim().chars().take(MAX_SHOWN_CHARS).collect()
}
