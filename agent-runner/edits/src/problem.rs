//! Reasons why a reply is refused. The message is sent to the model that wrote the reply, so it states what to send
//! instead.

use crate::path::PathProblem;

/// Maximum number of candidates in a message.
pub(crate) const MAX_SHOWN_CANDIDATES: usize = 8;
/// Maximum length of a line in a message, in characters.
pub(crate) const MAX_SHOWN_CHARS: usize = 120;

/// A path at which no file can be written or removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path} {reason}")]
pub struct FileProblem {
    /// The offending path.
    pub path: String,
    /// Reason why the path cannot be written.
    pub reason: NotWritableReason,
}

/// Reason why no file can be written at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotWritableReason {
    #[error("lies in a submodule: leave it unchanged")]
    InSubmodule,
    #[error("goes through a symbolic link: use the real path of the file")]
    ThroughSymlink,
    #[error("lies below a path that is a file: use another path")]
    ParentIsFile,
    #[error("is a folder: name a file in it")]
    Folder,
    #[error("is a submodule: leave it unchanged")]
    Submodule,
    #[error("is or would be a symbolic link: leave it out")]
    Symlink,
    #[error("is stored in Git LFS: leave it unchanged")]
    Lfs,
    #[error("is larger than 16 MiB: leave it unchanged")]
    TooLarge,
    #[error("is not a text file: leave it unchanged")]
    NotText,
    #[error("would be both a file and a folder: choose another path for one of them")]
    FileAndFolder,
}

/// One of several places at which the old lines of a hunk are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the first line, from 1.
    pub line: usize,
    /// Nearest line above it that is not blank.
    pub below: Option<String>,
}

/// Reason why a reply is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplyProblem {
    #[error("the reply has no code block: send each file whole, in a fenced code block with its path above")]
    NoBlock,
    #[error(
        "the reply has a search/replace block without the path of its file: put the path alone on the line above \
         `<<<<<<< SEARCH`"
    )]
    UnnamedHunk,
    #[error("{0}: use a path inside the repository")]
    Path(#[from] PathProblem),
    #[error("{0}")]
    File(#[from] FileProblem),
    #[error("{path}: the file does not exist{}; to create it, send it whole", other(.same_name.as_ref()))]
    NoSuchFile {
        path: String,
        /// The only file of the same name in another folder (see [`ReplyProblem::with_same_name`]).
        same_name: Option<String>,
    },
    #[error("{path}: the file exists already: change it with a search/replace block or a diff, or send it whole")]
    Exists { path: String },
    #[error("{path}: a file with the new name exists already: choose another name, or remove that file first")]
    NewNameExists { path: String },
    #[error(
        "{path}: the text to search for is not in the file: `{line}`{}; copy the lines exactly from the current file, or \
         send the file whole", most_similar(.closest.as_ref())
    )]
    NotFound {
        path: String,
        /// First old line of the hunk that is not blank.
        line: String,
        /// The most similar place: the number of its first line, and that line.
        closest: Option<(usize, String)>,
    },
    #[error(
        "{path}: the text to search for is in the file {count} times: `{line}`{}; give more lines around it, or the \
         line of the right place: {how}", places(.candidates, *.count)
    )]
    Ambiguous {
        path: String,
        line: String,
        count: usize,
        /// The first places.
        candidates: Vec<Candidate>,
        /// How the syntax states a line.
        how: String,
    },
    #[error("{path}: a hunk of the diff has no line of the file, so its place is unknown: give the lines around it")]
    NoContext { path: String },
    #[error("{path}: its lines are not those of the file: remove it with `*** Delete File: {path}`")]
    OtherContent { path: String },
    #[error(
        "{path}: the reply has hunks for the file, and then the whole file, and it is unclear which counts: send one of \
         them"
    )]
    HunksAndWholeFile { path: String },
    #[error("{path}: the content has a line that looks like the marker of an edit, `{line}`: {MARKER_REMEDY}")]
    Marker { path: String, line: String },
    #[error(
        "{path}: the reply reached its maximum length before the end of the edit: be shorter, or change less at once"
    )]
    Truncated { path: String },
    #[error("the reply reached its maximum length in an edit: be shorter, or change less at once")]
    TruncatedEdit,
    #[error(
        "{path}: the search/replace block is incomplete: it needs a `<<<<<<< SEARCH`, a `=======` and a `>>>>>>> \
         REPLACE` line; if the file contains code fences, use a longer fence around the block"
    )]
    Incomplete { path: String },
    #[error("the patch has an unexpected line, `{line}`: {reason}")]
    InvalidPatch { line: String, reason: &'static str },
    #[error(
        "{path}: the edit adds a syntax error in line {line}: {message}. The lines before the edit:\n{before}\nThe \
         lines after it:\n{after}"
    )]
    AddsSyntaxError { path: String, line: usize, message: String, before: String, after: String },
    #[error("{path}: the file is not in UTF-8, and its encoding has no character `{character}`: use another one")]
    NotEncodable { path: String, character: char },
    #[error("the result changes {count} files, more than {max}: leave some unchanged")]
    TooManyFiles { count: usize, max: usize },
    #[error("the reply has {bytes} bytes, more than {max}: send only the changed files")]
    ReplyTooLong { bytes: usize, max: usize },
    #[error("the reply has more than {max} edits or hunks: send fewer, or whole files")]
    TooManyEdits { max: usize },
    #[error("{path}: it has {bytes} bytes, and files of more than {max} bytes cannot be edited: leave it unchanged")]
    BaseTooLarge { path: String, bytes: usize, max: usize },
    #[error("{path}: its hunks need too many comparisons: send the file whole, or fewer and shorter hunks")]
    TooManyComparisons { path: String },
    #[error("{path}: {bytes} bytes are more than the {max} that one file may have: split it into several files")]
    TooLarge { path: String, bytes: usize, max: usize },
    #[error("the reply changes nothing, because the files are the same as before: send the files that must change")]
    NothingChanged,
}

