//! The languages that edits are checked in: those with a grammar.

use cfq_edits::{Languages, SyntaxProblem};

use crate::checks::{Language, extension, syntax_error};

/// The grammars of [`Language`].
pub(super) struct Grammars;

impl Languages for Grammars {
    fn extension(&self, name: &str) -> Option<&'static str> {
        extension(name)
    }

    fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxProblem> {
        let error = syntax_error(Language::of_path(path)?, text).ok().flatten()?;
        Some(SyntaxProblem { line: error.line as usize, message: error.message })
    }

    fn is_valid(&self, path: &str, text: &str) -> bool {
        Language::of_path(path).is_some_and(|language| syntax_error(language, text) == Ok(None))
    }
}
