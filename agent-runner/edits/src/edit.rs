//! The list of edits that all syntaxes are parsed into.

/// One edit of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// Path of the file, relative to the repository.
    pub path: String,
    /// What happens to it.
    pub change: Change,
}

/// Change of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Writes the whole file, which may exist.
    Write { content: String },
    /// Creates the file, which must not exist. `executable` is the mode, if the edit states one.
    Create { content: String, executable: Option<bool> },
    /// Replaces lines of the file, which must exist, and may rename it or change its mode.
    Modify {
        hunks: Vec<Hunk>,
        /// New path.
        rename_to: Option<String>,
        /// New mode.
        executable: Option<bool>,
        /// True if the hunks are in the order of the file.
        in_order: bool,
    },
    /// Removes the file. If the edit states the removed `lines`, they must be those of the file.
    Delete { lines: Option<Vec<String>> },
}

/// Replacement of some consecutive lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hunk {
    /// Old and new lines, in order.
    pub lines: Vec<HunkLine>,
    /// Where in the file the old lines are.
    pub position: Position,
    /// Whether the new file ends with a newline, if the edit states it.
    pub final_newline: Option<bool>,
    /// True if a carriage return at the end of a line is part of the edit. Otherwise the lines take the line ends of
    /// the file.
    pub states_line_ends: bool,
}

/// One line of a hunk, without its newline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HunkLine {
    Keep(String),
    Remove(String),
    Add(String),
}

/// What an edit states about the place of a hunk in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// Nothing. A hunk without old lines is appended to the file.
    Unstated,
    /// The number of the first old line, from 1, in the file that the reply has changed so far. The model chose it from
    /// a list of candidates.
    Line(usize),
    /// The number of the first old line, from 1, in the file before this edit.
    OldLine(usize),
    /// It comes after these lines, which follow one another but need not be adjacent.
    After(Vec<String>),
    /// Its last line is the last one of the file, after these lines.
    EndAfter(Vec<String>),
}

impl Hunk {
    /// The lines that the hunk replaces or keeps.
    pub(crate) fn old_lines(&self) -> Vec<&str> {
        let old = self.lines.iter().filter_map(|line| match line {
            HunkLine::Keep(text) | HunkLine::Remove(text) => Some(text.as_str()),
            HunkLine::Add(_) => None,
        });
        old.collect()
    }

    /// The lines that result.
    pub(crate) fn new_lines(&self) -> Vec<&str> {
        let new = self.lines.iter().filter_map(|line| match line {
            HunkLine::Keep(text) | HunkLine::Add(text) => Some(text.as_str()),
            HunkLine::Remove(_) => None,
        });
        new.collect()
    }

    /// The new lines that the file does not have yet.
    pub(crate) fn added_lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().filter_map(|line| match line {
            HunkLine::Add(text) => Some(text.as_str()),
            HunkLine::Keep(_) | HunkLine::Remove(_) => None,
        })
    }

    /// Number of added lines before the first old one.
    pub(crate) fn leading_added_lines(&self) -> usize {
        self.lines.iter().take_while(|line| matches!(line, HunkLine::Add(_))).count()
    }

    /// True if a line that is kept follows the last change.
    pub(crate) fn has_trailing_context(&self) -> bool {
        matches!(self.lines.last(), Some(HunkLine::Keep(_)))
    }

    /// True if the hunk removes a line.
    pub(crate) fn removes_lines(&self) -> bool {
        self.lines.iter().any(|line| matches!(line, HunkLine::Remove(_)))
    }
}
