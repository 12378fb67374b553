//! The text of a map: which lines it has, and how they are divided into parts.
//!
//! The lines are ordered by importance: a file by its rank, a symbol by its own, a folder by its best file. A part takes
//! the next lines in this order as long as they fit, with the folders and the file around each, and shows them in the
//! order of the repository. So the first part is the best map for its size, and all parts together show everything.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeSet;

use cfq_proto::visible_text::visible;
use serde::{Deserialize, Serialize};

use super::folders::Folders;
use super::rank::{Ranks, rank};
use super::symbols::{FileSymbols, Symbol};
use super::test_paths::is_test_path;
use super::tokens::estimated_tokens;

/// Maximum number of folders at the top that are shown before everything else.
const MAX_OUTLINE: usize = 30;
/// Maximum number of definitions of a map; those of the files after it are not shown.
const MAX_SYMBOLS: usize = 2_000_000;
/// Maximum length of a name of a file or folder that is shown as a whole, in bytes.
const MAX_NAME_BYTES: usize = 80;

/// What to show of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRequest {
    /// Levels of folders below which no files are listed; `None` for all.
    pub depth: Option<usize>,
    /// Whether files of tests are shown.
    pub include_tests: bool,
    /// Maximum length of a part, in estimated tokens: at least 256, so that every line fits with those around it.
    pub max_tokens: usize,
    /// The part, from 1.
    pub part: usize,
    /// Files, folders and definitions that are ranked higher, with what they use. A path may be the end of a longer one.
    pub focus: Vec<String>,
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

/// Error: the request cannot be fulfilled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// A focus that is neither a path nor a name.
    #[error(
        "the focus {0:?} is no file, folder or definition of the map: check how it is written, or include the test files"
    )]
    UnknownFocus(String),
    /// A part that the map does not have.
    #[error("there is no part {part}; the map has {parts}")]
    NoSuchPart { part: usize, parts: usize },
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
    let focus = Focus::find(&files, &request.focus)?;
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

/// What is in focus.
struct Focus {
    /// By file: whether it has a named path, is in a named folder, or has a named definition.
    files: Vec<bool>,
    /// File and index of the named definitions.
    symbols: BTreeSet<(usize, usize)>,
}

impl Focus {
    fn find(files: &[(&str, &FileSymbols)], names: &[String]) -> Result<Self, MapError> {
        let mut focus = Self { files: vec![false; files.len()], symbols: BTreeSet::new() };
        for name in names {
            if !focus.add(files, name.trim_start_matches("./").trim_end_matches('/')) {
                return Err(MapError::UnknownFocus(name.clone()));
            }
        }
        Ok(focus)
    }

    /// Adds what a name means. Returns false if it means nothing.
    fn add(&mut self, files: &[(&str, &FileSymbols)], name: &str) -> bool {
        let mut is_known = false;
        for (index, (path, symbols)) in files.iter().enumerate() {
            let named = symbols.symbols.iter().enumerate().filter(|(_, symbol)| symbol.name.as_deref() == Some(name));
            let named: Vec<(usize, usize)> = named.map(|(symbol, _)| (index, symbol)).collect();
            if !named.is_empty() || contains(path, name) {
                is_known = true;
                self.files[index] = true;
                self.symbols.extend(named);
            }
        }
        is_known
    }
}

/// Whether the whole parts of `name` follow each other in a path: those of a file, or of a folder around it.
fn contains(path: &str, name: &str) -> bool {
    !name.is_empty()
        && path.match_indices(name).any(|(start, _)| {
            let end = start + name.len();
            let bytes = path.as_bytes();
            (start == 0 || bytes[start - 1] == b'/') && (end == bytes.len() || bytes[end] == b'/')
        })
}

/// A line of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Folder(usize),
    File(usize),
    Symbol(usize, usize),
}

/// The text with visible control characters, also line ends.
fn in_one_line(text: &str) -> Cow<'_, str> {
    // Nearly all texts are like this.
    match text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        true => Cow::Borrowed(text),
        false => visible(text, &[]),
    }
}

/// A name in one line, with the middle of a long one left out.
fn short(name: &str) -> String {
    let name = in_one_line(name);
    if name.len() <= MAX_NAME_BYTES {
        return name.into_owned();
    }
    let begin = name.floor_char_boundary(MAX_NAME_BYTES / 2);
    let end = name.ceil_char_boundary(name.len() - MAX_NAME_BYTES / 2);
    format!("{}...{}", &name[..begin], &name[end..])
}

/// The repository as the map shows it.
struct Layout<'f> {
    files: &'f [(&'f str, &'f FileSymbols)],
    folders: Folders,
    depth: usize,
}

