//! Target file of a task: the file that a reply's unlabelled code block is written to.

use std::collections::HashSet;

use cfq_edits::{ReplyTarget, is_path};
use cfq_proto::task::TaskSpec;

use crate::checks::{Language, extension};

/// Determines the target file: the only file of the previous artifact (`previous` are its paths), else the only path of a
/// source file in the description, else a file named after the function that the description asks for. If it asks for none
/// and the task has no language, it is the only existing file that the description names (`named`).
pub fn target_file(spec: &TaskSpec, previous: &[String], named: &[String]) -> ReplyTarget {
    let path = match (previous, mentioned_paths(&spec.description).as_slice()) {
        ([one], _) => one.clone(),
        (_, [one]) => one.clone(),
        (_, mentioned) => {
            let name = requested_name(&spec.description);
            // A task with a language may name a file of text only as something to read.
            if let ([], [one], None, true) = (mentioned, named, &name, spec.language.is_empty()) {
                return ReplyTarget { path: one.clone() };
            }
            let stem = name.map_or_else(|| "solution".to_owned(), |name| snake_case(&name));
            format!("{stem}.{}", extension(&spec.language).unwrap_or_else(|| guess_extension(&spec.description)))
        }
    };
    ReplyTarget { path }
}

/// True if the task apparently needs only one file: no context files, and at most one path of a source file in the
/// description and one in the previous artifact.
pub fn is_single_file(spec: &TaskSpec, previous: &[String]) -> bool {
    let mentioned = mentioned_paths(&spec.description);
    spec.context_files.is_empty() && previous.len() <= 1 && mentioned.len() <= 1
}

/// Words of a text that could be paths, without duplicates, the punctuation around them, a leading `./` and what follows a
/// colon, such as a line number.
pub fn possible_paths(text: &str) -> impl Iterator<Item = &str> {
    const PUNCTUATION: [char; 11] = ['`', '"', '\'', ',', ';', '(', ')', '!', '?', '*', ':'];
    let mut seen = HashSet::new();
    text.split_whitespace()
        .map(|word| {
            let word = word.trim_start_matches(PUNCTUATION);
            let path = word.split_once(':').map_or(word, |(path, _)| path);
            let path = path.trim_end_matches(|c| c == '.' || PUNCTUATION.contains(&c));
            path.strip_prefix("./").unwrap_or(path)
        })
        .filter(move |path| is_path(path) && seen.insert(*path))
}

/// The first two paths of source files in a text.
fn mentioned_paths(text: &str) -> Vec<String> {
    let is_source_file = |word: &&str| {
        // `e.g` and `Node.js` are words; a name with a language's extension, or with a folder, is a file.
        let has_known_extension = word.rsplit_once('.').is_some_and(|(stem, e)| {
            stem.len() > 1 && (Language::of_path(word).is_some() || extension(e) == Some(e) || word.contains('/'))
        });
        has_known_extension && !word.eq_ignore_ascii_case("node.js")
    };
    possible_paths(text).filter(is_source_file).take(2).map(str::to_owned).collect()
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
            ("Fix the bug in (`./src/parse.rs`:12).", "", "src/parse.rs"),
            ("Write a Python function fibonacci(n) that returns the n-th number", "python", "fibonacci.py"),
            ("Write a function `is_even` that tells", "javascript", "is_even.js"),
            ("Write a function called clamp.", "go", "clamp.go"),
            ("Add a class `LruCache`", "python", "lru_cache.py"),
            ("Write a function that adds two numbers", "python", "solution.py"),
            ("In Python, write def add(a, b)", "", "add.py"),
            ("Say hello, e.g. in Node.js", "", "solution.txt"),
            ("Move a.py to b.py", "python", "solution.py"),
        ] {
            assert_eq!(target_file(&spec(description, language), &[], &[]).path, path, "{description}");
        }
    }

    #[test]
    fn target_is_the_only_existing_file_if_the_description_names_no_source_file() {
        let named = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
        for (description, language, files, path) in [
            ("Add a target to the Makefile", "", &["Makefile"][..], "Makefile"),
            ("Write app.py like the Makefile", "", &["Makefile"], "app.py"),
            ("Write a function called clamp, see conf.ini", "", &["conf.ini"], "clamp.txt"),
            ("Do what conf.ini asks for", "python", &["conf.ini"], "solution.py"),
            ("Move it from README to Makefile", "", &["README", "Makefile"], "solution.txt"),
        ] {
            assert_eq!(target_file(&spec(description, language), &[], &named(files)).path, path, "{description}");
        }
    }

    #[test]
    fn target_of_a_revision_is_the_previous_file() {
        assert_eq!(target_file(&spec("Write add(a, b)", "python"), &["x/y.py".into()], &[]).path, "x/y.py");
    }
}
