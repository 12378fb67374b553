//! Reasons why a reply is refused. The message is sent to the model that wrote the reply, so it states what to send
//! instead.

use crate::path::PathProblem;

/// Maximum number of candidates in a message.
const MAX_SHOWN_CANDIDATES: usize = 8;

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
    #[error("lies in a submodule")]
    InSubmodule,
    #[error("goes through a symbolic link")]
    ThroughSymlink,
    #[error("lies below a path that is a file")]
    ParentIsFile,
    #[error("is a folder")]
    Folder,
    #[error("is a submodule")]
    Submodule,
    #[error("is a symbolic link")]
    Symlink,
    #[error("is stored in Git LFS")]
    Lfs,
    #[error("is larger than 16 MiB")]
    TooLarge,
    #[error("is not a text file")]
    NotText,
    #[error("would be both a file and a folder")]
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
pub enum Problem {
    #[error("the reply has no code block: send each file whole, in a fenced code block with its path above")]
    NoBlock,
    #[error(
        "the reply has a diff without the name of a file: put `--- a/PATH` and `+++ b/PATH` above it, or send each \
         changed file whole, in a fenced code block with its path above"
    )]
    UnnamedDiff,
    #[error("{0}: use a path inside the repository")]
    Path(#[from] PathProblem),
    #[error("{0}: it may not be changed")]
    File(#[from] FileProblem),
    #[error("{path}: the file does not exist{}", .similar.as_ref().map(|s| format!(", but {s} does")).unwrap_or_default())]
    NoSuchFile { path: String, similar: Option<String> },
    #[error("{path}: the file exists already: change it with a search/replace block or a diff, or send it whole")]
    Exists { path: String },
    #[error("{path}: the text to search for is not in the file: `{line}`{}", most_similar(.closest.as_ref()))]
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
    #[error("{path}: the diff removes the file, but its lines are not those of the file")]
    OtherContent { path: String },
    #[error(
        "{path}: the reply reached its maximum length before the end of the edit: be shorter, or change less at once"
    )]
    Truncated { path: String },
    #[error("{path}: the search/replace block is incomplete: it needs a SEARCH, a ======= and a REPLACE marker")]
    Incomplete { path: String },
    #[error("the patch has an unexpected line, `{line}`: {reason}")]
    InvalidPatch { line: String, reason: &'static str },
    #[error(
        "{path}: the edit adds a syntax error in line {line}: {message}. The lines before the edit:\n{before}\nThe lines \
         after it:\n{after}"
    )]
    SyntaxError { path: String, line: usize, message: String, before: String, after: String },
    #[error("{path}: the file is not in UTF-8, and its encoding has no character `{character}`: use another one")]
    NotEncodable { path: String, character: char },
    #[error("{count} files are more than the {max} that one reply may change")]
    TooManyFiles { count: usize, max: usize },
    #[error("the reply has {bytes} bytes, more than {max}: send only the changed files")]
    ReplyTooLong { bytes: usize, max: usize },
    #[error("the reply has more than {max} edits: send fewer, or whole files")]
    TooManyEdits { max: usize },
    #[error("{path}: it has {bytes} bytes, and files of more than {max} bytes cannot be edited: leave it unchanged")]
    BaseTooLarge { path: String, bytes: usize, max: usize },
    #[error("{path}: its hunks need too many comparisons: send the file whole, or shorter hunks")]
    TooManyComparisons { path: String },
    #[error("{path}: {bytes} bytes are more than the {max} that one file may have")]
    TooLarge { path: String, bytes: usize, max: usize },
    #[error("the reply changes nothing: the files are the same as before")]
    NothingChanged,
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
