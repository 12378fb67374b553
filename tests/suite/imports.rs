//! Tests of the workspace's structure: which crate may depend on which, and what the code of pure crates and of the
//! engine must not contain.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

mod cycles;

/// For each crate, the workspace crates that it may depend on, not counting dev-dependencies. A crate that is not
/// listed may depend on any crate.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("cfq-proto", &[]),
    ("workspace-hack", &[]),
    ("cfq-link", &["cfq-proto"]),
    ("cfq-scheduler-core", &["cfq-proto"]),
    ("cfq-memory", &["cfq-proto"]),
    ("cfq-convergence", &["cfq-proto"]),
    ("cfq-transformer", &["cfq-proto"]),
    ("cfq-scheduler", &["cfq-proto", "cfq-link", "cfq-scheduler-core", "cfq-convergence", "cfq-transformer"]),
    ("cfq-engine", &["cfq-proto", "cfq-memory"]),
    ("cfq-inference-node", &["cfq-proto", "cfq-link", "cfq-memory", "cfq-engine"]),
    ("cfq-sandbox", &[]),
    ("cfq-edits", &[]),
    ("cfq-repo-map", &["cfq-proto"]),
    (
        "cfq-agent-runner",
        &["cfq-proto", "cfq-link", "cfq-convergence", "cfq-transformer", "cfq-edits", "cfq-repo-map", "cfq-sandbox"],
    ),
    ("cfq-deploy", &["cfq-proto", "cfq-link"]),
    ("cfq-fake-nvml", &[]),
    ("cfq-test-skip", &[]),
    (
        "cfq",
        &[
            "workspace-hack",
            "cfq-proto",
            "cfq-link",
            "cfq-scheduler",
            "cfq-engine",
            "cfq-memory",
            "cfq-inference-node",
            "cfq-agent-runner",
            "cfq-repo-map",
            "cfq-sandbox",
            "cfq-convergence",
            "cfq-transformer",
            "cfq-deploy",
        ],
    ),
];

/// Crates without I/O, and their source folders.
const PURE: &[(&str, &str)] = &[
    ("cfq-scheduler-core", "scheduler/core/src"),
    ("cfq-memory", "inference-node/memory/src"),
    ("cfq-convergence", "agent-runner/convergence/src"),
    ("cfq-transformer", "agent-runner/transformer/src"),
    ("cfq-edits", "agent-runner/edits/src"),
    ("cfq-repo-map", "agent-runner/repo-map/src"),
];

/// Dependencies that a pure crate must not have.
const IMPURE_CRATES: &[&str] =
    &["tokio", "sqlx", "async-nats", "git2", "rand", "reqwest", "axum", "cfq-link", "candle-core", "libc"];

/// Text that must not occur in the code of a pure crate.
const IMPURE_WORDS: &[&str] = &[
    "std::time",
    "SystemTime",
    "Instant::now",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::thread",
    "::fresh()",
    "now_v7",
    "thread_rng",
    "async fn",
    "async-nats",
];

/// Words from other parts of cfq that must not occur in the code of the inference engine.
const NOT_IN_ENGINE: &[&str] = &["nats", "ledger", "lease", "scheduler", "postgres", "hub", "attempt"];

/// Dependencies of each workspace crate, and whether each is a normal one (not for tests or builds).
fn packages() -> BTreeMap<String, Vec<(String, bool)>> {
    // Reads cargo's JSON directly: the `cargo_metadata` crate would enable features that the product does not have, and
    // so cause everything to be built twice.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().unwrap();
            (text(&package["name"]), dependencies.iter().map(|d| (text(&d["name"]), d["kind"].is_null())).collect())
        })
        .collect()
}

#[test]
fn crates_import_downwards_only() {
    let packages = packages();
    let ours: BTreeSet<&str> = packages.keys().map(String::as_str).collect();
    for (package, dependencies) in &packages {
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| name == package) else { continue };
        for (name, normal) in dependencies {
            let fits = !normal || !ours.contains(name.as_str()) || allowed.contains(&name.as_str());
            assert!(fits, "{package} must not import {name}");
        }
    }
    for name in ours {
        let known =
            MAY_IMPORT.iter().any(|(n, _)| *n == name) || ["cfq-tests", "cfq-benches", "cfq-simulator"].contains(&name);
        assert!(known, "{name} has no place in the import rules: add it here and to ARCHITECTURE.md");
    }
}

#[test]
fn tests_and_benches_are_not_imported() {
    for (package, dependencies) in packages() {
        for (name, _) in dependencies {
            assert!(!["cfq-tests", "cfq-benches", "cfq-simulator"].contains(&name.as_str()), "{package}");
            assert!(name != "cfq-fake-nvml" || package == "cfq-tests", "{package}");
        }
    }
}

#[test]
fn pure_crates_stay_pure() {
    let packages = packages();
    for (name, folder) in PURE {
        for (dependency, normal) in &packages[*name] {
            assert!(!normal || !IMPURE_CRATES.contains(&dependency.as_str()), "{name} must not use {dependency}");
        }
        let sources = rust_files(&Path::new("..").join(folder));
        assert!(!sources.is_empty(), "{folder}");
        for path in sources {
            let text = std::fs::read_to_string(&path).unwrap();
            // Test modules below the code are exempt.
            let code = text.split("#[cfg(test)]").next().unwrap();
            for line in code.lines().filter(|l| !l.trim_start().starts_with("//")) {
                for word in IMPURE_WORDS {
                    assert!(!line.contains(word), "{}: {word} in {line:?}", path.display());
                }
            }
        }
    }
}

#[test]
fn engine_code_does_not_name_the_cluster() {
    let sources = rust_files(Path::new("../inference-node/engine/src"));
    assert!(!sources.is_empty());
    for path in sources {
        let text = std::fs::read_to_string(&path).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for word in words(line) {
                assert!(!NOT_IN_ENGINE.contains(&word.as_str()), "{}: {word} in {line:?}", path.display());
            }
        }
    }
}

#[test]
fn identifiers_are_split_into_words() {
    let found = words("let free_bytes = LeaseHandle::new(release);");
    assert_eq!(found, ["let", "free", "bytes", "lease", "handle", "new", "release"]);
}

/// The words of a line in lower case; identifiers are split at `_` and before capitals.
fn words(line: &str) -> Vec<String> {
    let mut split = String::new();
    for letter in line.chars() {
        if letter.is_uppercase() && split.ends_with(char::is_lowercase) {
            split.push(' ');
        }
        split.push(if letter.is_alphanumeric() { letter } else { ' ' });
    }
    split.split_whitespace().map(str::to_lowercase).collect()
}

/// The Rust files in a folder and its subfolders.
pub fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}
