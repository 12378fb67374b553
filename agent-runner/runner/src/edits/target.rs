//! The file a task is evidently about, for replies that forget to name it.

use cfq_proto::task::TaskSpec;

use super::label::is_path;
use crate::checks::{Language, extension};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub path: String,
    /// Of the path, where there is a grammar.
    pub language: Option<Language>,
}

/// `previous` are the paths of the last artifact. The one file it has, or the one path the description names, or a file
/// named after the function that is asked for.
pub fn target(spec: &TaskSpec, previous: &[String]) -> Target {
    let path = match (previous, mentioned(&spec.description).as_slice()) {
        ([one], _) => one.clone(),
        (_, [one]) => one.clone(),
        _ => {
            let stem = definition(&spec.description).map_or_else(|| "solution".to_owned(), |name| snake(&name));
            format!("{stem}.{}", extension(&spec.language).unwrap_or_else(|| guess(&spec.description)))
        }
    };
    Target { language: Language::of_path(&path), path }
}

/// Whether one file will evidently do: nothing is shown, and no second path is named.
pub fn is_single(spec: &TaskSpec, previous: &[String]) -> bool {
    let named = mentioned(&spec.description);
    spec.context_files.is_empty() && previous.len() <= 1 && named.len() <= 1
}

/// The paths in a text, each once.
fn mentioned(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let word = word.trim_matches(['`', '"', '\'', ',', ';', '(', ')', '!', '?', '*', ':']).trim_end_matches('.');
        // `e.g`, `Node.js` and the like are words; a lower-case name with a language's extension is a file.
        let known = word.rsplit_once('.').is_some_and(|(stem, e)| {
            stem.len() > 1 && (Language::of_path(word).is_some() || extension(e) == Some(e) || word.contains('/'))
        });
        if is_path(word) && known && word != "Node.js" && word != "node.js" && !paths.iter().any(|p| p == word) {
            paths.push(word.to_owned());
        }
    }
    paths
}

/// The name of the function or class that a description asks for.
fn definition(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let identifier = |word: &str| {
        let word = word.trim_start_matches(['`', '"', '\'']);
        let name: String = word.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let fits = name.len() > 1 && !name.starts_with(|c: char| c.is_ascii_digit());
        fits.then_some(name)
    };
    let marked = |word: &str| word.contains('`') || word.contains('_') || word.contains('(');
    for pair in words.windows(2) {
        let key = pair[0].trim_matches(['`', ',', ':']).to_ascii_lowercase();
        match key.as_str() {
            "called" | "named" | "def" | "fn" | "func" => return identifier(pair[1]),
            "function" | "method" | "class" | "struct" if marked(pair[1]) => return identifier(pair[1]),
            _ => {}
        }
    }
    let with_arguments = |word: &&&str| word.trim_start_matches('`').find('(').is_some_and(|i| i > 1);
    words.iter().find(with_arguments).and_then(|word| identifier(word))
}

/// `CamelCase` as `camel_case`.
fn snake(name: &str) -> String {
    let mut out = String::new();
    let mut lower_before = false;
    for c in name.chars() {
        if c.is_ascii_uppercase() && lower_before {
            out.push('_');
        }
        lower_before = c.is_ascii_lowercase() || c.is_ascii_digit();
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// The extension of the language a description names, when the task does not say it.
fn guess(text: &str) -> &'static str {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| {
            matches!(word.to_ascii_lowercase().as_str(), "python" | "javascript" | "typescript" | "rust" | "golang")
        })
        .find_map(extension)
        .unwrap_or("txt")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn spec(description: &str, language: &str) -> TaskSpec {
        let json = serde_json::json!({ "description": description, "language": language, "repo": "/r" });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn named_paths_then_named_functions() {
        for (description, language, path) in [
            ("Fix the bug in src/parse.rs.", "", "src/parse.rs"),
            ("Write a Python function fibonacci(n) that returns the n-th number", "python", "fibonacci.py"),
            ("Write a function `is_even` that tells", "javascript", "is_even.js"),
            ("Write a function called clamp.", "go", "clamp.go"),
            ("Add a class `LruCache`", "python", "lru_cache.py"),
            ("Write a function that adds two numbers", "python", "solution.py"),
            ("In Python, write def add(a, b)", "", "add.py"),
            ("Say hello, e.g. in Node.js", "", "solution.txt"),
            ("Move a.py to b.py", "python", "solution.py"),
        ] {
            assert_eq!(target(&spec(description, language), &[]).path, path, "{description}");
        }
    }

    #[test]
    fn a_revision_is_about_the_file_there_is() {
        assert_eq!(target(&spec("Write add(a, b)", "python"), &["x/y.py".into()]).path, "x/y.py");
    }
}
