//! Finds changes that influence the test runner instead of the tested code (L8, W5): a module that is imported instead
//! of one of the test runner, code that depends on being tested, code that names the report.
//!
//! This is a tripwire, as the check for dangerous additions: it names common forms, and code that hides what it does is
//! not found. Only additions are reported, and only in projects that declare checks.

use super::checks_file::ProjectCheck;
use super::language::Language;

/// Python modules that the interpreter or a test runner imports.
const RUNNER_MODULES: [&str; 8] =
    ["pytest", "_pytest", "pluggy", "unittest", "doctest", "sitecustomize", "usercustomize", "coverage"];
/// Identifiers of Python's test runners.
const OF_PYTHON: [&str; 4] = ["pytest", "_pytest", "unittest", "pluggy"];
/// Start of the variables that pytest sets.
const PYTEST_VARIABLES: &str = "PYTEST_";
/// Modules of JavaScript's test runners, and the variables that they set.
const OF_JAVASCRIPT: [&str; 7] =
    ["vitest", "@jest/globals", "node:test", "VITEST", "VITEST_WORKER_ID", "VITEST_POOL_ID", "JEST_WORKER_ID"];
/// Words of a path with which a file belongs to the tests, or to the tools of a project.
const TEST_WORDS: [&str; 24] = [
    "test",
    "tests",
    "testing",
    "testutil",
    "testutils",
    "testdata",
    "unittest",
    "unittests",
    "spec",
    "specs",
    "conftest",
    "bench",
    "benches",
    "benchmark",
    "benchmarks",
    "mocks",
    "fixtures",
    "e2e",
    "docs",
    "conf",
    "config",
    "setup",
    "ci",
    "tools",
];
/// Python files that name the test runner although they are not part of the tests.
const TOOL_FILES: [&str; 4] = ["noxfile.py", "tasks.py", "fabfile.py", "dodo.py"];
/// Files that are not code and whose commands a check may run.
const BUILD_FILES: [&str; 5] = ["Makefile", "GNUmakefile", "CMakeLists.txt", "package.json", "justfile"];
const SCRIPTS: [&str; 4] = ["sh", "bash", "mk", "cmake"];

/// An influence on the test runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Influence {
    /// Line, from 1; 0 for the file.
    pub line: u32,
    pub message: String,
}

/// The influences that a file of a change has. `before` is the file's text in the base commit, and `is_in_base` tells
/// whether a path exists there.
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
    if before.is_none() {
        let message = match hidden_module(path, is_in_base) {
            Some(module) => {
                Some(format!("is imported instead of the module `{module}`, which runs the tests: rename it"))
            }
            None if path.ends_with(".pth") => Some("is read at every start of Python: remove it".to_owned()),
            None => None,
        };
        found.extend(message.map(|message| Influence { line: 0, message }));
    }
    let before = before.unwrap_or_default();
    if is_executed(path) {
        let reports = checks.iter().flat_map(|check| check.report.iter().chain(&check.coverage));
        for name in reports.filter_map(|report| report_name(report)) {
            if let Some(line) = line_with(after, name).filter(|_| line_with(before, name).is_none()) {
                let message = format!("names the report of a check (`{name}`), which only the test runner writes");
                found.push(Influence { line, message });
            }
        }
    }
    if let Some((line, name)) = reference(path, after).filter(|_| reference(path, before).is_none()) {
        let message =
            format!("refers to the test runner (`{name}`) outside of the tests: code must not depend on being tested");
        found.push(Influence { line, message });
    }
    found
}

/// The module of a test runner that a new file hides: Python finds it first if its folder is not part of a package.
fn hidden_module(path: &str, is_in_base: impl Fn(&str) -> bool) -> Option<&'static str> {
    let stem = path.strip_suffix("/__init__.py").or_else(|| path.strip_suffix(".py"))?;
    let (folder, name) = stem.rsplit_once('/').map_or((None, stem), |(folder, name)| (Some(folder), name));
    let is_in_package = folder.is_some_and(|folder| is_in_base(&format!("{folder}/__init__.py")));
    RUNNER_MODULES.into_iter().find(|module| *module == name && !is_in_package)
}

