//! The text of a map: which lines it has, and how they are divided into parts.
//!
//! The lines are ordered by importance: a file by its rank, a symbol by its own, a folder by its best file. A part
//! takes the next lines in this order as long as they fit, with the lines that enclose each, and shows them in the order
//! of the repository. So the first part is the best map for its size, and all parts together show everything.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::focus::Focus;
use super::folders::Folders;
use super::layout::Layout;
use super::map_error::MapError;
use super::part::Part;
use super::rank::rank;
use super::symbols::FileSymbols;
use super::test_paths::is_test_path;
use super::tokens::estimated_tokens;

/// Maximum number of definitions of a map; those of the files after it are not shown.
const MAX_SYMBOLS: usize = 2_000_000;

/// What to show of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRequest {
    /// Levels of folders below which no files are listed; `None` for all.
    pub depth: Option<usize>,
    /// Whether test files are shown.
    pub include_tests: bool,
    /// Maximum length of a part, in estimated tokens: at least 256, so that a line fits with those around it, unless it is
    /// nested very deeply.
    pub max_tokens: usize,
    /// The part, from 1.
    pub part: usize,
    /// Files, folders and definitions that are ranked higher, with what they use. A path may be the end of a longer
    /// one.
    pub focus: Vec<String>,
    /// Names that a text mentions, such as the description of a task. Those that the repository has are in focus; the
    /// others are ignored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mentioned_names: Vec<String>,
}

/// One part of a map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepoMap {
    /// The text.
    pub text: String,
    /// Estimated length of the text, in tokens.
    pub tokens: usize,
    /// The number of this part, from 1.
    pub part: usize,
    /// Number of parts.
    pub parts: usize,
    /// Files of the repository that the map is about.
    pub files: usize,
    /// Definitions in these files.
    pub symbols: usize,
    /// Files of tests that are left out.
    pub tests_left_out: usize,
}

/// Makes a map of files, which are sorted by path.
///
/// # Errors
/// [`MapError`].
pub fn repo_map(files: &[(&str, &FileSymbols)], request: &MapRequest) -> Result<RepoMap, MapError> {
    let all = files.len();
    let kept: Vec<(&str, Cow<'_, FileSymbols>)> = files
        .iter()
        .filter(|(path, _)| request.include_tests || !is_test_path(path))
        .map(|(path, symbols)| match request.include_tests {
            true => (*path, Cow::Borrowed(*symbols)),
            false => (*path, symbols.without_tests()),
        })
        .scan(0, |symbols, (path, file)| {
            *symbols += file.symbols.len();
            Some((path, if *symbols > MAX_SYMBOLS { Cow::Owned(FileSymbols::NONE) } else { file }))
        })
        .collect();
    let files: Vec<(&str, &FileSymbols)> = kept.iter().map(|(path, symbols)| (*path, symbols.as_ref())).collect();
    let mut focus = Focus::find(&files, &request.focus)?;
    focus.add_mentioned(&files, &request.mentioned_names);
    let ranks = rank(&files, &focus.files);
    let paths: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    let layout = Layout { files: &files, folders: Folders::of(&paths), depth: request.depth.unwrap_or(usize::MAX) };
    let order = layout.order(&ranks, &focus);
    let mut shown_files = vec![false; files.len()];
    let mut remaining_lines = order.as_slice();
    let mut parts = 0;
    let mut requested_text = None;
    loop {
        let mut part = Part::new(&layout, request.max_tokens);
        remaining_lines = part.fill(remaining_lines);
        parts += 1;
        for file in part.files() {
            shown_files[file] = true;
        }
        if parts == request.part {
            requested_text = Some(part.text(&shown_files));
        }
        if remaining_lines.is_empty() {
            break;
        }
    }
    let Some(text) = requested_text else { return Err(MapError::NoSuchPart { part: request.part, parts }) };
    Ok(RepoMap {
        tokens: estimated_tokens(&text),
        text,
        part: request.part,
        parts,
        files: files.len(),
        symbols: files.iter().flat_map(|(_, file)| &file.symbols).filter(|symbol| symbol.name.is_some()).count(),
        tests_left_out: all - files.len(),
    })
}

#[cfg(test)]
mod tests;
