//! What the caller knows about programming languages.

/// A syntax error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntaxProblem {
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub message: String,
}

/// What the caller knows about programming languages.
pub trait Languages {
    /// The usual file extension of a language, given the name that code blocks use for it.
    fn extension(&self, name: &str) -> Option<&'static str>;

    /// The first syntax error of the text of the file `path`; `None` if it has none or cannot be checked.
    fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxProblem>;

    /// True if the text is known to be free of syntax errors, which needs a grammar for the file `path`.
    fn is_valid(&self, path: &str, text: &str) -> bool;
}
