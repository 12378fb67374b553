//! Turns a creator's reply into files: edits are parsed (`parse`), then applied all or nothing (`apply`).
//!
//! A reply contains fenced code blocks. Each names its file in the info string, on the line above, or in its first
//! line; a block of search/replace hunks edits an existing file. One unlabelled block is assigned to the task's target
//! file ([`ReplyTarget`]), because small models forget the name. Nothing else is guessed: if a reply cannot be parsed,
//! the creator gets the [`ReplyProblem`] as a finding.

mod apply;
mod fence;
mod label;
mod parse;
mod replace;
mod target;

pub use apply::{MAX_FILE_BYTES, apply};
pub use parse::{Edit, parse};
pub use replace::Hunk;
pub use target::{ReplyTarget, is_single_file, target_file};

use crate::workstream::{FileProblem, PathProblem};

/// Reason why a reply was rejected. The message is sent to the creator, so it states what to send instead.
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
    #[error("{path}: the text to search for is in the file {count} times, give more lines around it: `{line}`")]
    Ambiguous { path: String, line: String, count: usize },
    #[error(
        "{path}: the reply reached its maximum length before the end of the file: be shorter, or change less at once"
    )]
    Truncated { path: String },
    #[error("{path}: the search/replace block is incomplete: it needs a SEARCH, a ======= and a REPLACE marker")]
    Incomplete { path: String },
    #[error("{count} files are more than the {max} that one reply may change")]
    TooManyFiles { count: usize, max: usize },
    #[error("the reply has {bytes} bytes, more than {max}: send only the changed files")]
    ReplyTooLong { bytes: usize, max: usize },
    #[error("the reply has more than {max} edits: send fewer, or whole files")]
    TooManyEdits { max: usize },
    #[error("{path}: it has {bytes} bytes, and files of more than {max} bytes cannot be edited: leave it unchanged")]
    BaseTooLarge { path: String, bytes: usize, max: usize },
    #[error("{path}: its search/replace blocks need too many comparisons: send the file whole, or shorter blocks")]
    TooManyComparisons { path: String },
    #[error("{path}: {bytes} bytes are more than the {max} that one file may have")]
    TooLarge { path: String, bytes: usize, max: usize },
    #[error("the reply changes nothing: the files are the same as before")]
    NothingChanged,
}