/// How code names a report: a file by its name, a folder by its path.
fn report_name(report: &str) -> Option<&str> {
    let name = report.strip_suffix('/').or_else(|| report.rsplit('/').next());
    name.filter(|name| !name.is_empty())
}

/// Number of the first line that has a name, which is not a part of a longer one.
fn line_with(text: &str, name: &str) -> Option<u32> {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    let row = text.lines().position(|line| {
        line.match_indices(name).any(|(start, _)| {
            !line[..start].ends_with(is_part) && !line[start + name.len()..].starts_with(|c| is_part(c) && c != '.')
        })
    })?;
    u32::try_from(row + 1).ok()
}

/// Whether a file is code or has commands.
fn is_executed(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    Language::of_path(path).is_some() || BUILD_FILES.contains(&name) || SCRIPTS.contains(&extension)
}

/// First reference to a test runner in code that is not part of the tests: its line and the name.
fn reference(path: &str, text: &str) -> Option<(u32, String)> {
    let language = Language::of_path(path)?;
    let name = path.rsplit('/').next().unwrap_or(path);
    // Tests of Rust are part of the file.
    if language == Language::Rust || is_test(path, language) || TOOL_FILES.contains(&name) || name.starts_with('.') {
        return None;
    }
    // A file that exceeds a limit is reported as such.
    let tree = language.parse(text).ok()?;
    let mut cursor = tree.walk();
    loop {
        let node = cursor.node();
        let found = text.get(node.byte_range()).filter(|name| is_reference(language, node, name, text));
        if let Some(name) = found {
            let line = u32::try_from(node.start_position().row + 1).unwrap_or(u32::MAX);
            return Some((line, name.to_owned()));
        }
        if cursor.goto_first_child() {
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                return None;
            }
        }
    }
}

