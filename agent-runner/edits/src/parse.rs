//! Parses a creator's reply into edits.

use std::borrow::Cow;

use crate::edit::{Change, Edit};
use crate::label::{HunkLabel, block_label, hunk_label, is_auxiliary, language, path_in_comment};
use crate::languages::Languages;
use crate::path::repo_path;
use crate::problem::ReplyProblem;
use crate::sections::{FencedBlock, Section, sections};
use crate::syntax::search_replace::is_search_marker;
use crate::syntax::{MAX_HUNKS, apply_patch, search_replace, unified_diff};

/// Maximum length of a reply, in bytes: above any answer of a model.
const MAX_REPLY_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of edits in one reply. More edits than files are normal, because a file may have several.
const MAX_EDITS: usize = 512;
/// Maximum number of lines, such as comments, above the diff in a block.
const MAX_LINES_ABOVE_DIFF: usize = 3;
/// Maximum number of lines that are not blank up to the beginning of the patch in a block.
const MAX_LINES_ABOVE_PATCH: usize = 5;

/// The file that an unlabelled code block is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyTarget {
    /// Path in the repository; not validated.
    pub path: String,
}

/// Parses a creator's reply into edits, in the order of the reply. Every path in the result is a valid repository path. If
/// the reply is `truncated` at its maximum length, the last edit must be complete: half a file may parse, so its missing
/// end would not be detected.
///
/// # Errors
/// A [`ReplyProblem`] if the reply has no usable block, an invalid path, an incomplete hunk or a truncated file.
pub fn parse(
    reply: &str,
    target: &ReplyTarget,
    truncated: bool,
    languages: &impl Languages,
) -> Result<Vec<Edit>, ReplyProblem> {
    if reply.len() > MAX_REPLY_BYTES {
        return Err(ReplyProblem::ReplyTooLong { bytes: reply.len(), max: MAX_REPLY_BYTES });
    }
    let reply = without_reasoning(reply.trim_start_matches('\u{feff}'));
    let reply = with_plain_line_ends(reply);
    let (sections, last_line) = sections(&reply);
    let mut edits = EditList { edits: Vec::new(), hunks: 0, target: &target.path };
    let mut is_cut = truncated && last_line.is_some_and(is_beginning_of_an_edit);
    for (n, section) in sections.iter().enumerate() {
        let is_last = n + 1 == sections.len();
        let count = edits.edits.len();
        let is_complete = match section {
            Section::Block(block) => {
                edits.add_block(block, truncated)?;
                block.closed
            }
            Section::Hunk { lines, line_above } => {
                edits.add_hunks(line_above.unwrap_or_default(), lines)?;
                false
            }
            Section::Patch(lines) => {
                edits.extend(apply_patch::parse(lines)?)?;
                apply_patch::is_complete(lines)
            }
            Section::Diff(lines) => {
                let path = edits.current_path();
                edits.extend(unified_diff::parse_unfenced(&path, lines)?)?;
                false
            }
        };
        // The end of an edit outside of a block is not certain if the reply is cut.
        is_cut |= truncated && is_last && !is_complete && edits.edits.len() > count;
    }
    let edits = edits.edits;
    match edits.last() {
        Some(last) if is_cut => return Err(ReplyProblem::Truncated { path: last.path.clone() }),
        Some(_) => return Ok(edits),
        None if is_cut => return Err(ReplyProblem::TruncatedEdit),
        None => {}
    }
    let blocks = || {
        sections.iter().filter_map(|section| match section {
            Section::Block(block) => Some(block),
            Section::Hunk { .. } | Section::Patch(_) | Section::Diff(_) => None,
        })
    };
    let write = |content| Ok::<_, ReplyProblem>(vec![whole_file(repo_path(&target.path)?, content, None)]);
    if let Some(block) = unlabelled_block(blocks, target, languages) {
        if truncated && !block.closed {
            return Err(ReplyProblem::Truncated { path: repo_path(&target.path)? });
        }
        return write(block.lines.join("\n"));
    }
    if blocks().next().is_none() && is_code(&target.path, &reply, languages) {
        if truncated {
            return Err(ReplyProblem::Truncated { path: repo_path(&target.path)? });
        }
        return write(reply.trim().to_owned());
    }
    Err(ReplyProblem::NoBlock)
}

/// The edits of a reply so far.
struct EditList<'a> {
    edits: Vec<Edit>,
    hunks: usize,
    target: &'a str,
}

