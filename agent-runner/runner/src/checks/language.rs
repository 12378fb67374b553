//! Languages with a tree-sitter grammar, found by file name or by language name.

use std::ops::ControlFlow;

use tree_sitter::{ParseOptions, Parser, Tree};

use super::limits::{CheckLimitExceeded, MAX_CHECKED_BYTES, MAX_PARSE_STEPS};

/// A language with a grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Language {
    Python,
    JavaScript,
    TypeScript,
    Tsx,
    Rust,
    Go,
}

impl Language {
    /// Language of a file, by its extension.
    pub fn of_path(path: &str) -> Option<Self> {
        match path.rsplit_once('.')?.1.to_ascii_lowercase().as_str() {
            "py" | "pyi" | "pyw" => Some(Self::Python),
            "js" | "mjs" | "cjs" | "jsx" => Some(Self::JavaScript),
            "ts" | "mts" | "cts" => Some(Self::TypeScript),
            "tsx" => Some(Self::Tsx),
            "rs" => Some(Self::Rust),
            "go" => Some(Self::Go),
            _ => None,
        }
    }

    /// Returns the language with this name, as written in a task or in a code block's info string.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::of_path(&format!("x.{}", extension(name)?))
    }

    /// Parses a text of limited size, in a limited number of steps.
    ///
    /// # Errors
    /// [`CheckLimitExceeded`] if the text exceeds a limit.
    pub(super) fn parse(self, text: &str) -> Result<Tree, CheckLimitExceeded> {
        if text.len() > MAX_CHECKED_BYTES {
            return Err(CheckLimitExceeded::Bytes { bytes: text.len() });
        }
        let mut steps = 0;
        let mut progress = |_: &tree_sitter::ParseState| {
            steps += 1;
            if steps > MAX_PARSE_STEPS { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let options = ParseOptions::new().progress_callback(&mut progress);
        let mut read = |offset: usize, _| text.as_bytes().get(offset..).unwrap_or_default();
        let tree = self.parser().and_then(|mut parser| parser.parse_with_options(&mut read, None, Some(options)));
        tree.ok_or(CheckLimitExceeded::Work)
    }

    /// A parser with this language's grammar.
    fn parser(self) -> Option<Parser> {
        let language = match self {
            Self::Python => tree_sitter_python::LANGUAGE,
            Self::JavaScript => tree_sitter_javascript::LANGUAGE,
            Self::TypeScript => tree_sitter_typescript::LANGUAGE_TYPESCRIPT,
            Self::Tsx => tree_sitter_typescript::LANGUAGE_TSX,
            Self::Rust => tree_sitter_rust::LANGUAGE,
            Self::Go => tree_sitter_go::LANGUAGE,
        };
        let mut parser = Parser::new();
        // Fails only for a grammar with an incompatible ABI, which the tests detect.
        parser.set_language(&language.into()).ok()?;
        Some(parser)
    }
}

/// Returns the usual file extension of a language, given one of the names that users and code blocks use for it.
pub fn extension(name: &str) -> Option<&'static str> {
    Some(match name.trim().to_ascii_lowercase().as_str() {
        "python" | "python3" | "py" => "py",
        "javascript" | "js" | "node" | "nodejs" | "jsx" | "mjs" => "js",
        "typescript" | "ts" => "ts",
        "tsx" => "tsx",
        "rust" | "rs" => "rs",
        "go" | "golang" => "go",
        "c" => "c",
        "c++" | "cpp" | "cxx" => "cpp",
        "c#" | "csharp" | "cs" => "cs",
        "java" => "java",
        "kotlin" | "kt" => "kt",
        "swift" => "swift",
        "ruby" | "rb" => "rb",
        "php" => "php",
        "lua" => "lua",
        "perl" | "pl" => "pl",
        "scala" => "scala",
        "html" => "html",
        "css" => "css",
        "sql" => "sql",
        "shell" | "sh" | "bash" => "sh",
        "yaml" | "yml" => "yaml",
        "json" => "json",
        "toml" => "toml",
        "markdown" | "md" => "md",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_grammar_loads() {
        for language in
            [Language::Python, Language::JavaScript, Language::TypeScript, Language::Tsx, Language::Rust, Language::Go]
        {
            assert!(language.parser().is_some(), "{language:?}");
        }
    }

    #[test]
    fn names_and_paths_give_the_same_language() {
        assert_eq!(Language::of_name("Python"), Language::of_path("a/b.py"));
        assert_eq!(Language::of_name("golang"), Some(Language::Go));
        assert_eq!(Language::of_name("cobol"), None);
        assert_eq!(Language::of_path("Makefile"), None);
    }
}
