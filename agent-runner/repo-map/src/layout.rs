//! The lines of a map: their order, their nesting and their texts.

use std::borrow::Cow;
use std::cmp::Ordering;

use cfq_proto::visible_text::visible;

use super::focus::Focus;
use super::folders::Folders;
use super::rank::Ranks;
use super::symbols::FileSymbols;

/// Maximum number of folders at the top that are shown before everything else. If there are more, none is.
const MAX_OUTLINE: usize = 30;
/// Maximum length of a name of a file or folder that is shown as a whole, in bytes.
const MAX_NAME_BYTES: usize = 80;

/// A line of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
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
pub(super) struct Layout<'f> {
    pub files: &'f [(&'f str, &'f FileSymbols)],
    pub folders: Folders,
    /// Levels of files that are listed.
    pub depth: usize,
}

impl Layout<'_> {
    /// All lines, the most important ones first.
    pub(super) fn order(&self, ranks: &Ranks, focus: &Focus) -> Vec<Line> {
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
    pub(super) fn enclosing(&self, line: Line) -> Option<Line> {
        match line {
            Line::Folder(folder) => self.folders.all[folder].parent.map(Line::Folder),
            Line::File(file) => self.folders.of_file[file].map(Line::Folder),
            Line::Symbol(file, symbol) => match self.files[file].1.symbols[symbol].parent {
                Some(parent) => Some(Line::Symbol(file, parent as usize)),
                None => Some(Line::File(file)),
            },
        }
    }

    pub(super) fn text(&self, line: Line) -> String {
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
    pub(super) fn more(&self, folder: Option<usize>, count: usize) -> String {
        let level = folder.map_or(0, |folder| self.level(Line::Folder(folder)) + 1);
        let noun = if count == 1 { "file" } else { "files" };
        format!("{}... {count} more {noun}\n", "  ".repeat(level))
    }
}
