//! Tests that each test, file and command that docs/requirements.md names exists, and each test that SECURITY.md names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::architecture::root;
use super::imports::rust_files;

#[test]
fn tests_of_the_requirements_exist() {
    let packages = package_folders(&root());
    let page = std::fs::read_to_string(root().join("docs/requirements.md")).unwrap();
    let names: Vec<String> = page.lines().filter(|line| line.starts_with('|')).flat_map(test_names).collect();
    assert!(names.len() >= 80, "{} names", names.len());
    for name in names {
        assert!(names_a_test(&name, &packages), "docs/requirements.md names {name}, which is not a test");
    }
}

#[test]
fn files_and_commands_of_the_requirements_exist() {
    let page = std::fs::read_to_string(root().join("docs/requirements.md")).unwrap();
    let justfile = std::fs::read_to_string(root().join("justfile")).unwrap();
    for code in page.split('`').skip(1).step_by(2) {
        if let Some(recipe) = code.strip_prefix("just ") {
            let found = justfile.lines().any(|line| line.split([' ', ':']).next() == Some(recipe));
            assert!(found, "docs/requirements.md names `{code}`, which is not in the justfile");
        } else if code.ends_with(".rs") {
            assert!(root().join(code).exists(), "docs/requirements.md names {code}, which does not exist");
        }
    }
}

#[test]
fn tests_of_the_threats_exist() {
    let page = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
    let (_, threats) = page.split_once("## Threats").unwrap();
    let packages = package_folders(&root());
    let folders = packages.values().flat_map(|folder| ["src", "tests", "suite"].map(|name| folder.join(name)));
    let files = folders.filter(|folder| folder.is_dir()).flat_map(|folder| rust_files(&folder));
    let tests: BTreeSet<String> = files.flat_map(|file| tests_in(&std::fs::read_to_string(file).unwrap())).collect();
    let names: Vec<&str> = threats
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.contains('_') && code.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_'))
        .collect();
    assert!(names.len() >= 40, "{} names", names.len());
    for name in names {
        assert!(tests.contains(name), "SECURITY.md names {name}, which is not a test");
    }
}

#[test]
fn test_names_are_read_and_resolved() {
    let names = test_names("| a | cfq-memory; suite::{a, b::c} (x::y*), `d::e` | word |");
    assert_eq!(names, ["cfq-memory", "suite::a", "suite::b::c", "x::y*", "d::e"]);
    let packages = package_folders(&root());
    for (name, exists) in [
        ("suite::requirements", true),
        ("suite::requirements::test_names_are_read_and_resolved", true),
        ("suite::requirements::test_names_are_*", true),
        ("suite::requirements::names_a_test", false),
        ("suite::requirements::renamed", false),
        ("suite::renamed", false),
        ("cfq-test-skip", true),
        ("cfq-test-skip::tests::skips_are_appended_one_per_line", true),
        ("cfq-test-skip::tests::renamed", false),
        ("cfq-renamed", false),
    ] {
        assert_eq!(names_a_test(name, &packages), exists, "{name}");
    }
}

/// The names in a line that contain `::` or are those of a package, with `{a, b}` expanded.
fn test_names(line: &str) -> Vec<String> {
    let mut depth = 0;
    let words = line.split(|letter: char| {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        depth == 0 && (letter.is_whitespace() || ";,()|`".contains(letter))
    });
    let names = words.filter(|word| word.contains("::") || word.starts_with("cfq-"));
    let expand = |name: &str| match name.split_once('{') {
        None => vec![name.to_owned()],
        Some((prefix, ends)) => {
            ends.trim_end_matches('}').split(',').map(|end| format!("{prefix}{}", end.trim())).collect()
        }
    };
    names.flat_map(expand).collect()
}

/// The folder of each package below `folder`, by name.
fn package_folders(folder: &Path) -> BTreeMap<String, PathBuf> {
    let mut packages = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !["target", ".git", "src"].iter().any(|name| path.ends_with(name)) {
            packages.extend(package_folders(&path));
        }
    }
    if let Ok(manifest) = std::fs::read_to_string(folder.join("Cargo.toml")) {
        let manifest: toml::Table = manifest.parse().unwrap();
        let name = manifest.get("package").and_then(|package| package["name"].as_str());
        packages.extend(name.map(|name| (name.to_owned(), folder.to_owned())));
    }
    packages
}

fn names_a_test(name: &str, packages: &BTreeMap<String, PathBuf>) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    if parts[0] == "suite" {
        return is_test_in(&root().join("tests"), &parts);
    }
    let Some(folder) = packages.get(parts[0]) else { return false };
    ["src", "tests"].iter().any(|sources| is_test_in(&folder.join(sources), &parts[1..]))
}

/// Whether `parts` is the path of a test, or of a module with tests, in a source folder.
fn is_test_in(sources: &Path, parts: &[&str]) -> bool {
    for length in (0..=parts.len()).rev() {
        let folder: PathBuf = sources.join(parts[..length].iter().collect::<PathBuf>());
        let own_file = (length > 0).then(|| folder.with_extension("rs"));
        let in_folder = ["mod.rs", "lib.rs", "main.rs"].map(|name| folder.join(name));
        let Some(file) = own_file.into_iter().chain(in_folder).find(|file| file.is_file()) else { continue };
        let text = std::fs::read_to_string(&file).unwrap();
        return match &parts[length..] {
            [] => has_tests(&text) || (folder.is_dir() && folder_has_tests(&folder)),
            ["tests"] => text.contains("mod tests {") && has_tests(&text),
            ["tests", name] => text.contains("mod tests {") && has_test(&text, name),
            [name] => has_test(&text, name),
            _ => false,
        };
    }
    false
}

fn folder_has_tests(folder: &Path) -> bool {
    rust_files(folder).iter().any(|file| has_tests(&std::fs::read_to_string(file).unwrap()))
}

fn has_tests(text: &str) -> bool {
    text.lines().any(is_test_attribute)
}

fn is_test_attribute(line: &str) -> bool {
    ["#[test]", "#[tokio::test"].iter().any(|attribute| line.contains(attribute))
}

/// Whether the text defines a test of this name (which may end with `*`), also as `name: arguments` in a macro call.
fn has_test(text: &str, name: &str) -> bool {
    let fits = |found: &str| match name.strip_suffix('*') {
        Some(start) => found.starts_with(start),
        None => found == name,
    };
    let macro_call = |line: &str| line.trim().split_once(": ").is_some_and(|(found, _)| fits(found));
    if text.contains("fn $name()") && text.lines().any(macro_call) {
        return true;
    }
    tests_in(text).iter().any(|found| fits(found))
}

/// The names of the test functions in the text.
fn tests_in(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut test = false;
    for line in text.lines() {
        if test
            && let Some((_, rest)) = line.split_once("fn ")
            && let Some((name, _)) = rest.split_once('(')
        {
            names.push(name.to_owned());
        }
        test = is_test_attribute(line) || (test && line.trim_start().starts_with(['#', '/']));
    }
    names
}
