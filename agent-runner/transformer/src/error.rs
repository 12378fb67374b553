//! Errors in loop declarations. Each error names file, line and column, in the form that editors can jump to.

use serde_saphyr::Location;

/// Error: the text is not a valid loop declaration. Lines and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub enum DeclarationError {
    /// The text is not YAML, a field is unknown or missing, or a value has the wrong type.
    #[error("{file}:{line}:{column}: {message}")]
    Malformed {
        /// File name, as given to [`parse`](crate::parse()).
        file: String,
        /// Line of the error.
        line: u64,
        /// Column of the error.
        column: u64,
        /// Message of the YAML parser.
        message: String,
    },
    /// A value is well-formed, but out of range or not supported.
    #[error("{file}:{line}:{column}: {field}: {message}")]
    InvalidValue {
        /// File name, as given to [`parse`](crate::parse()).
        file: String,
        /// Line of the value.
        line: u64,
        /// Column of the value.
        column: u64,
        /// Path of the field, such as `quality.thresholds.pass`.
        field: &'static str,
        /// Reason in words.
        message: String,
    },
}

impl DeclarationError {
    pub(crate) fn malformed(file: &str, error: &serde_saphyr::Error) -> Self {
        let at = error.location().unwrap_or(Location::UNKNOWN);
        let text = error.without_snippet().to_string();
        // The parser's text also gives the location in words. This part is removed, because the message already starts
        // with the location.
        let first = text.lines().next().unwrap_or_default();
        let message = first.split_once(" at line ").map_or(first, |(message, _)| message).to_owned();
        Self::Malformed { file: file.to_owned(), line: at.line(), column: at.column(), message }
    }

    pub(crate) fn invalid_value(file: &str, at: Location, field: &'static str, message: impl Into<String>) -> Self {
        let (line, column) = (at.line(), at.column());
        Self::InvalidValue { file: file.to_owned(), line, column, field, message: message.into() }
    }
}
