//! The map of the repository in a prompt: files and their definitions, the most important ones for the task. With it, an
//! agent uses what exists, although it sees the contents of a few files only.

use std::path::PathBuf;
use std::time::Duration;

use cfq_proto::task::TaskSpec;
use cfq_repo_map::{MapRequest, RepoMap};

use crate::edits::possible_paths;
use crate::workstream::{RepoMapRequest, StartPointRequest};

/// Maximum length of a map, in estimated tokens.
const MAX_TOKENS: usize = 1024;
/// Maximum number of names in a description that put something in focus.
const MAX_HINTS: usize = 32;
/// Minimum length of such a name, in bytes.
const MIN_NAME_BYTES: usize = 3;

/// The map that a prompt may show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepositoryMap {
    /// The map.
    pub text: String,
    /// Number of files of the repository.
    pub files: usize,
}

impl From<RepoMap> for RepositoryMap {
    fn from(map: RepoMap) -> Self {
        Self { text: map.text, files: map.files }
    }
}

/// Returns the request for the map that the prompts of a task show, of the commit `base` in the repository at `dir`. See
/// [`RepoMapRequest`] for the folder `cache_dir` and the time `parse_within`.
pub fn map_request(
    spec: &TaskSpec,
    (dir, base): (PathBuf, &str),
    cache_dir: PathBuf,
    parse_within: Duration,
) -> RepoMapRequest {
    let start = StartPointRequest { dir, base: Some(base.to_owned()), context_files: Vec::new() };
    let map = MapRequest {
        depth: None,
        include_tests: true,
        max_tokens: MAX_TOKENS,
        part: 1,
        focus: Vec::new(),
        hints: spec.context_files.iter().cloned().chain(names(&spec.description)).collect(),
    };
    RepoMapRequest { start, map, cache_dir, parse_within_ms: parse_within.as_millis().try_into().unwrap_or(u64::MAX) }
}

/// Paths and identifiers in a text. Plain words are none of them, although a definition may have their name.
fn names(text: &str) -> Vec<String> {
    let paths = possible_paths(text).filter(|path| path.contains(['/', '.']));
    let mut names: Vec<String> = Vec::new();
    for name in paths.chain(text.split_whitespace().flat_map(identifiers)) {
        if names.len() == MAX_HINTS {
            break;
        }
        if name.len() >= MIN_NAME_BYTES && !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// The identifiers in a word: all its parts if it is marked as code, else those that no plain word looks like.
fn identifiers(word: &str) -> impl Iterator<Item = &str> {
    let is_code = word.contains('`') || word.contains("::") || word.contains('(');
    let parts = word.split(|c: char| !c.is_alphanumeric() && c != '_');
    parts.filter(move |part| {
        let has_capital_inside = part.chars().skip(1).any(char::is_uppercase) && part.contains(char::is_lowercase);
        is_code || part.contains('_') || has_capital_inside
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_identifiers_of_a_description_are_in_focus() {
        for (text, expected) in [
            ("Fix the bug in src/parse.rs and make it fast.", "src/parse.rs"),
            ("Add `sum` to the Stack, see parse_row() and RepoMap::of", "sum parse_row RepoMap"),
            ("Use HTTP, JSON and iPhone names.", "iPhone"),
            ("Call `a` with `parse_row` and parse_row", "parse_row"),
        ] {
            assert_eq!(names(text).join(" "), expected, "{text}");
        }
        let many: String = (0..100).map(|n| format!("name_{n} ")).collect();
        assert_eq!(names(&many).len(), MAX_HINTS);
    }
}
