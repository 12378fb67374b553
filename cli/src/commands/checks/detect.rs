//! Finds the test runners of a repository by the files at its top.

use std::path::Path;

/// Maximum size of a file that is searched for the name of a test runner, in bytes.
const MAX_SEARCHED_BYTES: u64 = 1024 * 1024;

/// Maximum number of test files that are searched.
const MAX_SEARCHED_FILES: usize = 200;

/// A proposed check.
struct Proposal {
    name: &'static str,
    run: &'static [&'static str],
    report: Option<&'static str>,
    /// What has to be there so that it works without network.
    note: &'static str,
}

/// The text of `.cfq/checks.toml` for the repository at `root`; `None` if no test runner is known.
pub fn checks_file(root: &Path) -> Option<String> {
    let proposals = proposals(root);
    if proposals.is_empty() {
        return None;
    }
    let mut text = "# Checks that cfq runs on each result, in a sandbox without network.\n".to_owned();
    let folders: Vec<String> =
        ["tests", "test", "spec"].iter().filter(|f| root.join(f).is_dir()).map(|f| format!("\"{f}/\"")).collect();
    if !folders.is_empty() {
        text.push_str("# Uncomment to refuse changes of these files:\n");
        text.push_str(&format!("# protected = [{}]\n", folders.join(", ")));
    }
    for Proposal { name, run, report, note } in proposals {
        text.push_str(&format!("\n# {note}\n[[check]]\nname = \"{name}\"\nrun = {run:?}\n"));
        if let Some(report) = report {
            text.push_str(&format!("report = \"{report}\"\n"));
        }
    }
    Some(text)
}

fn proposals(root: &Path) -> Vec<Proposal> {
    let has = |name: &str| root.join(name).is_file();
    let mentions = |name: &str, word: &str| read(&root.join(name)).contains(word);
    let mut found = Vec::new();
    let python =
        ["pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "pytest.ini", "tox.ini", "conftest.py"];
    if python.iter().any(|name| has(name)) {
        let pytest = has("pytest.ini")
            || has("conftest.py")
            || has("tests/conftest.py")
            || has_pytest_functions(root)
            || python
                .iter()
                .chain(&["requirements-dev.txt", "dev-requirements.txt"])
                .any(|name| mentions(name, "pytest"));
        let note =
            "Needs Python with the project's dependencies: name the virtual environment with `readable` in cfq.toml.";
        found.push(match pytest {
            true => Proposal {
                name: "pytest",
                run: &["python3", "-m", "pytest", "--junit-xml=report.xml"],
                report: Some("report.xml"),
                note,
            },
            false if root.join("tests").is_dir() => {
                let run = &["python3", "-m", "unittest", "discover", "-s", "tests", "-t", "."];
                Proposal { name: "unittest", run, report: None, note }
            }
            false => Proposal { name: "unittest", run: &["python3", "-m", "unittest"], report: None, note },
        });
    }
    if has("package.json") {
        let note = "Needs Node and node_modules, which are not part of a commit: name their folders with `readable` in cfq.toml.";
        if mentions("package.json", "\"vitest\"") {
            let run = &["npx", "vitest", "run", "--reporter=junit", "--outputFile=report-vitest.xml"];
            found.push(Proposal { name: "vitest", run, report: Some("report-vitest.xml"), note });
        } else if mentions("package.json", "\"test\"") {
            found.push(Proposal { name: "npm test", run: &["npm", "test"], report: None, note });
        }
    }
    if has("Cargo.toml") {
        let note = "Needs the crates in CARGO_HOME: name it and RUSTUP_HOME with `readable` and `env` in cfq.toml.";
        found.push(Proposal { name: "cargo test", run: &["cargo", "test", "--offline"], report: None, note });
    }
    if has("go.mod") {
        let note =
            "Needs the modules in GOMODCACHE, or a vendor folder: name it with `readable` and `env` in cfq.toml.";
        found.push(Proposal { name: "go test", run: &["go", "test", "./..."], report: None, note });
    }
    if has("pom.xml") {
        let run = &["mvn", "--batch-mode", "--offline", "test"];
        let note = "Needs the artifacts in ~/.m2: name it with `readable`, and MAVEN_OPTS = \"-Dmaven.repo.local=...\" with `env`, in cfq.toml.";
        found.push(Proposal { name: "maven", run, report: Some("target/surefire-reports/"), note });
    }
    if has("build.gradle") || has("build.gradle.kts") {
        let run = &["gradle", "--offline", "--no-daemon", "test"];
        let note =
            "Needs the artifacts: name their folder with `readable`, and GRADLE_RO_DEP_CACHE with `env`, in cfq.toml.";
        found.push(Proposal { name: "gradle", run, report: Some("build/test-results/test/"), note });
    }
    if has("CMakeLists.txt") {
        let run =
            &["sh", "-c", "cmake -B build && cmake --build build && ctest --test-dir build --output-junit report.xml"];
        let note = "Needs CMake 3.21 or later, and a compiler.";
        found.push(Proposal { name: "ctest", run, report: Some("build/report.xml"), note });
    }
    if found.is_empty() && read(&root.join("Makefile")).lines().any(|line| line.starts_with("test:")) {
        let note = "Needs make and what the target uses.";
        found.push(Proposal { name: "make test", run: &["make", "test"], report: None, note });
    }
    found
}

/// Whether a test file at the top or in `tests` has a test that only pytest runs.
fn has_pytest_functions(root: &Path) -> bool {
    let files = [root.to_owned(), root.join("tests")].into_iter().filter_map(|folder| folder.read_dir().ok());
    let names = files.flatten().flatten().map(|entry| entry.path());
    let is_test = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".py") && (name.starts_with("test_") || name.ends_with("_test.py"))
    };
    let needs_pytest = |line: &str| line.starts_with("def test_") || line.starts_with("import pytest");
    names.filter(is_test).take(MAX_SEARCHED_FILES).any(|path| read(&path).lines().any(needs_pytest))
}

