//! The map of the repository in a prompt: files and their definitions, the most important ones for the task. It tells an
//! agent which definitions it can use, without the contents of their files.

use std::path::PathBuf;
use std::time::Duration;

use cfq_proto::task::TaskSpec;
use cfq_repo_map::MapRequest;

use crate::edits::possible_paths;
use crate::workstream::{RepoMapRequest, StartPointRequest};

/// Maximum length of a map, in estimated tokens.
const MAX_TOKENS: usize = 1024;
/// Maximum time in which files are parsed for a map. What is parsed is kept for the next task.
pub const MAX_MAP_TIME: Duration = Duration::from_secs(15);
/// Maximum number of paths, and of identifiers, that are looked for in a map because the description mentions them.
const MAX_MENTIONED_NAMES: usize = 32;
/// Minimum length of a string literal that a prompt does not show, in characters.
const MIN_LITERAL_CHARS: usize = 8;
/// Minimum length of such an identifier, in bytes.
const MIN_IDENTIFIER_BYTES: usize = 3;

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
        mentioned_names: spec.context_files.iter().cloned().chain(mentioned_names(&spec.description)).collect(),
    };
    RepoMapRequest { start, map, cache_dir, parse_within_ms: parse_within.as_millis().try_into().unwrap_or(u64::MAX) }
}

/// Paths and identifiers in a text. Ignores plain words, even if a definition has that name.
fn mentioned_names(text: &str) -> Vec<String> {
    let paths = possible_paths(text).filter(|path| path.contains(['/', '.'])).take(MAX_MENTIONED_NAMES);
    let mut names: Vec<String> = paths.map(str::to_owned).collect();
    let max = names.len() + MAX_MENTIONED_NAMES;
    // Every second part is between backquotes.
    let words = text
        .split('`')
        .enumerate()
        .flat_map(|(part, text)| text.split_whitespace().map(move |word| (word, !part.is_multiple_of(2))));
    for name in words.flat_map(|(word, is_quoted)| identifiers(word, is_quoted)) {
        if names.len() == max {
            break;
        }
        if name.len() >= MIN_IDENTIFIER_BYTES && !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// The identifiers in a word: all its parts if it is code, such as `Stack.push` or `push()`, else those that no plain word
/// looks like.
fn identifiers(word: &str, is_quoted: bool) -> impl Iterator<Item = &str> {
    let is_identifier_char = |c: char| c.is_alphanumeric() || c == '_';
    let is_call =
        !word.contains("(s)") && word.split_once('(').is_some_and(|(name, _)| name.ends_with(is_identifier_char));
    let is_member = word.starts_with(char::is_uppercase)
        && word.split_once('.').is_some_and(|(_, member)| member.starts_with(is_identifier_char));
    let is_code = is_quoted || is_call || is_member || word.contains("::");
    word.split(move |c| !is_identifier_char(c)).filter(move |part| {
        let has_capital_inside = part.chars().skip(1).any(char::is_uppercase) && part.contains(char::is_lowercase);
        is_code || part.contains('_') || has_capital_inside
    })
}

/// Returns the map with `"..."` instead of each string literal of at least [`MIN_LITERAL_CHARS`]: the value of a constant
/// can be a secret, and no agent needs it to use the constant.
pub(super) fn without_long_literals(map: &str) -> String {
    let mut text = String::with_capacity(map.len());
    for line in map.split_inclusive('\n') {
        let mut rest = line;
        while let Some(start) = rest.find(['"', '\'']) {
            let quote = &rest[start..=start];
            let (before, after) = (&rest[..start], &rest[start + 1..]);
            let literal = after.split_once(quote).map(|(literal, _)| literal);
            match literal.filter(|literal| quote == "\"" || literal.chars().all(is_token_char)) {
                Some(literal) if literal.chars().count() >= MIN_LITERAL_CHARS => {
                    text.push_str(&format!("{before}{quote}...{quote}"));
                    rest = &after[literal.len() + 1..];
                }
                Some(literal) => {
                    text.push_str(&rest[..start + literal.len() + 2]);
                    rest = &after[literal.len() + 1..];
                }
                // An apostrophe, a lifetime of Rust, or a literal that is cut off.
                None => {
                    text.push_str(&rest[..=start]);
                    rest = after;
                }
            }
        }
        text.push_str(rest);
    }
    text
}

/// Whether keys and passwords may contain the character.
fn is_token_char(c: char) -> bool {
    !c.is_whitespace() && !matches!(c, '<' | '>' | '(' | ')' | ',' | '&')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_literals_are_left_out() {
        for (line, expected) in [
            ("  3: API_KEY = \"sk-1234567890\" # \"x\"\n", "  3: API_KEY = \"...\" # \"x\"\n"),
            ("  3: PASSWORD = 'hunter2hunter2'\n", "  3: PASSWORD = '...'\n"),
            ("  4: def f(mode=\"fast\", name='a'):\n", "  4: def f(mode=\"fast\", name='a'):\n"),
            (
                "  5: fn f<'a, 'longer>(x: &'a str) -> &'longer str\n",
                "  5: fn f<'a, 'longer>(x: &'a str) -> &'longer str\n",
            ),
            ("it's.py\n  1: X = \"cut off\n", "it's.py\n  1: X = \"cut off\n"),
        ] {
            assert_eq!(without_long_literals(line), expected);
        }
    }

    #[test]
    fn paths_and_identifiers_of_the_description_are_mentioned_names() {
        for (text, expected) in [
            ("Fix the bug in src/parse.rs and make it fast.", "src/parse.rs"),
            ("Add `sum` to the Stack, see parse_row() and RepoMap::of", "sum parse_row RepoMap"),
            ("Use HTTP, JSON and iPhone names.", "iPhone"),
            ("Call `a` with `parse_row` and parse_row", "parse_row"),
            ("Write `impl Display for Stack`", "impl Display for Stack"),
            ("Stack.push fails. See Stack.", "Stack.push Stack push"),
            ("Fix it (see the docs), also the new file(s) (default: none)", ""),
        ] {
            assert_eq!(mentioned_names(text).join(" "), expected, "{text}");
        }
        let paths: String = (0..100).map(|n| format!("self.x{n} ")).collect();
        let names: String = (0..100).map(|n| format!("name_{n} ")).collect();
        let mentioned = mentioned_names(&format!("{paths} {names}"));
        assert_eq!(mentioned.len(), 2 * MAX_MENTIONED_NAMES);
        assert_eq!(mentioned.last().unwrap(), "name_31");
        let spec = serde_json::json!({ "description": "Fix `a_b`", "repo": "/r", "context_files": ["c.py"] });
        let spec = serde_json::from_value(spec).unwrap();
        let request = map_request(&spec, ("/r".into(), "main"), "/c".into(), Duration::from_millis(7));
        assert_eq!(request.map.mentioned_names, ["c.py", "a_b"]);
    }
}