impl Layout<'_> {
    /// All lines, the most important ones first.
    fn order(&self, ranks: &Ranks, focus: &Focus) -> Vec<Line> {
        let mut of_folders = vec![0.0_f64; self.folders.all.len()];
        for (file, rank) in ranks.files.iter().enumerate() {
            let mut folder = self.folders.of_file[file];
            while let Some(index) = folder {
                of_folders[index] = of_folders[index].max(*rank);
                folder = self.folders.all[index].parent;
            }
        }
        // A few folders at the top come first: they are the outline.
        let top_folders = self.folders.all.iter().filter(|folder| folder.parent.is_none()).count();
        let has_outline = top_folders <= MAX_OUTLINE;
        let mut order: Vec<(f64, Line)> = Vec::new();
        for (index, folder) in self.folders.all.iter().enumerate() {
            if folder.parts_above < self.depth {
                let rank = if folder.parent.is_none() && has_outline { f64::INFINITY } else { of_folders[index] };
                order.push((rank, Line::Folder(index)));
            }
        }
        for (index, (path, symbols)) in self.files.iter().enumerate() {
            if path.matches('/').count() >= self.depth {
                continue;
            }
            order.push((ranks.files[index], Line::File(index)));
            // What is in focus is shown with its definitions, whether others use them or not.
            let of_focus = if focus.files[index] { ranks.files[index] } else { 0.0 };
            for (symbol, _) in symbols.symbols.iter().enumerate().filter(|(_, symbol)| symbol.name.is_some()) {
                let rank = match focus.symbols.contains(&(index, symbol)) {
                    true => f64::MAX,
                    false => of_focus + ranks.symbols[index][symbol],
                };
                order.push((rank, Line::Symbol(index, symbol)));
            }
        }
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| self.compare_equal_rank(a.1, b.1)));
        order.into_iter().map(|(_, line)| line).collect()
    }

    /// Order of lines with the same rank: folders, files and symbols, those nearer to the top first.
    fn compare_equal_rank(&self, a: Line, b: Line) -> Ordering {
        let key = |line| match line {
            Line::Folder(folder) => (0, self.folders.all[folder].parts_above, folder, 0),
            Line::File(file) => (1, self.files[file].0.matches('/').count(), file, 0),
            Line::Symbol(file, symbol) => (2, self.files[file].0.matches('/').count(), file, symbol),
        };
        key(a).cmp(&key(b))
    }

    /// Nesting of a line in the text.
    fn level(&self, line: Line) -> usize {
        std::iter::successors(self.enclosing(line), |line| self.enclosing(*line)).count()
    }

    /// The line that encloses a line.
    fn enclosing(&self, line: Line) -> Option<Line> {
        match line {
            Line::Folder(folder) => self.folders.all[folder].parent.map(Line::Folder),
            Line::File(file) => self.folders.of_file[file].map(Line::Folder),
            Line::Symbol(file, symbol) => match self.files[file].1.symbols[symbol].parent {
                Some(parent) => Some(Line::Symbol(file, parent as usize)),
                None => Some(Line::File(file)),
            },
        }
    }

    fn text(&self, line: Line) -> String {
        let indentation = "  ".repeat(self.level(line));
        match line {
            Line::Folder(folder) => {
                format!("{indentation}{}\n", short(&self.folders.all[folder].label))
            }
            Line::File(file) => {
                let path = self.files[file].0;
                let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
                format!("{indentation}{}\n", short(name))
            }
            Line::Symbol(file, symbol) => {
                let symbol = &self.files[file].1.symbols[symbol];
                format!("{indentation}{}: {}\n", symbol.line, in_one_line(&symbol.text))
            }
        }
    }

    /// The line that counts files which are not shown in a folder, or at the top.
    fn more(&self, folder: Option<usize>, count: usize) -> String {
        let level = folder.map_or(0, |folder| self.level(Line::Folder(folder)) + 1);
        let noun = if count == 1 { "file" } else { "files" };
        format!("{}... {count} more {noun}\n", "  ".repeat(level))
    }
}

/// A part that is being made.
struct Part<'l> {
    layout: &'l Layout<'l>,
    remaining_tokens: usize,
    folders: BTreeSet<usize>,
    files: BTreeSet<usize>,
    symbols: BTreeSet<(usize, usize)>,
}

impl<'l> Part<'l> {
    fn new(layout: &'l Layout<'l>, max_tokens: usize) -> Self {
        let (folders, files, symbols) = Default::default();
        let at_the_top = estimated_tokens(&layout.more(None, layout.files.len()));
        Self { layout, remaining_tokens: max_tokens.saturating_sub(at_the_top), folders, files, symbols }
    }

