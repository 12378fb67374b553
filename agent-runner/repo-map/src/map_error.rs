//! Why a map cannot be made as requested.

/// Error: the request cannot be fulfilled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// A focus that is neither a path nor a name.
    #[error(
        "the focus {0:?} is no file, folder or definition of the map: check how it is written, or include test files"
    )]
    UnknownFocus(String),
    /// A part that the map does not have.
    #[error("there is no part {part}; the map has {parts}")]
    NoSuchPart { part: usize, parts: usize },
}
