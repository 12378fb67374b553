//! Labels of code blocks: the file path that a reply gives for a block, in the forms that models use.

use crate::sections::FencedBlock;

/// Well-known file names without an extension.
const FILES_WITHOUT_EXTENSION: [&str; 12] = [
    "Makefile",
    "Dockerfile",
    "Containerfile",
    "Justfile",
    "justfile",
    "LICENSE",
    "README",
    "CHANGELOG",
    "Procfile",
    "Gemfile",
    "Rakefile",
    "Jenkinsfile",
];

/// Names of languages and libraries that look like file names, in lower case.
const NOT_FILES: [&str; 12] = [
    "node.js",
    "vue.js",
    "next.js",
    "nuxt.js",
    "express.js",
    "react.js",
    "three.js",
    "d3.js",
    "socket.io",
    "os.path",
    "vb.net",
    "asp.net",
];

/// Words that say that a block shows how to use a file, or what it prints, in lower case.
const USAGE_WORDS: [&str; 24] = [
    "use",
    "uses",
    "used",
    "using",
    "usage",
    "run",
    "runs",
    "running",
    "call",
    "calls",
    "calling",
    "import",
    "imports",
    "importing",
    "output",
    "outputs",
    "print",
    "prints",
    "printed",
    "example",
    "execute",
    "executing",
    "invoke",
    "result",
];

/// Returns the path that labels a block, and whether the block's first line is the label.
pub(crate) fn block_label(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    if let Some(path) = path_in_info(block.info) {
        return Some((path, false));
    }
    let is_code = !block.info.is_empty() && !is_auxiliary(block.info);
    if let Some(path) = block.line_above.and_then(|line| path_above_a_file(line, is_code)) {
        return Some((path, false));
    }
    block.lines.first().and_then(|line| path_in_comment(line)).map(|path| (path, true))
}

/// First word of an info string, in lower case.
pub(crate) fn language(info: &str) -> String {
    let end = |c: char| c.is_whitespace() || matches!(c, ':' | '{' | ',');
    info.split(end).next().unwrap_or_default().to_ascii_lowercase()
}

/// True for the info strings of blocks that are usually not files: commands, their output and diffs.
pub(crate) fn is_auxiliary(info: &str) -> bool {
    matches!(
        language(info).as_str(),
        "sh" | "bash"
            | "shell"
            | "zsh"
            | "console"
            | "terminal"
            | "text"
            | "txt"
            | "plaintext"
            | "output"
            | "diff"
            | "patch"
            | "udiff"
    )
}

/// Path in the line above the content of a file. `is_code` if the block names a language. In a sentence, the path must be
/// quoted; it is no label if the sentence seems to be about the use of the file.
fn path_above_a_file(line: &str, is_code: bool) -> Option<String> {
    let Some(path) = path_in_line(line) else { return path_without_extension(line).map(str::to_owned) };
    let Some((before, after)) = line.split_once(&format!("`{path}`")) else { return Some(path) };
    let is_word = |c: char| c.is_alphanumeric();
    let mut words = before.split_whitespace().chain(after.split_whitespace()).filter(|word| word.contains(is_word));
    let is_usage = words.any(|word| {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric()).to_ascii_lowercase();
        USAGE_WORDS.contains(&word.as_str())
    });
    let is_last = !after.contains(is_word) || after.trim_start_matches(['*', ' ', ':']).starts_with('(');
    let is_label = match (is_last, is_code) {
        (true, true) => true,
        (true, false) | (false, true) => !is_usage,
        (false, false) => false,
    };
    is_label.then_some(path)
}

/// A path with a folder and without an extension that is alone in a line, such as `bin/run`.
fn path_without_extension(line: &str) -> Option<&str> {
    let text = line.trim().trim_end_matches(':').trim_matches('`');
    let is_path_char = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let is_path = text.contains('/') && !text.ends_with('/') && text.chars().all(is_path_char);
    is_path.then_some(text)
}

/// What the line above a search/replace block says about its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HunkLabel {
    Path(String),
    /// It names no file.
    None,
    /// It names several files.
    Unclear,
}

