//! Finds the test runners of a repository by the files at its top.

use std::path::Path;

/// Maximum size of a file that is searched for the name of a test runner, in bytes.
const MAX_SEARCHED_BYTES: u64 = 1024 * 1024;

/// Maximum number of test files that are searched.
const MAX_SEARCHED_FILES: usize = 200;

/// A proposed check.
struct Proposal {
    name: &'static str,
    run: Vec<String>,
    report: Option<&'static str>,
    /// How its dependencies are installed; `None` if that is not known.
    preparation: Option<PreparationProposal>,
    /// What has to be there so that it works without network.
    note: &'static str,
}

/// A proposed preparation.
struct PreparationProposal {
    name: &'static str,
    run: Vec<String>,
    lock_files: Vec<String>,
    keep: &'static str,
}

fn names(files: &[&str]) -> Vec<String> {
    files.iter().map(|name| (*name).to_owned()).collect()
}

fn words(command: &str) -> Vec<String> {
    command.split(' ').map(str::to_owned).collect()
}

fn shell(script: String) -> Vec<String> {
    vec!["sh".to_owned(), "-c".to_owned(), script]
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
    for Proposal { name, run, report, preparation, note } in proposals {
        text.push_str(&format!("\n# {note}\n"));
        if let Some(PreparationProposal { name, run, lock_files, keep }) = preparation {
            text.push_str("# Runs once for each content of the lock files, and reaches only registries of packages.\n");
            text.push_str(&format!("[[prepare]]\nname = \"{name}\"\nrun = {run:?}\n"));
            text.push_str(&format!("lock_files = {lock_files:?}\nkeep = [\"{keep}\"]\n\n"));
        }
        text.push_str(&format!("[[check]]\nname = \"{name}\"\nrun = {run:?}\n"));
        if let Some(report) = report {
            text.push_str(&format!("report = \"{report}\"\n"));
        }
    }
    Some(text)
}

fn proposals(root: &Path) -> Vec<Proposal> {
    let has = |name: &str| root.join(name).is_file();
    let mentions = |name: &str, word: &str| read(&root.join(name)).contains(word);
    let mut found: Vec<_> = python(root).into_iter().collect();
    if has("package.json") {
        let preparation = node_packages(root);
        let note = match preparation {
            Some(_) if mentions("package.json", "\"workspaces\"") || has("pnpm-workspace.yaml") => {
                "Needs Node and its package manager. Add the node_modules/ folder of each workspace to `keep`."
            }
            Some(_) => "Needs Node and its package manager.",
            None => {
                "Needs Node. To install packages, commit package-lock.json, pnpm-lock.yaml or yarn.lock, or add [[prepare]]."
            }
        };
        if mentions("package.json", "\"vitest\"") {
            let run = words("npx vitest run --reporter=junit --outputFile=report-vitest.xml");
            found.push(Proposal { name: "vitest", run, report: Some("report-vitest.xml"), preparation, note });
        } else if mentions("package.json", "\"test\"") {
            found.push(Proposal { name: "npm test", run: words("npm test"), report: None, preparation, note });
        }
    }
    if has("Cargo.toml") {
        let note = "Needs Rust. If it is in your home folder, name it with `readable` and `env` in cfq.toml.";
        let preparation = has("Cargo.lock").then(|| PreparationProposal {
            name: "crates",
            run: words("cargo fetch --locked"),
            lock_files: names(&["Cargo.lock"]),
            keep: "~/.cargo/registry/",
        });
        let run = words("cargo test --offline");
        found.push(Proposal { name: "cargo test", run, report: None, preparation, note });
    }
    if has("go.mod") {
        let preparation = has("go.sum").then(|| PreparationProposal {
            name: "modules",
            run: words("go mod download"),
            lock_files: names(&["go.mod", "go.sum"]),
            keep: "~/go/pkg/mod/",
        });
        let run = words("go test ./...");
        found.push(Proposal { name: "go test", run, report: None, preparation, note: "Needs Go." });
    }
    if has("pom.xml") {
        let run = words("mvn --batch-mode --offline test");
        // What runs the tests is downloaded only if tests run.
        let preparation = Some(PreparationProposal {
            name: "maven artifacts",
            run: words("mvn --batch-mode -Dmaven.test.failure.ignore=true test"),
            lock_files: names(&["pom.xml"]),
            keep: "~/.m2/repository/",
        });
        let note = "Needs Maven. The preparation runs the tests too. Add the pom.xml of modules to `lock_files`.";
        found.push(Proposal { name: "maven", run, report: Some("target/surefire-reports/"), preparation, note });
    }
    let gradle = [
        "build.gradle",
        "build.gradle.kts",
        "settings.gradle",
        "settings.gradle.kts",
        "gradle.properties",
        "gradle/libs.versions.toml",
    ];
    if has("build.gradle") || has("build.gradle.kts") {
        let build: Vec<&str> = gradle.into_iter().filter(|name| has(name)).collect();
        let preparation = Some(PreparationProposal {
            name: "gradle artifacts",
            run: words("gradle --no-daemon test --test-dry-run"),
            lock_files: names(&build),
            keep: "~/.gradle/caches/",
        });
        let run = words("gradle --offline --no-daemon test");
        found.push(Proposal {
            name: "gradle",
            run,
            report: Some("build/test-results/test/"),
            preparation,
            note: "Needs Gradle 8.3 or later. Add the build files of subprojects to `lock_files`.",
        });
    }
    if has("CMakeLists.txt") {
        let script = "cmake -B build && cmake --build build && ctest --test-dir build --output-junit report.xml";
        let (run, note) = (shell(script.to_owned()), "Needs CMake 3.21 or later, and a compiler.");
        found.push(Proposal { name: "ctest", run, report: Some("build/report.xml"), preparation: None, note });
    }
    if found.is_empty() && read(&root.join("Makefile")).lines().any(|line| line.starts_with("test:")) {
        let note = "Needs make and what the target uses.";
        found.push(Proposal { name: "make test", run: words("make test"), report: None, preparation: None, note });
    }
    found
}

