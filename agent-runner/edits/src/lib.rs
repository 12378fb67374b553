//! Turns a model's reply into changed files: the reply is parsed into a list of edits ([`parse`]), and the list is
//! applied to the files of a tree, all or nothing, in memory ([`apply`]).
//!
//! A reply may use four syntaxes, also mixed: whole files in code blocks, search/replace blocks, unified diffs, and the
//! patch format that begins with `*** Begin Patch` (described in the prompt of OpenAI's models as `apply_patch`). All of
//! them become the same list of [`Edit`]s, in the order of the reply. What is certainly an edit is never ignored. The file
//! of an edit is guessed only if the reply names none: it is that of the edit before, or the target of the task
//! ([`ReplyTarget`]), because small models forget the name. What cannot be parsed or applied is a [`ReplyProblem`], whose
//! message tells the model what to send instead.
//!
//! A hunk is found in its file by its old lines, in steps of growing tolerance: blanks at the ends of lines, the mark of a
//! line that is kept, another indentation, look-alike characters. Several places are narrowed by what the edit states
//! (line, order, lines above). If more than one is left, the edit is refused with a numbered list, from which the model can
//! choose. Bytes outside the replaced lines are kept: line ends, the end of the file without a newline, the encoding, a
//! byte order mark, and the mode of the file.

mod apply;
mod comparison;
mod edit;
mod encoding;
mod hunk;
mod label;
mod languages;
mod parse;
mod path;
mod place;
mod problem;
mod sections;
mod syntax;
mod syntax_check;
mod text;

pub use apply::{BaseFile, BaseFiles, ChangedFile, FileContent, MAX_FILE_BYTES, apply};
pub use edit::{Change, Edit, Hunk, HunkLine, Position};
pub use encoding::{Encoding, NotText, decode, decode_as, encode};
pub use label::is_path;
pub use languages::{Languages, SyntaxProblem};
pub use parse::{ReplyTarget, parse};
pub use path::{InvalidPathReason, PathProblem, repo_path};
pub use problem::{Candidate, FileProblem, NotWritableReason, ReplyProblem};
pub use syntax::unquoted;
