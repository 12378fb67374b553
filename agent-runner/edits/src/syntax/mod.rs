//! The syntaxes of edits, apart from whole files.

pub(crate) mod apply_patch;
mod diff_hunks;
mod diff_names;
pub(crate) mod search_replace;
pub(crate) mod unified_diff;

pub use diff_names::unquoted;

/// Maximum number of hunks in one reply, and of edits.
pub(crate) const MAX_HUNKS: usize = 512;