    fn files(&self) -> impl Iterator<Item = usize> {
        self.files.iter().copied()
    }

    fn has(&self, line: Line) -> bool {
        match line {
            Line::Folder(folder) => self.folders.contains(&folder),
            Line::File(file) => self.files.contains(&file),
            Line::Symbol(file, symbol) => self.symbols.contains(&(file, symbol)),
        }
    }

    /// Takes lines from the beginning of `order` until one does not fit, and returns the rest. A line that does not
    /// fit into an empty part is skipped.
    fn fill<'o>(&mut self, order: &'o [Line]) -> &'o [Line] {
        for (index, line) in order.iter().enumerate() {
            let missing: Vec<Line> = std::iter::successors(Some(*line), |line| self.layout.enclosing(*line))
                .take_while(|line| !self.has(*line))
                .collect();
            let cost: usize = missing.iter().map(|line| self.cost(*line)).sum();
            if cost > self.remaining_tokens {
                if self.folders.is_empty() && self.files.is_empty() {
                    continue;
                }
                return &order[index..];
            }
            self.remaining_tokens -= cost;
            for line in missing {
                match line {
                    Line::Folder(folder) => self.folders.insert(folder),
                    Line::File(file) => self.files.insert(file),
                    Line::Symbol(file, symbol) => self.symbols.insert((file, symbol)),
                };
            }
        }
        &[]
    }

    /// Estimated tokens of a line. A folder may get a line for the files that are not shown.
    fn cost(&self, line: Line) -> usize {
        let more = match line {
            Line::Folder(folder) => estimated_tokens(&self.layout.more(Some(folder), self.layout.files.len())),
            Line::File(_) | Line::Symbol(..) => 0,
        };
        estimated_tokens(&self.layout.text(line)) + more
    }

    /// The text. `shown_files` are those that this part and earlier ones show.
    fn text(&self, shown_files: &[bool]) -> String {
        let layout = self.layout;
        // By the folder that the part shows, from the top: files of the repository that no part has shown so far.
        let mut unseen = vec![0_usize; layout.folders.all.len() + 1];
        for (file, _) in layout.files.iter().enumerate().filter(|(file, _)| !shown_files[*file]) {
            let mut folder = layout.folders.of_file[file];
            while let Some(index) = folder.filter(|index| !self.folders.contains(index)) {
                folder = layout.folders.all[index].parent;
            }
            unseen[folder.map_or(0, |folder| folder + 1)] += 1;
        }
        let mut text = String::new();
        self.write(None, &unseen, &mut text);
        text
    }

    /// Writes what is in a folder, without recursion: first its folders, then its files, then the number of others.
    fn write(&self, top: Option<usize>, unseen: &[usize], text: &mut String) {
        enum Todo {
            Folder(usize),
            Content(Option<usize>),
        }
        let layout = self.layout;
        let mut folders_in = vec![Vec::new(); layout.folders.all.len() + 1];
        for folder in self.folders.iter().rev() {
            folders_in[layout.folders.all[*folder].parent.map_or(0, |parent| parent + 1)].push(*folder);
        }
        let mut files_in = vec![Vec::new(); layout.folders.all.len() + 1];
        for file in &self.files {
            files_in[layout.folders.of_file[*file].map_or(0, |folder| folder + 1)].push(*file);
        }
        let mut open = vec![Todo::Content(top)];
        open.extend(folders_in[0].iter().map(|folder| Todo::Folder(*folder)));
        while let Some(todo) = open.pop() {
            match todo {
                Todo::Folder(folder) => {
                    text.push_str(&layout.text(Line::Folder(folder)));
                    open.push(Todo::Content(Some(folder)));
                    open.extend(folders_in[folder + 1].iter().map(|folder| Todo::Folder(*folder)));
                }
                Todo::Content(folder) => {
                    let slot = folder.map_or(0, |folder| folder + 1);
                    for file in &files_in[slot] {
                        text.push_str(&layout.text(Line::File(*file)));
                        let mut last = None;
                        for (_, symbol) in self.symbols.range((*file, 0)..=(*file, usize::MAX)) {
                            let Symbol { line, text: shown, .. } = &layout.files[*file].1.symbols[*symbol];
                            // A line that defines several names is shown once.
                            if last != Some((line, shown)) {
                                text.push_str(&layout.text(Line::Symbol(*file, *symbol)));
                            }
                            last = Some((line, shown));
                        }
                    }
                    if unseen[slot] > 0 {
                        text.push_str(&layout.more(folder, unseen[slot]));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
