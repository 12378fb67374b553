//! Finds the place of a hunk in its file.
//!
//! A stated line comes first: if the old lines are there, it is the place. Otherwise the old lines are searched in the
//! whole file, or after the lines that the edit names. The first step of tolerance that finds a place decides. Of several
//! places, one may be left after what the edit states (end of the file, line, order of the hunks, lines above).

use std::ops::Range;

use crate::comparison::{ComparisonBudget, Pattern, Reindent, Tolerance, compare};
use crate::edit::{Hunk, Position};
use crate::problem::{Candidate, MAX_SHOWN_CANDIDATES, ReplyProblem, excerpt};
use crate::text::Line;

/// Maximum number of old lines that are compared to find the most similar place.
const MAX_SIMILAR_LINES: usize = 100;

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
    /// How far the hunk before was from the line that it stated.
    pub drift: isize,
    /// Index of the first line after the previous hunk, if hunks are in the order of the file.
    pub previous_end: Option<usize>,
    /// True if the file has been edited before, in this reply or in an earlier one, so that the hunk may be applied
    /// already.
    pub is_edited: bool,
}

/// Start of a match, and the difference in indentation.
type Match = (usize, Reindent);

impl Finder<'_> {
    /// Finds the place of a hunk that has old lines.
    ///
    /// # Errors
    /// A [`ReplyProblem`] if there is no place, or more than one.
    pub(crate) fn find(&mut self, hunk: &Hunk) -> Result<Place, ReplyProblem> {
        let (old, new) = (Pattern::old(hunk), Pattern::new(hunk));
        if let Some(place) = self.stated_place(hunk, &old, &new)? {
            return Ok(place);
        }
        let anchored = self.anchored(&hunk.position)?;
        let within = match anchored.as_slice() {
            // The line that is named may be repeated as the first one of the hunk.
            [one] => one.saturating_sub(1)..self.lines.len(),
            [] | [_, _, ..] => 0..self.lines.len(),
        };
        for tolerance in Tolerance::ALL {
            // A block that is only indented contains the lines from before it was.
            if tolerance == Tolerance::Indentation
                && self.is_edited
                && let Some(place) = self.already_applied(hunk, &new, &within)?
            {
                return Ok(place);
            }
            let mut found = self.all(tolerance, &old, &within, hunk)?;
            self.narrow(&mut found, &hunk.position, &anchored, old.len());
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
        match self.already_applied(hunk, &new, &within)? {
            Some(place) => Ok(place),
            None => Err(self.not_found(&old)),
        }
    }

    /// The place at the stated line, if the old lines are there.
    fn stated_place(
        &mut self,
        hunk: &Hunk,
        old: &Pattern<'_>,
        new: &Pattern<'_>,
    ) -> Result<Option<Place>, ReplyProblem> {
        let expected = self.expected(&hunk.position);
        for tolerance in Tolerance::SAME_INDENTATION {
            let mut found = Vec::new();
            for start in &expected {
                if self.previous_end.is_none_or(|end| *start >= end)
                    && let Some(reindent) = self.at(tolerance, *start, old)?
                {
                    found.push((*start, reindent));
                }
            }
            match found.as_slice() {
                [] => {}
                [(start, reindent)] => {
                    let at_end = start + old.len() == self.lines.len();
                    let is_certain = hunk.has_trailing_context() || at_end;
                    if !is_certain && self.is_applied_at(*start, hunk, new)? {
                        return Ok(Some(Place::AlreadyApplied { start: *start }));
                    }
                    return Ok(Some(Place::Found { start: *start, reindent: reindent.clone() }));
                }
                [_, _, ..] => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Indices at which the first old line may be by the stated line: as stated, and as far from it as the hunk before.
    fn expected(&self, position: &Position) -> Vec<usize> {
        let stated = match position {
            Position::Line(line) => line.checked_sub(1),
            Position::OldLine(line) => line.checked_sub(1).and_then(|line| line.checked_add_signed(self.offset)),
            Position::Unstated | Position::After(_) | Position::AtEndAfter(_) => None,
        };
        let drifted = match position {
            Position::OldLine(_) if self.drift != 0 => stated.and_then(|line| line.checked_add_signed(self.drift)),
            _ => None,
        };
        stated.into_iter().chain(drifted).collect()
    }

    /// Indices after the lines that the position names; none if it names none, or they are nowhere.
    fn anchored(&mut self, position: &Position) -> Result<Vec<usize>, ReplyProblem> {
        match position {
            Position::After(anchors) | Position::AtEndAfter(anchors) => self.anchors_end(anchors),
            Position::Unstated | Position::Line(_) | Position::OldLine(_) => Ok(Vec::new()),
        }
    }

    /// Indices after which all anchors have been seen, in order: one for each place of the first anchor.
    pub(crate) fn anchors_end(&mut self, anchors: &[String]) -> Result<Vec<usize>, ReplyProblem> {
        let Some((first, rest)) = anchors.split_first() else { return Ok(Vec::new()) };
        let mut starts = self.lines_equal_to(first, 0)?;
        if let (true, Some(after)) = (starts.len() > 1, self.previous_end)
            && starts.iter().any(|start| *start >= after)
        {
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
    fn lines_equal_to(&mut self, text: &str, from: usize) -> Result<Vec<usize>, ReplyProblem> {
        self.budget.take(self.path, self.lines.len().saturating_sub(from))?;
        let text = text.trim();
        let equal = |(_, line): &(usize, &Line)| line.text.trim() == text;
        Ok(self.lines.iter().enumerate().skip(from).filter(equal).map(|(n, _)| n).collect())
    }

    /// Compares a pattern with the lines at `start`.
    fn at(
        &mut self,
        tolerance: Tolerance,
        start: usize,
        pattern: &Pattern<'_>,
    ) -> Result<Option<Reindent>, ReplyProblem> {
        match start.checked_add(pattern.len()).and_then(|end| self.lines.get(start..end)) {
            Some(lines) => compare(tolerance, lines, pattern, (self.path, self.budget)),
            None => Ok(None),
        }
    }

    /// All places of the old lines at which the added lines can be indented too, in order.
    fn all(
        &mut self,
        tolerance: Tolerance,
        old: &Pattern<'_>,
        within: &Range<usize>,
        hunk: &Hunk,
    ) -> Result<Vec<Match>, ReplyProblem> {
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
    fn narrow(&self, found: &mut Vec<Match>, position: &Position, anchored: &[usize], length: usize) {
        if found.len() < 2 {
            return;
        }
        let mut keep = |keep: &dyn Fn(usize) -> bool| {
            if found.iter().any(|(start, _)| keep(*start)) {
                found.retain(|(start, _)| keep(*start));
            }
        };
        if let Position::AtEndAfter(_) = position {
            keep(&|start| start + length == self.lines.len());
        }
        if let Some(after) = self.previous_end {
            keep(&|start| start >= after);
        }
        if let [expected] = self.expected(position).as_slice() {
            keep(&|start| start == *expected);
        }
        // The first place after each occurrence of the lines above.
        let mut next: Vec<usize> = Vec::new();
        for end in anchored {
            let at = found.partition_point(|(start, _)| *start + 1 < *end);
            if let Some((start, _)) = found.get(at)
                && next.last() != Some(start)
            {
                next.push(*start);
            }
        }
        if let [one] = next.as_slice() {
            found.retain(|(start, _)| start == one);
        }
    }

    /// True if the file has the added lines already at the place where the hunk would add them. A hunk that also removes
    /// lines cannot have been applied, because its old lines are there.
    fn is_applied_at(&mut self, start: usize, hunk: &Hunk, new: &Pattern<'_>) -> Result<bool, ReplyProblem> {
        if hunk.removes_lines() || !has_added_text(hunk) {
            return Ok(false);
        }
        match start.checked_sub(hunk.leading_added_lines()) {
            Some(start) => Ok(self.at(Tolerance::Exact, start, new)?.is_some()),
            None => Ok(false),
        }
    }

    /// The only place of the new lines, if they are specific enough to mean that the hunk is applied.
    fn already_applied(
        &mut self,
        hunk: &Hunk,
        new: &Pattern<'_>,
        within: &Range<usize>,
    ) -> Result<Option<Place>, ReplyProblem> {
        let new_text = new.texts().filter(|line| !line.trim().is_empty()).count();
        // One line alone may be in the file by coincidence.
        let is_specific = self.is_edited || hunk.has_context() || new_text > 1;
        if !(is_specific && has_added_text(hunk) || hunk.has_context_on_both_sides()) {
            return Ok(None);
        }
        for tolerance in Tolerance::SAME_INDENTATION {
            let mut found = Vec::new();
            for start in within.clone() {
                if let Some(reindent) = self.at(tolerance, start, new)? {
                    found.push((start, reindent));
                }
            }
            self.narrow(&mut found, &hunk.position, &[], new.len());
            if let [(start, _)] = found.as_slice() {
                return Ok(Some(Place::AlreadyApplied { start: *start }));
            }
        }
        Ok(None)
    }

    /// Whether lines to insert at `start` are there already, before or after it.
    pub(crate) fn is_inserted(&mut self, start: usize, hunk: &Hunk) -> Result<bool, ReplyProblem> {
        if !has_added_text(hunk) {
            return Ok(false);
        }
        let new = Pattern::new(hunk);
        let after = self.at(Tolerance::Exact, start, &new)?;
        let before = match start.checked_sub(new.len()) {
            Some(before) if start == self.lines.len() => self.at(Tolerance::Exact, before, &new)?,
            Some(_) | None => None,
        };
        Ok(after.or(before).is_some())
    }

    pub(crate) fn ambiguous(&self, found: &[Match], old: &Pattern<'_>, position: &Position) -> ReplyProblem {
        let candidate = |(start, _): &Match| Candidate {
            // A diff counts the lines of the file before it.
            line: match position {
                Position::OldLine(_) => (*start + 1).saturating_add_signed(-self.offset),
                Position::Unstated | Position::Line(_) | Position::After(_) | Position::AtEndAfter(_) => start + 1,
            },
            below: self.lines[..*start].iter().rev().find(|l| !l.text.trim().is_empty()).map(|l| excerpt(&l.text)),
        };
        let candidates: Vec<_> = found.iter().take(MAX_SHOWN_CANDIDATES).map(candidate).collect();
        let line = candidates.first().map_or(1, |c| c.line);
        let how = match position {
            Position::Unstated | Position::Line(_) => format!("`<<<<<<< SEARCH line {line}`"),
            Position::OldLine(_) => format!("`@@ -{line} @@`"),
            Position::After(_) | Position::AtEndAfter(_) => format!("`@@ line {line}`"),
        };
        let path = self.path.to_owned();
        ReplyProblem::Ambiguous { path, line: first_line(old), count: found.len(), candidates, how }
    }

    /// The problem of old lines that are nowhere, with the place at which the most lines are equal.
    fn not_found(&mut self, old: &Pattern<'_>) -> ReplyProblem {
        let mut best: Option<(usize, usize)> = None;
        let wanted: Vec<&str> = old.texts().take(MAX_SIMILAR_LINES).map(str::trim).collect();
        for start in 0..self.lines.len() {
            let lines = &self.lines[start..self.lines.len().min(start + wanted.len())];
            if self.budget.take(self.path, lines.len()).is_err() {
                break;
            }
            let is_equal = |(line, text): &(&Line, &&str)| !text.is_empty() && line.text.trim() == **text;
            let equal = lines.iter().zip(&wanted).filter(is_equal).count();
            if equal > best.map_or(0, |(_, most)| most) {
                best = Some((start, equal));
            }
        }
        let closest = best.map(|(start, _)| (start + 1, excerpt(&self.lines[start].text)));
        ReplyProblem::NotFound { path: self.path.to_owned(), line: first_line(old), closest }
    }
}

/// True if the hunk adds a line with a letter or digit. Others are too common to be recognized.
fn has_added_text(hunk: &Hunk) -> bool {
    hunk.added_lines().any(|line| line.contains(char::is_alphanumeric))
}

/// The first line that is not blank.
fn first_line(lines: &Pattern<'_>) -> String {
    lines.texts().find(|line| !line.trim().is_empty()).map(excerpt).unwrap_or_default()
}