/// Whether a name or a whole string refers to a test runner. Comments and other strings do not.
fn is_reference(language: Language, node: tree_sitter::Node<'_>, name: &str, text: &str) -> bool {
    let is_string = matches!(node.kind(), "string_content" | "string_fragment" | "interpreted_string_literal_content");
    let is_identifier = node.kind().contains("identifier");
    match language {
        Language::Python if is_identifier => OF_PYTHON.contains(&name),
        Language::Python if is_string => {
            // The name alone may be a program that is started.
            let line = text.lines().nth(node.start_position().row).unwrap_or_default();
            let is_import = ["modules", "import_module", "__import__"].iter().any(|word| line.contains(word));
            let is_module = OF_PYTHON
                .iter()
                .any(|module| name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')));
            name.starts_with(PYTEST_VARIABLES) || is_import && is_module
        }
        Language::JavaScript | Language::TypeScript | Language::Tsx => {
            (is_string || is_identifier) && OF_JAVASCRIPT.contains(&name)
        }
        Language::Go => is_string && name == "testing" && is_go_import(node),
        Language::Python | Language::Rust => false,
    }
}

fn is_go_import(node: tree_sitter::Node<'_>) -> bool {
    let above = std::iter::successors(node.parent(), tree_sitter::Node::parent).take(2);
    above.into_iter().any(|node| node.kind() == "import_spec")
}

/// Whether a file belongs to the tests or to the tools of the project, by the words of its path.
pub fn is_test_path(path: &str) -> bool {
    // The language matters for packages of Go only.
    is_test(path, Language::of_path(path).unwrap_or(Language::Python))
}

fn is_test(path: &str, language: Language) -> bool {
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
    // Packages of Go with helpers for tests, such as `httptest`.
    let is_go_helper = |word: &&String| language == Language::Go && word.ends_with("test") && *word != "latest";
    words.iter().any(|word| TEST_WORDS.contains(&word.as_str())) || words.iter().any(|word| is_go_helper(&word))
}

#[cfg(test)]
mod tests {
    use super::super::project_checks;
    use super::*;

    fn found(path: &str, before: Option<&str>, after: &str) -> Vec<String> {
        let text = "[[check]]\nname = \"tests\"\nrun = [\"x\"]\nreport = \"out/junit-report.xml\"\n\
                    [[check]]\nname = \"gradle\"\nrun = [\"x\"]\nreport = \"build/test-results/test/\"\n";
        let checks = project_checks(Some(text)).unwrap().checks;
        assert_eq!(influences(path, before, after, &[], |_| false), [], "no checks, no findings");
        let base = ["lib/_pytest/__init__.py", "lib/__init__.py"];
        let found = influences(path, before, after, &checks, |path| base.contains(&path));
        found.into_iter().map(|influence| format!("{}: {}", influence.line, influence.message)).collect()
    }

    #[test]
    fn influences_are_named_and_their_harmless_twins_are_not() {
        for (path, after, expected, twin) in [
            ("pytest.py", "", "instead of the module `pytest`", ("pytest_notes.py", "")),
            ("src/_pytest/__init__.py", "", "module `_pytest`", ("lib/_pytest/runner.py", "")),
            ("unittest/__init__.py", "", "module `unittest`", ("units/__init__.py", "")),
            ("sitecustomize.py", "", "module `sitecustomize`", ("site_settings.py", "")),
            ("a.pth", "import a\n", "at every start of Python", ("a.py", "import a\n")),
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
            ("a.py", "sys.modules['pytest']\n", "1: refers", ("conftest.py", "import pytest\n")),
            ("a.py", "import_module('_pytest.python')\n", "1: refers", ("ci.py", "run(['pytest', '-x'])\n")),
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
            (
                "src/ATestRunner.py",
                "open('junit-report.xml')\n",
                "names the report",
                ("a.py", "open('my-junit-report.xml')\n"),
            ),
            ("a.js", "write('build/test-results/test/a.xml')\n", "names the report", ("a.js", "test('latest test')\n")),
        ] {
            let influences = found(path, None, after);
            assert!(influences.iter().any(|influence| influence.contains(expected)), "{path}: {influences:?}");
            assert_eq!(found(twin.0, None, twin.1), Vec::<String>::new(), "{twin:?}");
        }
    }

    #[test]
    fn ordinary_changes_are_not_reported() {
        for (path, after) in [
            ("tests/unittest/test_new.py", "import unittest\n"),
            ("lib/coverage.py", "x = 1\n"),
            ("docs/conf.py", "from unittest.mock import Mock\n"),
            ("benchmarks/bench_x.py", "import pytest\n"),
            ("scripts/check.py", "subprocess.run(['pytest'])\n"),
            ("setup.py", "setup(tests_require=['pytest'])\n"),
            ("noxfile.py", "session.install('pytest')\n"),
            ("vitest.setup.ts", "import { vi } from 'vitest'\n"),
            ("vite.config.ts", "if (process.env.VITEST) {}\n"),
            ("src/__mocks__/fs.ts", "import { vi } from 'vitest'\n"),
            (".eslintrc.js", "import vitest from 'vitest'\n"),
            ("storagetest/a.go", "package a\nimport \"testing\"\n"),
            ("a.go", "package a\nvar x = \"testing\"\n"),
            (".gitignore", "junit-report.xml\n"),
            (".github/workflows/a.yml", "- run: pytest --junit-xml=junit-report.xml\n"),
            ("src/lib.rs", "#[cfg(test)]\nmod tests {}\n"),
        ] {
            assert_eq!(found(path, None, after), Vec::<String>::new(), "{path}");
        }
    }

    #[test]
    fn what_the_base_has_is_not_reported() {
        let before = "import pytest\nprint('junit-report.xml')\n";
        let after = format!("{before}pytest.skip()\nopen('junit-report.xml')\n");
        assert_eq!(found("a.py", Some(before), &after), Vec::<String>::new());
        assert_eq!(found("pytest.py", Some(""), "x = 1\n"), Vec::<String>::new());
    }

    #[test]
    fn files_of_tests_are_found_by_the_words_of_their_path() {
        for (path, language, expected) in [
            ("tests/a.py", Language::Python, true),
            ("src/test_a.py", Language::Python, true),
            ("a_test.go", Language::Go, true),
            ("a.spec.ts", Language::TypeScript, true),
            ("pkg/testutil/x.go", Language::Go, true),
            ("pkg/latest/x.go", Language::Go, false),
            ("contest/a.py", Language::Python, false),
            ("latest.py", Language::Python, false),
            ("src/inspect.py", Language::Python, false),
        ] {
            assert_eq!(is_test(path, language), expected, "{path}");
        }
    }
}