impl EditList<'_> {
    /// The file of hunks that name none: that of the last edit, else the target.
    fn current_path(&self) -> String {
        let last = self.edits.last().map(|edit| match &edit.change {
            Change::Modify { rename_to: Some(to), .. } => to,
            Change::Modify { rename_to: None, .. } | Change::Write { .. } | Change::Create { .. } => &edit.path,
            Change::Delete { .. } => &edit.path,
        });
        last.cloned().unwrap_or_else(|| self.target.to_owned())
    }

    fn extend(&mut self, edits: Vec<Edit>) -> Result<(), ReplyProblem> {
        for edit in edits {
            if let Change::Modify { hunks, .. } = &edit.change {
                self.hunks += hunks.len();
            }
            if self.edits.len() == MAX_EDITS || self.hunks > MAX_HUNKS {
                return Err(ReplyProblem::TooManyEdits { max: MAX_EDITS });
            }
            self.edits.push(edit);
        }
        Ok(())
    }

    /// Adds the edits of a block. A block that is no edit, such as an example or a command, adds none.
    fn add_block(&mut self, block: &FencedBlock<'_>, truncated: bool) -> Result<(), ReplyProblem> {
        let label = block_label(block);
        match kind_of(block) {
            BlockKind::Patch => self.extend(apply_patch::parse(&block.lines)?),
            BlockKind::Hunks => {
                let path = label.map_or_else(|| self.current_path(), |(path, _)| path);
                // The line above the block decides if it names a file in another form than a whole file's.
                let is_label_line = block.line_above.is_some_and(|line| hunk_label(line) != HunkLabel::None);
                let line_above = if is_label_line { block.line_above } else { None };
                self.add_hunks_of(&path, line_above.unwrap_or_default(), &block.lines)
            }
            BlockKind::Diff => {
                let first = block.lines.iter().position(|line| !line.trim().is_empty()).unwrap_or_default();
                let comment = block.lines.get(first).and_then(|line| path_in_comment(line));
                let lines = &block.lines[first + usize::from(comment.is_some() && block.lines.len() > first)..];
                let path = match (label, block.line_above.map(hunk_label)) {
                    (Some((path, _)), _) | (None, Some(HunkLabel::Path(path))) => path,
                    (None, Some(HunkLabel::None | HunkLabel::Unclear) | None) => self.current_path(),
                };
                self.extend(unified_diff::parse(&path, lines)?)
            }
            BlockKind::Other => {
                let Some((path, label)) = file_label(block) else { return Ok(()) };
                let path = repo_path(&path)?;
                if truncated && !block.closed {
                    return Err(ReplyProblem::Truncated { path });
                }
                let has_hunks = |edit: &Edit| match &edit.change {
                    Change::Modify { hunks, rename_to, .. } => {
                        !hunks.is_empty() && *rename_to.as_ref().unwrap_or(&edit.path) == path
                    }
                    Change::Write { .. } | Change::Create { .. } | Change::Delete { .. } => false,
                };
                if self.edits.iter().any(has_hunks) {
                    return Err(ReplyProblem::HunksAndWholeFile { path });
                }
                let lines = if label.is_some() { &block.lines[1..] } else { &block.lines[..] };
                self.extend(vec![whole_file(path, lines.join("\n"), label.map(str::to_owned))])
            }
        }
    }

    /// Adds search/replace blocks, of which the first stands below `line_above`.
    fn add_hunks(&mut self, line_above: &str, lines: &[&str]) -> Result<(), ReplyProblem> {
        let path = self.current_path();
        self.add_hunks_of(&path, line_above, lines)
    }

    fn add_hunks_of(&mut self, path: &str, line_above: &str, lines: &[&str]) -> Result<(), ReplyProblem> {
        let lines: Vec<&str> = std::iter::once(line_above).chain(lines.iter().copied()).collect();
        let edit = |(path, hunks): (String, _)| {
            let change = Change::Modify { hunks, rename_to: None, executable: None, in_order: false };
            Ok(Edit::new(repo_path(&path)?, change))
        };
        let edits = search_replace::parse(path, &lines)?.into_iter().map(edit).collect::<Result<_, ReplyProblem>>()?;
        self.extend(edits)
    }
}

/// A whole file. A blank line before the closing fence is not part of it: models add one, and git reports blank lines at
/// the end of a file as an error.
fn whole_file(path: String, content: String, label: Option<String>) -> Edit {
    let content = if content.is_empty() || content.ends_with('\n') { content } else { format!("{content}\n") };
    Edit::new(path, Change::Write { content, label })
}

/// What a block contains.
enum BlockKind {
    Patch,
    Diff,
    /// Search/replace blocks.
    Hunks,
    /// A file, or something that is no edit.
    Other,
}

