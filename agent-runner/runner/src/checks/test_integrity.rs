//! Finds changes that influence the test runner instead of the tested code (L8, W5): a module that is imported instead of
//! one of the test runner, code that depends on being tested, code that knows the report.
//!
//! This is a tripwire, as the check for dangerous additions: it names common forms, and code that hides what it does is not
//! found. Only additions are reported, and only in projects that declare checks.

use std::collections::BTreeMap;

use super::checks_file::ProjectCheck;
use super::language::Language;

/// Python modules that the interpreter or a test runner imports.
const RUNNER_MODULES: [&str; 9] =
    ["pytest", "_pytest", "pluggy", "unittest", "doctest", "sitecustomize", "usercustomize", "coverage", "xdist"];
/// Names and texts that only tests and test runners use, for each family of languages.
const OF_PYTHON: [&str; 6] = ["pytest", "_pytest", "unittest", "pluggy", "PYTEST_CURRENT_TEST", "PYTEST_VERSION"];
const OF_JAVASCRIPT: [&str; 9] = [
    "vitest",
    "@jest/globals",
    "mocha",
    "node:test",
    "VITEST",
    "VITEST_WORKER_ID",
    "VITEST_POOL_ID",
    "JEST_WORKER_ID",
    "MOCHA_COLORS",
];
const OF_GO: [&str; 1] = ["testing"];
/// Words of a path with which a file belongs to the tests.
const TEST_WORDS: [&str; 9] =
    ["test", "tests", "testing", "testutil", "testutils", "testdata", "spec", "specs", "conftest"];
/// Python files that name the test runner although they are not part of the tests.
const TOOL_FILES: [&str; 4] = ["setup.py", "noxfile.py", "tasks.py", "fabfile.py"];

/// An influence on the test runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Influence {
    /// Line, from 1; 0 for the file.
    pub line: u32,
    pub message: String,
}

/// The influences that a file of a change has. `before` is the file's text in the base commit, and `is_in_base` tells whether
/// a path exists there.
pub(super) fn influences(
    path: &str,
    before: Option<&str>,
    after: &str,
    checks: &[ProjectCheck],
    is_in_base: impl Fn(&str) -> bool,
) -> Vec<Influence> {
    if checks.is_empty() {
        return Vec::new();
    }
    let mut found = Vec::new();
    if before.is_none()
        && let Some(module) = hidden_module(path, is_in_base)
    {
        let message = format!("is imported instead of the module `{module}`, which runs the tests: rename it");
        found.push(Influence { line: 0, message });
    }
    if is_prose(path) {
        return found;
    }
    for name in checks.iter().filter_map(|check| report_name(check.report.as_deref()?)) {
        if let Some(line) = added_line(before.unwrap_or_default(), after, |line| line.contains(name)) {
            let message = format!("names the report of a check (`{name}`), which only the test runner writes");
            found.push(Influence { line, message });
        }
    }
    if !is_test(path) {
        found.extend(added_references(path, before.unwrap_or_default(), after));
    }
    found
}

/// The module of a test runner that a new file hides.
fn hidden_module(path: &str, is_in_base: impl Fn(&str) -> bool) -> Option<&'static str> {
    let stem = path.strip_suffix(".py").or_else(|| path.strip_suffix(".pth").map(|_| path))?;
    let mut folder = String::new();
    for component in stem.split('/') {
        let module = RUNNER_MODULES.into_iter().find(|module| *module == component);
        folder = if folder.is_empty() { component.to_owned() } else { format!("{folder}/{component}") };
        // A project that has such a package in the base commit may extend it.
        if module.is_some() && !is_in_base(&format!("{folder}/__init__.py")) {
            return module;
        }
    }
    None
}

/// Name of a report's file or folder.
fn report_name(report: &str) -> Option<&str> {
    report.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty())
}

/// Number of the first line that matches and that the old text does not have.
fn added_line(before: &str, after: &str, matches: impl Fn(&str) -> bool) -> Option<u32> {
    let is_old = |line: &str| before.lines().any(|old| old.trim() == line.trim());
    let row = after.lines().position(|line| matches(line) && !is_old(line))?;
    u32::try_from(row + 1).ok()
}

/// References to a test runner that the old text does not have.
fn added_references(path: &str, before: &str, after: &str) -> Vec<Influence> {
    let Some((language, names)) = names_of(path) else { return Vec::new() };
    let (old, new) = (references(language, names, before), references(language, names, after));
    let added = new.into_iter().filter(|(name, lines)| lines.len() > old.get(name).map_or(0, Vec::len));
    let influence = |(name, lines): (&str, Vec<u32>)| Influence {
        line: lines.first().copied().unwrap_or_default(),
        message: format!(
            "refers to the test runner (`{name}`) outside of the tests: code must not depend on being tested"
        ),
    };
    added.map(influence).collect()
}

/// The language of a file, and the names that only its tests use.
fn names_of(path: &str) -> Option<(Language, &'static [&'static str])> {
    let language = Language::of_path(path)?;
    let names: &[&str] = match language {
        Language::Python if TOOL_FILES.iter().any(|file| path.rsplit('/').next() == Some(file)) => return None,
        Language::Python => &OF_PYTHON,
        Language::JavaScript | Language::TypeScript | Language::Tsx => &OF_JAVASCRIPT,
        Language::Go => &OF_GO,
        // Tests are part of the file.
        Language::Rust => return None,
    };
    Some((language, names))
}

