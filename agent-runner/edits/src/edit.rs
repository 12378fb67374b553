//! The list of edits that all syntaxes are parsed into.

/// One edit of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// Path of the file, relative to the repository.
    pub path: String,
    /// Other paths that the edit may mean, in order of preference, if `path` does not exist: a diff may name the file
    /// with and without a prefix, and by its old and its new name.
    pub other_paths: Vec<String>,
    /// The change.
    pub change: Change,
}

impl Edit {
    /// An edit of the file at one path.
    pub fn new(path: impl Into<String>, change: Change) -> Self {
        Self { path: path.into(), other_paths: Vec::new(), change }
    }
}

/// Change of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Writes the whole file, which may exist. `label` is a comment with the path that stood above the content, which is
    /// a part of the file if the file begins with it.
    Write { content: String, label: Option<String> },
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
    /// Other lines that the same text may mean. Of all readings that have a place in the file, the one with the most old
    /// lines is applied.
    pub other_readings: Vec<Vec<HunkLine>>,
    /// Where in the file the old lines are.
    pub position: Position,
    /// Whether the new file ends with a newline, if the edit states it.
    pub final_newline: Option<bool>,
    /// True if a carriage return at the end of a line is part of the edit. Otherwise the lines take the line ends of
    /// the file.
    pub states_line_ends: bool,
    /// True if the text has a mark before each line, as a diff: models forget the blank before a line that is kept.
    pub has_marks: bool,
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
    AtEndAfter(Vec<String>),
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

    /// The kept and added lines, in order.
    pub(crate) fn new_lines(&self) -> Vec<&str> {
        let new = self.lines.iter().filter_map(|line| match line {
            HunkLine::Keep(text) | HunkLine::Add(text) => Some(text.as_str()),
            HunkLine::Remove(_) => None,
        });
        new.collect()
    }

    /// The lines that the hunk adds.
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

    /// True if a kept line that is not blank is first, and another one is last.
    pub(crate) fn has_context_on_both_sides(&self) -> bool {
        let is_context =
            |line: Option<&HunkLine>| matches!(line, Some(HunkLine::Keep(text)) if !text.trim().is_empty());
        self.lines.len() > 1 && is_context(self.lines.first()) && is_context(self.lines.last())
    }

    /// True if a kept line is not blank.
    pub(crate) fn has_context(&self) -> bool {
        self.lines.iter().any(|line| matches!(line, HunkLine::Keep(text) if !text.trim().is_empty()))
    }

    /// True if the hunk removes a line.
    pub(crate) fn removes_lines(&self) -> bool {
        self.lines.iter().any(|line| matches!(line, HunkLine::Remove(_)))
    }
}