fn kind_of(block: &FencedBlock<'_>) -> BlockKind {
    let blank = block.lines.iter().take_while(|line| line.trim().is_empty()).count();
    let lines = &block.lines[blank..];
    let is_named_diff = matches!(language(block.info).as_str(), "diff" | "patch" | "udiff");
    match () {
        () if patch_file_label(block).is_some() => BlockKind::Other,
        () if starts_with_patch(lines) => BlockKind::Patch,
        () if (0..lines.len().min(MAX_LINES_ABOVE_DIFF)).any(|n| unified_diff::starts_with_diff(&lines[n..])) => {
            BlockKind::Diff
        }
        () if lines.iter().any(|line| is_search_marker(line)) => BlockKind::Hunks,
        () if is_named_diff || unified_diff::starts_with_hunk(lines) => BlockKind::Diff,
        () => BlockKind::Other,
    }
}

/// The label of a block, if it names a file that is a patch itself. Such a file is sent whole.
fn patch_file_label(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    block_label(block).filter(|(path, _)| path.ends_with(".patch") || path.ends_with(".diff"))
}

/// True if a patch begins in the first lines that are not blank. Models put a shell command above it.
fn starts_with_patch(lines: &[&str]) -> bool {
    let first: Vec<&str> =
        lines.iter().filter(|line| !line.trim().is_empty()).take(MAX_LINES_ABOVE_PATCH).copied().collect();
    apply_patch::is_patch(&first)
}

/// Path of a whole file, and its first line if that is the label.
fn file_label<'t>(block: &FencedBlock<'t>) -> Option<(String, Option<&'t str>)> {
    let label = patch_file_label(block).or_else(|| {
        if !is_auxiliary(block.info) {
            return block_label(block);
        }
        // A block of commands below a line with the name `a.py` is not the content of `a.py`, so the line above is
        // ignored. The block's own first line or info string may still name a file.
        block_label(&FencedBlock { line_above: None, ..block.clone() })
    });
    label.map(|(path, is_first)| (path, if is_first { block.lines.first().copied() } else { None }))
}

/// The block to assign to the target file: the first in the target's language, else the first that is not auxiliary.
fn unlabelled_block<'b, 't: 'b, I: Iterator<Item = &'b FencedBlock<'t>>>(
    blocks: impl Fn() -> I,
    target: &ReplyTarget,
    languages: &impl Languages,
) -> Option<&'b FencedBlock<'t>> {
    let wanted = target.path.rsplit_once('.').map_or("", |(_, e)| e);
    let is_wanted = |b: &&FencedBlock<'_>| {
        !b.lines.is_empty() && languages.extension(&language(b.info)).is_some_and(|e| e == wanted)
    };
    blocks().find(is_wanted).or_else(|| blocks().find(|b| !b.lines.is_empty() && !is_auxiliary(b.info)))
}

/// True if the last line of a reply that was cut begins an edit.
fn is_beginning_of_an_edit(line: &str) -> bool {
    ["<<<<", "*** ", "--- ", "diff --git"].iter().any(|key| line.starts_with(key))
}

/// Removes the reasoning with which models begin a reply, in `<think>` sections; blocks in them are not files. The same
/// tags in the files of the reply stay.
fn without_reasoning(reply: &str) -> &str {
    let mut rest = reply;
    while let Some(reasoning) = rest.trim_start().strip_prefix("<think>") {
        rest = reasoning.split_once("</think>").map_or("", |(_, after)| after);
    }
    if rest.len() < reply.len() {
        return rest;
    }
    // Some chat templates put `<think>` into the prompt, so that the reply has only the closing tag, at the end of a line.
    let ends_line = |after: &str| after.split('\n').next().is_some_and(|line| line.trim().is_empty());
    match reply.split_once("</think>") {
        Some((before, after)) if !before.contains("<think>") && ends_line(after) => after,
        Some(_) | None => reply,
    }
}

/// Removes carriage returns if the reply itself has them: at the end of its first fence or marker. Otherwise they are part
/// of the edits.
fn with_plain_line_ends(reply: &str) -> Cow<'_, str> {
    let is_structure = |line: &&str| ["```", "~~~", "--- ", "*** ", "<<<<<"].iter().any(|key| line.starts_with(key));
    let first = reply.split('\n').find(is_structure).or_else(|| reply.split('\n').next());
    match first.is_some_and(|line| line.ends_with('\r')) {
        true => Cow::Owned(reply.replace("\r\n", "\n")),
        false => Cow::Borrowed(reply),
    }
}

/// True if text without a fence is code: it has more than one line and parses without a syntax error.
fn is_code(path: &str, text: &str, languages: &impl Languages) -> bool {
    let text = text.trim();
    text.lines().count() > 1 && languages.is_valid(path, text)
}

#[cfg(test)]
mod tests;