fn python(root: &Path) -> Option<Proposal> {
    let has = |name: &str| root.join(name).is_file();
    let mentions = |name: &str, word: &str| read(&root.join(name)).contains(word);
    let files = ["pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "pytest.ini", "tox.ini", "conftest.py"];
    if !files.iter().any(|name| has(name)) {
        return None;
    }
    let requirements = [
        "requirements.txt",
        "requirements-dev.txt",
        "requirements-test.txt",
        "dev-requirements.txt",
        "test-requirements.txt",
    ];
    let is_pytest = has("pytest.ini")
        || has("conftest.py")
        || has("tests/conftest.py")
        || has_pytest_functions(root)
        || files.iter().chain(&requirements).any(|name| mentions(name, "pytest"));
    let environment = |run, lock_files| Some(PreparationProposal { name: "packages", run, lock_files, keep: ".venv/" });
    let with_pip = |what: String, lock_files| {
        let pytest = if is_pytest { " pytest" } else { "" };
        let script = format!("python3 -m venv .venv && .venv/bin/pip install{what}{pytest}");
        environment(shell(script), lock_files)
    };
    let present: Vec<&str> = requirements.into_iter().filter(|name| has(name)).collect();
    let is_package = has("setup.py") || mentions("pyproject.toml", "[project]");
    // All that the build of the package runs or reads.
    let build = || ["pyproject.toml", "setup.py", "setup.cfg"].into_iter().filter(|name| has(name)).map(str::to_owned);
    let preparation = match () {
        // The interpreter that uv installs would be outside of the folder.
        () if has("uv.lock") => {
            environment(words("uv sync --frozen --no-managed-python"), build().chain(["uv.lock".to_owned()]).collect())
        }
        () if has("poetry.lock") => environment(
            words("env POETRY_VIRTUALENVS_IN_PROJECT=1 poetry install --no-interaction"),
            build().chain(["poetry.lock".to_owned()]).collect(),
        ),
        () if !present.is_empty() => {
            let named: String = present.iter().map(|name| format!(" -r {name}")).collect();
            let included = included_requirements(root, &present);
            // The tests of a package in `src` import it only if it is installed; a package may have dependencies.
            match is_package && (root.join("src").is_dir() || mentions("pyproject.toml", "\ndependencies")) {
                true => with_pip(format!("{named} -e ."), included.into_iter().chain(build()).collect()),
                false => with_pip(named, included),
            }
        }
        () if is_package => with_pip(format!(" -e .{}", test_extra(root)), build().collect()),
        () => None,
    };
    let python = if preparation.is_some() { ".venv/bin/python" } else { "python3" };
    let (name, arguments, report) = match is_pytest {
        true => ("pytest", "-m pytest --junit-xml=report.xml", Some("report.xml")),
        false if root.join("tests").is_dir() => ("unittest", "-m unittest discover -s tests -t .", None),
        false => ("unittest", "-m unittest", None),
    };
    let note = match preparation {
        Some(_) => "Needs Python with venv, or the package manager that the preparation names.",
        None => "Needs Python.",
    };
    Some(Proposal { name, run: words(&format!("{python} {arguments}")), report, preparation, note })
}

/// The requirement files and those that they include.
fn included_requirements(root: &Path, first: &[&str]) -> Vec<String> {
    let mut files = names(first);
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let folder = file.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
        for line in read(&root.join(&file)).lines() {
            let Some(name) = included_name(line) else { continue };
            let name = format!("{folder}{}", name.trim_start_matches("./"));
            // Lock files are files of the repository.
            if name.contains("..") || name.starts_with('/') {
                continue;
            }
            if !files.contains(&name) && files.len() < MAX_SEARCHED_FILES && root.join(&name).is_file() {
                files.push(name);
            }
        }
    }
    files
}

