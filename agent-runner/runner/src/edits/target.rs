//! Target file of a task: the file that a reply's unlabelled code block is written to.

use cfq_edits::{ReplyTarget, is_path};
use cfq_proto::task::TaskSpec;

use crate::checks::{Language, extension};

/// Maximum number of paths that are looked for in a description.
const MAX_NAMED_PATHS: usize = 100;

/// Determines the target file: the only file of the previous artifact (`previous` are its paths), else the only path in
/// the description, else a file named after the function that the description asks for.
pub fn target_file(spec: &TaskSpec, previous: &[String]) -> ReplyTarget {
    let path = match (previous, mentioned_paths(&spec.description).as_slice()) {
        ([one], _) => one.clone(),
        (_, [one]) => one.clone(),
        _ => {
            let name = requested_name(&spec.description);
            let stem = name.map_or_else(|| "solution".to_owned(), |name| snake_case(&name));
            format!("{stem}.{}", extension(&spec.language).unwrap_or_else(|| guess_extension(&spec.description)))
        }
    };
    ReplyTarget { path }
}

/// True if the task apparently needs only one file: no context files, and at most one path in the description and in
/// the previous artifact.
pub fn is_single_file(spec: &TaskSpec, previous: &[String]) -> bool {
    let mentioned = mentioned_paths(&spec.description);
    spec.context_files.is_empty() && previous.len() <= 1 && mentioned.len() <= 1
}

/// A word without the punctuation around it.
fn trimmed(word: &str) -> &str {
    word.trim_matches(['`', '"', '\'', ',', ';', '(', ')', '!', '?', '*', ':']).trim_end_matches('.')
}

/// The first words of a text that could be paths of existing files, without duplicates and without line numbers after the
/// paths.
pub fn named_paths(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for word in text.split_whitespace().map(trimmed) {
        let path = word.split_once(':').map_or(word, |(path, _)| path);
        let path = path.strip_prefix("./").unwrap_or(path);
        if is_path(path) && !paths.iter().any(|p| p == path) {
            paths.push(path.to_owned());
            if paths.len() == MAX_NAMED_PATHS {
                break;
            }
        }
    }
    paths
}

/// Paths of source files in a text, without duplicates.
fn mentioned_paths(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for word in text.split_whitespace().map(trimmed) {
        // `e.g` and `Node.js` are words; a name with a language's extension, or with a folder, is a file.
        let has_known_extension = word.rsplit_once('.').is_some_and(|(stem, e)| {
            stem.len() > 1 && (Language::of_path(word).is_some() || extension(e) == Some(e) || word.contains('/'))
        });
        let is_file = is_path(word) && has_known_extension && word != "Node.js" && word != "node.js";
        if is_file && !paths.iter().any(|p| p == word) {
            paths.push(word.to_owned());
        }
    }
    paths
}

/// Name of the function or class that a description asks for.
fn requested_name(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let identifier = |word: &str| {
        let word = word.trim_start_matches(['`', '"', '\'']);
        let name: String = word.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let is_valid = name.len() > 1 && !name.starts_with(|c: char| c.is_ascii_digit());
        is_valid.then_some(name)
    };
    let is_code = |word: &str| word.contains('`') || word.contains('_') || word.contains('(');
    for pair in words.windows(2) {
        let key = pair[0].trim_matches(['`', ',', ':']).to_ascii_lowercase();
        match key.as_str() {
            "called" | "named" | "def" | "fn" | "func" => return identifier(pair[1]),
            "function" | "method" | "class" | "struct" if is_code(pair[1]) => return identifier(pair[1]),
            _ => {}
        }
    }
    let has_arguments = |word: &&&str| word.trim_start_matches('`').find('(').is_some_and(|i| i > 1);
    words.iter().find(has_arguments).and_then(|word| identifier(word))
}

/// Converts `CamelCase` to `camel_case`.
fn snake_case(name: &str) -> String {
    let mut out = String::new();
    let mut after_lowercase = false;
    for c in name.chars() {
        if c.is_ascii_uppercase() && after_lowercase {
            out.push('_');
        }
        after_lowercase = c.is_ascii_lowercase() || c.is_ascii_digit();
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// File extension of the language that a description names, for a task without a language; `txt` if none.
fn guess_extension(text: &str) -> &'static str {
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
    fn target_is_a_mentioned_path_or_named_after_a_function() {
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
            assert_eq!(target_file(&spec(description, language), &[]).path, path, "{description}");
        }
    }

    #[test]
    fn target_of_a_revision_is_the_previous_file() {
        assert_eq!(target_file(&spec("Write add(a, b)", "python"), &["x/y.py".into()]).path, "x/y.py");
    }
}
