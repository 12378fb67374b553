//! The house's walls: which crate may import which, and what the pure ones must never contain.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// What each crate may import of ours, besides dev-dependencies. Absent crates may import anything.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("cfq-proto", &[]),
    ("cfq-link", &["cfq-proto"]),
    ("cfq-scheduler-core", &["cfq-proto"]),
    ("cfq-memory", &["cfq-proto"]),
    ("cfq-convergence", &["cfq-proto"]),
    ("cfq-transformer", &["cfq-proto"]),
    ("cfq-scheduler", &["cfq-proto", "cfq-link", "cfq-scheduler-core", "cfq-convergence", "cfq-transformer"]),
    ("cfq-inference-node", &["cfq-proto", "cfq-link", "cfq-memory"]),
    ("cfq-agent-runner", &["cfq-proto", "cfq-link", "cfq-convergence", "cfq-transformer"]),
    ("cfq-deploy", &["cfq-proto", "cfq-link"]),
    ("cfq-fake-nvml", &[]),
    (
        "cfq",
        &[
            "cfq-proto",
            "cfq-link",
            "cfq-scheduler",
            "cfq-inference-node",
            "cfq-agent-runner",
            "cfq-convergence",
            "cfq-transformer",
            "cfq-deploy",
        ],
    ),
];

const PURE: &[(&str, &str)] = &[
    ("cfq-scheduler-core", "scheduler/core/src"),
    ("cfq-memory", "inference-node/memory/src"),
    ("cfq-convergence", "agent-runner/convergence/src"),
    ("cfq-transformer", "agent-runner/transformer/src"),
];

const IMPURE_CRATES: &[&str] =
    &["tokio", "sqlx", "async-nats", "git2", "rand", "reqwest", "axum", "cfq-link", "candle-core", "libc"];

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

/// Of each of our crates, its dependencies and whether each is a normal one (not for tests or builds).
fn packages() -> BTreeMap<String, Vec<(String, bool)>> {
    // cargo's own JSON: the crate that wraps it would turn on features that the product does not have, and so have
    // everything built twice.
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
        let known = MAY_IMPORT.iter().any(|(n, _)| *n == name) || ["cfq-tests", "cfq-benches"].contains(&name);
        assert!(known, "{name} has no place in the import rules: add it here and to ARCHITECTURE.md");
    }
}

#[test]
fn nobody_imports_tests_or_benches() {
    for (package, dependencies) in packages() {
        for (name, _) in dependencies {
            assert!(!["cfq-tests", "cfq-benches"].contains(&name.as_str()), "{package}");
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
            // Tests below the code may do what they like.
            let code = text.split("#[cfg(test)]").next().unwrap();
            for line in code.lines().filter(|l| !l.trim_start().starts_with("//")) {
                for word in IMPURE_WORDS {
                    assert!(!line.contains(word), "{}: {word} in {line:?}", path.display());
                }
            }
        }
    }
}

fn rust_files(folder: &Path) -> Vec<std::path::PathBuf> {
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
