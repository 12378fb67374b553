//! The syntaxes of edits, apart from whole files.

pub(crate) mod apply_patch;
pub(crate) mod search_replace;
pub(crate) mod unified_diff;