/// Lines in which identifiers and whole strings have one of the names. Comments and longer strings do not count.
fn references(language: Language, names: &'static [&'static str], text: &str) -> BTreeMap<&'static str, Vec<u32>> {
    let mut found: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    // A file that exceeds a limit is reported as such.
    let Ok(tree) = language.parse(text) else { return found };
    let mut cursor = tree.walk();
    loop {
        let node = cursor.node();
        let is_name = node.kind().contains("identifier")
            || matches!(node.kind(), "string_content" | "string_fragment" | "interpreted_string_literal_content");
        if is_name
            && let Some(name) = text.get(node.byte_range()).and_then(|text| names.iter().find(|name| **name == text))
        {
            let line = u32::try_from(node.start_position().row + 1).unwrap_or(u32::MAX);
            found.entry(name).or_default().push(line);
        }
        if cursor.goto_first_child() {
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                return found;
            }
        }
    }
}

/// Whether a file belongs to the tests, by the words of its path.
fn is_test(path: &str) -> bool {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut previous_is_lower = false;
    for character in path.chars() {
        if !character.is_alphanumeric() || (character.is_uppercase() && previous_is_lower) {
            words.push(std::mem::take(&mut word));
        }
        if character.is_alphanumeric() {
            word.extend(character.to_lowercase());
        }
        previous_is_lower = character.is_lowercase();
    }
    words.push(word);
    words.iter().any(|word| TEST_WORDS.contains(&word.as_str()))
}

fn is_prose(path: &str) -> bool {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    matches!(extension.to_ascii_lowercase().as_str(), "md" | "rst" | "txt" | "adoc")
}

#[cfg(test)]
mod tests {
    use super::super::project_checks;
    use super::*;

    fn found(path: &str, before: Option<&str>, after: &str) -> Vec<String> {
        let text = "[[check]]\nname = \"tests\"\nrun = [\"x\"]\nreport = \"out/junit-report.xml\"\n";
        let checks = project_checks(Some(text)).unwrap().checks;
        assert_eq!(influences(path, before, after, &[], |_| false), [], "no checks, no findings");
        let base = ["lib/_pytest/__init__.py"];
        let found = influences(path, before, after, &checks, |path| base.contains(&path));
        found.into_iter().map(|influence| format!("{}: {}", influence.line, influence.message)).collect()
    }

    #[test]
    fn influences_are_named_and_their_harmless_twins_are_not() {
        for (path, after, expected, twin) in [
            ("pytest.py", "", "instead of the module `pytest`", ("pytest_notes.py", "")),
            ("src/_pytest/runner.py", "", "module `_pytest`", ("lib/_pytest/runner.py", "")),
            ("unittest/__init__.py", "", "module `unittest`", ("units/__init__.py", "")),
            ("sitecustomize.py", "", "module `sitecustomize`", ("site_settings.py", "")),
            (
                "a.py",
                "import _pytest.runner\n",
                "1: refers to the test runner (`_pytest`)",
                ("tests/a.py", "import pytest\n"),
            ),
            ("a.py", "x = 1\nimport pytest as p\n", "2: refers", ("a.py", "x = 1  # run pytest\n")),
            (
                "a.py",
                "import os\nif 'PYTEST_CURRENT_TEST' in os.environ:\n    pass\n",
                "2: refers to the test runner (`PYTEST_CURRENT_TEST`)",
                ("a.py", "\"\"\"Run the tests with pytest.\"\"\"\n"),
            ),
            ("a.py", "__import__('sys').modules['pytest']\n", "1: refers", ("conftest.py", "import pytest\n")),
            ("a.ts", "if (process.env.VITEST) {}\n", "(`VITEST`)", ("a.test.ts", "import { test } from 'vitest'\n")),
            (
                "a.js",
                "import { vi } from 'vitest'\n",
                "(`vitest`)",
                ("a.js", "import { vi } from './vitest-like.js'\n"),
            ),
            (
                "a.go",
                "package a\nimport \"testing\"\n",
                "(`testing`)",
                ("a_test.go", "package a\nimport \"testing\"\n"),
            ),
            (
                "a.py",
                "open('out/junit-report.xml', 'w')\n",
                "names the report of a check (`junit-report.xml`)",
                ("a.md", "The report is junit-report.xml.\n"),
            ),
            ("Makefile", "test:\n\tcp x junit-report.xml\n", "2: names the report", ("Makefile", "test:\n\techo\n")),
            ("src/ATestRunner.py", "open('junit-report.xml')\n", "names the report", ("setup.py", "t = ['pytest']\n")),
        ] {
            let influences = found(path, None, after);
            assert!(influences.iter().any(|influence| influence.contains(expected)), "{path}: {influences:?}");
            assert_eq!(found(twin.0, None, twin.1), Vec::<String>::new(), "{twin:?}");
        }
    }

    #[test]
    fn what_the_base_has_is_not_reported() {
        let before = "import pytest\nprint('junit-report.xml')\n";
        assert_eq!(found("a.py", Some(before), &format!("{before}x = 1\n")), Vec::<String>::new());
        assert_eq!(found("pytest.py", Some(""), "x = 1\n"), Vec::<String>::new());
        assert_eq!(found("a.py", Some(before), &format!("{before}pytest.skip()\n")).len(), 1);
    }

    #[test]
    fn files_of_tests_are_found_by_the_words_of_their_path() {
        for (path, expected) in [
            ("tests/a.py", true),
            ("src/test_a.py", true),
            ("a_test.go", true),
            ("a.spec.ts", true),
            ("src/UserTest.java", true),
            ("pkg/testutil/x.go", true),
            ("contest/a.py", false),
            ("latest.py", false),
            ("src/inspect.py", false),
        ] {
            assert_eq!(is_test(path), expected, "{path}");
        }
    }
}
