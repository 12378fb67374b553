//! Limits of the checks of one file. A file that exceeds one cannot be checked, so it must not pass: the creator gets
//! the reason and revises the file.

/// Maximum size of a checked file, in bytes. New files are smaller (see `edits`); the base's may be larger.
pub(super) const MAX_CHECKED_BYTES: usize = 2 * 1024 * 1024;
/// Maximum number of steps of a parse, in the units in which tree-sitter reports its progress. A source of 500 KB needs
/// less than a tenth of it; text that is ambiguous in its grammar can need any number.
pub(super) const MAX_PARSE_STEPS: u32 = 100_000;

/// Error: a file cannot be checked within the limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckLimitExceeded {
    /// The file is too large.
    #[error("cannot be checked, because {bytes} bytes are more than {MAX_CHECKED_BYTES}: split the file")]
    Bytes { bytes: usize },
    /// Parsing or searching the file needs too many steps.
    #[error("cannot be checked, because it is nested too deeply or too repetitive: simplify or split the file")]
    Work,
}