/// What to do about content that looks like an edit.
const MARKER_REMEDY: &str = "for a search/replace block use the lines `<<<<<<< SEARCH`, `=======` and `>>>>>>> REPLACE`; \
                             a file with such lines is created with `*** Add File`";

impl ReplyProblem {
    /// Adds to [`Self::NoSuchFile`] the path of the file with the same name, which `find` looks for. This may take a
    /// while, so it is not done for replies that are not complete yet.
    #[must_use]
    pub fn with_same_name(mut self, find: impl FnOnce(&str) -> Option<String>) -> Self {
        if let Self::NoSuchFile { path, same_name } = &mut self {
            *same_name = find(path);
        }
        self
    }

    /// The problem of a line that the syntax of a patch or diff does not allow.
    pub(crate) fn invalid_patch(line: &str, reason: &'static str) -> Self {
        Self::InvalidPatch { line: excerpt(line), reason }
    }
}

/// A line in a message.
pub(crate) fn excerpt(line: &str) -> String {
    line.trim().chars().take(MAX_SHOWN_CHARS).collect()
}

fn other(path: Option<&String>) -> String {
    path.map(|path| format!(", but {path} does: use that path")).unwrap_or_default()
}

fn most_similar(place: Option<&(usize, String)>) -> String {
    place.map(|(line, text)| format!("; the most similar place is line {line}: `{text}`")).unwrap_or_default()
}

fn places(candidates: &[Candidate], count: usize) -> String {
    let mut list = String::from(";");
    for (n, Candidate { line, below }) in candidates.iter().take(MAX_SHOWN_CANDIDATES).enumerate() {
        let below = below.as_ref().map(|text| format!(" below `{text}`")).unwrap_or_default();
        let comma = if n == 0 { "" } else { "," };
        list.push_str(&format!("{comma} {}. line {line}{below}", n + 1));
    }
    if count > MAX_SHOWN_CANDIDATES {
        list.push_str(&format!(", and {} more", count - MAX_SHOWN_CANDIDATES));
    }
    list
}