/// The file that a line of a requirement file includes: `-r FILE`, `-cFILE`, `--requirement=FILE`.
fn included_name(line: &str) -> Option<&str> {
    let options = ["--requirement", "--constraint", "-r", "-c"];
    let rest = options.iter().find_map(|option| line.trim().strip_prefix(option))?;
    rest.trim_start_matches([' ', '\t', '=']).split_whitespace().next()
}

/// The extra with the dependencies of the tests, as `[test]`; empty if there is none.
fn test_extra(root: &Path) -> String {
    let project: toml::Table = toml::from_str(&read(&root.join("pyproject.toml"))).unwrap_or_default();
    let extras = project.get("project").and_then(|project| project.get("optional-dependencies"));
    let extra =
        ["test", "tests", "testing", "dev"].into_iter().find(|name| extras.is_some_and(|e| e.get(name).is_some()));
    extra.map(|name| format!("[{name}]")).unwrap_or_default()
}

/// How the packages of a `package.json` are installed.
fn node_packages(root: &Path) -> Option<PreparationProposal> {
    let managers = [
        ("package-lock.json", "npm ci"),
        ("pnpm-lock.yaml", "pnpm install --frozen-lockfile"),
        ("yarn.lock", "yarn install --frozen-lockfile"),
    ];
    let (lock, command) = managers.into_iter().find(|(lock, _)| root.join(lock).is_file())?;
    let settings = [".npmrc", "pnpm-workspace.yaml"].into_iter().filter(|name| root.join(name).is_file());
    let lock_files: Vec<&str> = ["package.json", lock].into_iter().chain(settings).collect();
    Some(PreparationProposal {
        name: "node_modules",
        run: words(command),
        lock_files: names(&lock_files),
        keep: "node_modules/",
    })
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
        for (files, checks, preparations) in [
            (&[("pytest.ini", "")][..], &["pytest"][..], &[][..]),
            (&[("pyproject.toml", "[tool.pytest.ini_options]\n")], &["pytest"], &[]),
            (&[("pyproject.toml", "[project]\n")], &["unittest"], &["packages: pyproject.toml > .venv/"]),
            (&[("setup.py", "")], &["unittest"], &["packages: setup.py > .venv/"]),
            (
                &[("setup.py", ""), ("test_a.py", "def test_a():\n    pass\n")],
                &["pytest"],
                &["packages: setup.py > .venv/"],
            ),
            (
                &[("pyproject.toml", "[project]\n"), ("uv.lock", "")],
                &["unittest"],
                &["packages: pyproject.toml uv.lock > .venv/"],
            ),
            (&[("setup.py", ""), ("poetry.lock", "")], &["unittest"], &["packages: setup.py poetry.lock > .venv/"]),
            (
                &[
                    ("requirements.txt", "-r ./more.txt\nsix\n-r../x.txt\n-r /etc/hosts\n"),
                    ("more.txt", "-cless.txt\n"),
                    ("less.txt", ""),
                ],
                &["unittest"],
                &["packages: requirements.txt more.txt less.txt > .venv/"],
            ),
            (
                &[("requirements.txt", ""), ("requirements-dev.txt", "pytest")],
                &["pytest"],
                &["packages: requirements.txt requirements-dev.txt > .venv/"],
            ),
            (&[("package.json", "{\"scripts\": {\"test\": \"jest\"}}")], &["npm test"], &[]),
            (
                &[("package.json", "{\"devDependencies\": {\"vitest\": \"1\"}}"), ("package-lock.json", "{}")],
                &["vitest"],
                &["node_modules: package.json package-lock.json > node_modules/"],
            ),
            (
                &[("package.json", "{\"scripts\": {\"test\": \"jest\"}}"), ("pnpm-lock.yaml", "")],
                &["npm test"],
                &["node_modules: package.json pnpm-lock.yaml > node_modules/"],
            ),
            (&[("Cargo.toml", ""), ("pytest.ini", "")], &["pytest", "cargo test"], &[]),
            (&[("Cargo.toml", ""), ("Cargo.lock", "")], &["cargo test"], &["crates: Cargo.lock > ~/.cargo/registry/"]),
            (&[("go.mod", "")], &["go test"], &[]),
            (&[("go.mod", ""), ("go.sum", "")], &["go test"], &["modules: go.mod go.sum > ~/go/pkg/mod/"]),
            (&[("pom.xml", "")], &["maven"], &["maven artifacts: pom.xml > ~/.m2/repository/"]),
            (
                &[("pom.xml", ""), ("build.gradle", ""), ("build.gradle.kts", ""), ("settings.gradle", "")],
                &["maven", "gradle"],
                &[
                    "maven artifacts: pom.xml > ~/.m2/repository/",
                    "gradle artifacts: build.gradle build.gradle.kts settings.gradle > ~/.gradle/caches/",
                ],
            ),
            (&[("build.gradle.kts", "")], &["gradle"], &["gradle artifacts: build.gradle.kts > ~/.gradle/caches/"]),
            (&[("CMakeLists.txt", "")], &["ctest"], &[]),
            (&[("Makefile", "all:\ntest: all\n")], &["make test"], &[]),
        ] {
            let root = tempfile::tempdir().unwrap();
            files.iter().for_each(|(name, text)| std::fs::write(root.path().join(name), text).unwrap());
            let text = checks_file(root.path()).unwrap();
            let declared = project_checks(Some(&text)).unwrap();
            let names: Vec<_> = declared.checks.iter().map(|check| check.name.as_str()).collect();
            assert_eq!(names, checks, "{text}");
            let found: Vec<_> = declared
                .preparations
                .iter()
                .map(|p| format!("{}: {} > {}", p.name, p.lock_files.join(" "), p.keep[0]))
                .collect();
            assert_eq!(found, preparations, "{text}");
            let is_prepared = declared.preparations.iter().any(|preparation| preparation.name == "packages");
            assert_eq!(text.contains("\".venv/bin/python\""), is_prepared, "{text}");
        }
        let root = tempfile::tempdir().unwrap();
        let project = "[project]\nname = \"a\"\n[project.optional-dependencies]\ndev = [\"x\"]\ntest = [\"y\"]\n";
        std::fs::write(root.path().join("pyproject.toml"), project).unwrap();
        assert!(checks_file(root.path()).unwrap().contains("pip install -e .[test]"));
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("Makefile"), "all:\n").unwrap();
        assert_eq!(checks_file(root.path()), None);
        std::fs::create_dir(root.path().join("tests")).unwrap();
        std::fs::write(root.path().join("go.mod"), "").unwrap();
        assert!(checks_file(root.path()).unwrap().contains("# protected = [\"tests/\"]\n"));
    }
}
