//! From a creator's reply to files: found ([`parse`]), then applied all or nothing ([`apply`]).
//!
//! A reply holds fenced code blocks. Each names its file in the info string, on the line before, or in its first line; a
//! block of search/replace hunks edits a file that is there. A reply with one unnamed block is taken for the file that the
//! task is evidently about, because small models forget the name. Nothing is guessed beyond that: what cannot be read
//! goes back to the creator in words.

mod apply;
mod fence;
mod label;
mod parse;
mod replace;
mod target;

pub use apply::{LARGEST_FILE, apply};
pub use parse::{Edit, parse};
pub use replace::Hunk;
pub use target::{Target, is_single, target};

use crate::workstream::{FileProblem, PathProblem};

/// Why a reply was not taken. Goes back to the creator, so it says what to send instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplyProblem {
    #[error("the reply has no code block: send each file whole, in a fenced code block with its path above")]
    NoBlock,
    #[error("the reply has a diff: send each changed file whole instead, in a fenced code block with its path above")]
    OnlyDiff,
    #[error("{0}: use a path inside the repository")]
    Path(#[from] PathProblem),
    #[error("{0}: it may not be changed")]
    File(#[from] FileProblem),
    #[error("{path}: the text to search for is not in the file: `{line}`")]
    NotFound { path: String, line: String },
    #[error("{path}: the text to search for is there {times} times, give more lines around it: `{line}`")]
    Ambiguous { path: String, line: String, times: usize },
    #[error(
        "{path}: the reply was cut at its longest length before the file's end: be shorter, or change less at once"
    )]
    Cut { path: String },
    #[error("{path}: the search/replace block is not complete")]
    Incomplete { path: String },
    #[error("{count} files are more than the {most} that one reply may change")]
    TooManyFiles { count: usize, most: usize },
    #[error("{path}: {bytes} bytes are more than the {most} that one file may have")]
    TooLarge { path: String, bytes: usize, most: usize },
    #[error("the reply changes nothing: the files are the same as before")]
    NothingChanged,
}