/// Reads the line above a search/replace block, which is certainly an edit: a path may be anywhere in the line.
pub(crate) fn hunk_label(line: &str) -> HunkLabel {
    if let Some(path) = path_in_line(line).or_else(|| path_in_comment(line)) {
        return HunkLabel::Path(path);
    }
    let punctuation = |c: char| !(c.is_alphanumeric() || "_./-@[]~\\+".contains(c));
    let mut paths: Vec<&str> = Vec::new();
    let words: Vec<&str> = line.split_whitespace().collect();
    for word in &words {
        let word = word.trim_matches(punctuation).trim_end_matches('.');
        // `e.g` is no file, and a name without an extension is one only if it has a folder and stands alone.
        let has_extension = word.rsplit_once('.').is_some_and(|(stem, end)| !stem.is_empty() && end.len() > 1);
        let is_alone = words.len() == 1 && word.contains('/') && !word.ends_with('/');
        if (is_path(word) && (has_extension || word.contains('/')) || is_alone) && !paths.contains(&word) {
            paths.push(word);
        }
    }
    match paths.as_slice() {
        [] => HunkLabel::None,
        [one] => HunkLabel::Path((*one).to_owned()),
        [_, _, ..] => HunkLabel::Unclear,
    }
}

/// Path in an info string: `python src/a.py`, `python:src/a.py`, `py title="src/a.py"`, `src/a.py`.
fn path_in_info(info: &str) -> Option<String> {
    info.split_whitespace().find_map(|token| {
        let token = token.trim_matches(['{', '}', ',']);
        let value = ["title=", "file=", "filename=", "path=", "name="].iter().find_map(|key| token.strip_prefix(key));
        let token = value.unwrap_or_else(|| token.split_once(':').map_or(token, |(_, path)| path));
        let token = token.trim_matches(['"', '\'']);
        is_path(token).then(|| token.to_owned())
    })
}

/// Path in a line of prose: `### src/a.py`, `**src/a.py**:`, `File: src/a.py`, ``Create `src/a.py`:``.
pub(crate) fn path_in_line(line: &str) -> Option<String> {
    let mut quoted = line.split('`').skip(1).step_by(2).filter(|part| is_path(part));
    if let Some(path) = quoted.next() {
        return quoted.all(|other| other == path).then(|| path.to_owned());
    }
    let text = line.trim().trim_start_matches(['#', '*', '-', '>', ' ']);
    let text = without_list_number(text);
    let text = without_key(without_emphasis(text)).trim_matches(['*', ' ', ':', '"', '\'']);
    is_path(text).then(|| text.to_owned())
}

/// Removes the number of a list item: `1. a.py`, `2) a.py`.
fn without_list_number(text: &str) -> &str {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_item = rest.len() < text.len() && (rest.starts_with(". ") || rest.starts_with(") "));
    if is_item { rest[2..].trim_start() } else { text }
}

/// Path in a comment: `# src/a.py`, `// file: src/a.py`, `<!-- a.html -->`, `/* a.css */`.
pub(crate) fn path_in_comment(line: &str) -> Option<String> {
    let line = line.trim();
    let text = ["#", "//", "--", "/*", "<!--", ";"].iter().find_map(|mark| line.strip_prefix(mark))?;
    let text = text.trim_end_matches("*/").trim_end_matches("-->");
    let text = without_key(text.trim());
    is_path(text).then(|| text.to_owned())
}

/// Removes Markdown's emphasis. An underscore that is only at the start belongs to a name, such as `__init__.py`.
fn without_emphasis(text: &str) -> &str {
    let outer = ['*', ' ', ':'];
    let mut text = text.trim_matches(outer);
    while let Some(inner) = text.strip_prefix('_').and_then(|rest| rest.strip_suffix('_')) {
        text = inner.trim_matches(outer);
    }
    text
}

/// Removes a key such as `File:` or `path:`.
fn without_key(text: &str) -> &str {
    let Some((key, rest)) = text.split_once(':') else { return text };
    let known = ["file", "filename", "file name", "path", "file path", "filepath"];
    let key = key.trim_matches(['*', '_', ' ']);
    if known.iter().any(|k| key.eq_ignore_ascii_case(k)) {
        // The end of the key's emphasis: `_File:_ a.py`.
        let end = rest.find(|c| c != '*' && c != '_').unwrap_or_default();
        let rest = if rest[end..].starts_with(' ') { &rest[end..] } else { rest };
        without_emphasis(rest)
    } else {
        text
    }
}

