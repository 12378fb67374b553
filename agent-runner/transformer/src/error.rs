//! Why a declaration is refused: always with file, line and column, so that an editor can jump there.

use serde_saphyr::Location;

#[derive(Debug, thiserror::Error)]
pub enum DeclarationError {
    /// Not YAML, an unknown or missing field, a value of the wrong type.
    #[error("{file}:{line}:{column}: {message}")]
    Shape { file: String, line: u64, column: u64, message: String },
    /// Well-formed, but it cannot be meant.
    #[error("{file}:{line}:{column}: {field}: {message}")]
    Value { file: String, line: u64, column: u64, field: &'static str, message: String },
}

impl DeclarationError {
    pub(crate) fn shape(file: &str, error: &serde_saphyr::Error) -> Self {
        let at = error.location().unwrap_or(Location::UNKNOWN);
        let text = error.without_snippet().to_string();
        // The text repeats the place in words; we put it in front in the form editors read.
        let first = text.lines().next().unwrap_or_default();
        let message = first.split_once(" at line ").map_or(first, |(message, _)| message).to_owned();
        Self::Shape { file: file.to_owned(), line: at.line(), column: at.column(), message }
    }

    pub(crate) fn value(file: &str, at: Location, field: &'static str, message: impl Into<String>) -> Self {
        Self::Value { file: file.to_owned(), line: at.line(), column: at.column(), field, message: message.into() }
    }
}