/// The text of a file; empty if it is not a text file of moderate size.
fn read(path: &Path) -> String {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_file() && metadata.len() <= MAX_SEARCHED_BYTES => {
            std::fs::read_to_string(path).unwrap_or_default()
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use cfq_agent_runner::checks::project_checks;

    use super::*;

    #[test]
    fn proposed_files_are_valid_and_name_the_test_runner() {
        for (files, expected) in [
            (&[("pyproject.toml", "[tool.pytest.ini_options]\n")][..], &["pytest"][..]),
            (&[("setup.py", "")], &["unittest"]),
            (&[("setup.py", ""), ("test_a.py", "def test_a():\n    pass\n")], &["pytest"]),
            (&[("package.json", "{\"scripts\": {\"test\": \"jest\"}}")], &["npm test"]),
            (&[("package.json", "{\"devDependencies\": {\"vitest\": \"1\"}}")], &["vitest"]),
            (&[("Cargo.toml", ""), ("setup.py", "")], &["unittest", "cargo test"]),
            (&[("go.mod", "")], &["go test"]),
            (&[("pom.xml", "")], &["maven"]),
            (&[("build.gradle.kts", "")], &["gradle"]),
            (&[("CMakeLists.txt", "")], &["ctest"]),
            (&[("Makefile", "all:\ntest: all\n")], &["make test"]),
        ] {
            let root = tempfile::tempdir().unwrap();
            files.iter().for_each(|(name, text)| std::fs::write(root.path().join(name), text).unwrap());
            let text = checks_file(root.path()).unwrap();
            let names: Vec<String> = project_checks(Some(&text)).unwrap().into_iter().map(|check| check.name).collect();
            assert_eq!(names, expected, "{text}");
        }
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("Makefile"), "all:\n").unwrap();
        assert_eq!(checks_file(root.path()), None);
        std::fs::create_dir(root.path().join("tests")).unwrap();
        std::fs::write(root.path().join("go.mod"), "").unwrap();
        assert!(checks_file(root.path()).unwrap().contains("# protected = [\"tests/\"]\n"));
    }
}