/// True if a word can only mean a file: it has an extension or is a well-known name. Paths that lead outside the
/// repository match too, so that they are refused instead of ignored.
pub fn is_path(text: &str) -> bool {
    let is_candidate = !text.is_empty()
        && text.len() <= 1024
        && !text.contains("://")
        && !NOT_FILES.contains(&text.to_ascii_lowercase().as_str())
        && text.chars().all(|c| c.is_alphanumeric() || "_./-+@[]()~\\:".contains(c));
    if !is_candidate {
        return false;
    }
    let name = text.rsplit(['/', '\\']).next().unwrap_or(text);
    if FILES_WITHOUT_EXTENSION.contains(&name) {
        return true;
    }
    match name.rsplit_once('.') {
        // `.gitignore`
        Some(("", rest)) => rest.len() > 1 && rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'),
        Some((stem, extension)) => {
            stem.chars().any(char::is_alphanumeric)
                && (1..=10).contains(&extension.len())
                && extension.starts_with(|c: char| c.is_ascii_alphabetic())
                && extension.chars().all(|c| c.is_ascii_alphanumeric())
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_in_the_forms_models_use_are_found() {
        for info in
            ["python src/a.py", "python:src/a.py", "py title=\"src/a.py\"", "src/a.py", "python {file=src/a.py}"]
        {
            assert_eq!(path_in_info(info).as_deref(), Some("src/a.py"), "{info}");
        }
        for line in [
            "### src/a.py",
            "**src/a.py**:",
            "File: src/a.py",
            "**File:** src/a.py",
            "1. `src/a.py`",
            "2) src/a.py",
            "Create the file `src/a.py`:",
            "src/a.py:",
            "#### File: `src/a.py`",
        ] {
            assert_eq!(path_in_line(line).as_deref(), Some("src/a.py"), "{line}");
        }
        for line in ["# src/a.py", "// file: src/a.py", "/* src/a.py */"] {
            assert_eq!(path_in_comment(line).as_deref(), Some("src/a.py"), "{line}");
        }
        for line in [
            "__init__.py",
            "### __init__.py",
            "**__init__.py**",
            "File: __init__.py",
            "**File:** __init__.py",
            "_File:_ __init__.py",
            "___init__.py_:",
            "`__init__.py`",
        ] {
            assert_eq!(path_in_line(line).as_deref(), Some("__init__.py"), "{line}");
        }
        assert_eq!(path_in_line("_src/a.py_").as_deref(), Some("src/a.py"));
        assert_eq!(path_in_line("__src/a.py__:").as_deref(), Some("src/a.py"));
        assert_eq!(path_in_line("### .gitignore").as_deref(), Some(".gitignore"));
        assert_eq!(path_in_line("2fa.py").as_deref(), Some("2fa.py"));
        assert_eq!(path_in_line("Makefile:").as_deref(), Some("Makefile"));
        assert_eq!(path_in_line("### ../../evil.py").as_deref(), Some("../../evil.py"));
    }

    #[test]
    fn sentence_about_the_use_of_a_file_is_no_label() {
        let above = |line: &str, is_code| path_above_a_file(line, is_code).is_some();
        for (line, code, output) in [
            ("src/a.py", true, true),
            ("bin/run", true, true),
            ("`bin/run`:", true, true),
            ("### Input/Output", false, false),
            ("Create the file `src/a.py`:", true, true),
            ("The updated `src/a.py` file:", true, false),
            ("**`src/a.py`** (updated)", true, true),
            ("You can use `src/a.py` like this:", false, false),
            ("Running `src/a.py` prints:", false, false),
            ("The output of `src/a.py`:", true, false),
        ] {
            assert_eq!((above(line, true), above(line, false)), (code, output), "{line}");
        }
    }

    #[test]
    fn file_of_a_hunk_may_be_anywhere_in_the_line() {
        let path = |path: &str| HunkLabel::Path(path.into());
        for (line, label) in [
            ("**b.txt** (updated)", path("b.txt")),
            ("# In b.py:", path("b.py")),
            ("// b.ts", path("b.ts")),
            ("bin/run", path("bin/run")),
            ("`bin/run`:", path("bin/run")),
            ("In `b.txt` and `c.txt`:", HunkLabel::Unclear),
            ("Change a.py, then b.py:", HunkLabel::Unclear),
            ("And then, e.g. in Node.js:", HunkLabel::None),
            ("", HunkLabel::None),
        ] {
            assert_eq!(hunk_label(line), label, "{line}");
        }
    }

    #[test]
    fn prose_is_not_a_label() {
        for line in [
            "Here is the code:",
            "Python 3.11:",
            "See https://x.org/a.py",
            "e.g. this",
            "and/or",
            "`f(x)` and `g(y)`",
            "`a.py` or `b.py`",
            "### Node.js",
            "os.path",
        ] {
            assert_eq!(path_in_line(line), None, "{line}");
        }
        assert_eq!(path_in_info("python"), None);
        assert_eq!(path_in_comment("#!/usr/bin/env python3"), None);
        assert_eq!(path_in_comment("x = 1"), None);
    }
}
