//! The house's walls: which crate may import which, and what the pure ones must never contain.

use std::collections::BTreeSet;
use std::path::Path;

use cargo_metadata::{DependencyKind, MetadataCommand};

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

#[test]
fn crates_import_downwards_only() {
    let metadata = MetadataCommand::new().manifest_path("../Cargo.toml").no_deps().exec().unwrap();
    let ours: BTreeSet<&str> = metadata.packages.iter().map(|p| p.name.as_str()).collect();
    for package in &metadata.packages {
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == package.name.as_str()) else { continue };
        for dependency in package.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal) {
            let name = dependency.name.as_str();
            if ours.contains(name) {
                assert!(allowed.contains(&name), "{} must not import {name}", package.name);
            }
        }
    }
    for name in ours {
        let known = MAY_IMPORT.iter().any(|(n, _)| *n == name) || ["cfq-tests", "cfq-benches"].contains(&name);
        assert!(known, "{name} has no place in the import rules: add it here and to ARCHITECTURE.md");
    }
}

#[test]
fn nobody_imports_tests_or_benches() {
    let metadata = MetadataCommand::new().manifest_path("../Cargo.toml").no_deps().exec().unwrap();
    for package in &metadata.packages {
        for dependency in &package.dependencies {
            assert!(!["cfq-tests", "cfq-benches"].contains(&dependency.name.as_str()), "{}", package.name);
        }
    }
}

#[test]
fn pure_crates_stay_pure() {
    let metadata = MetadataCommand::new().manifest_path("../Cargo.toml").no_deps().exec().unwrap();
    for (name, folder) in PURE {
        let package = metadata.packages.iter().find(|p| p.name.as_str() == *name).unwrap();
        for dependency in package.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal) {
            assert!(!IMPURE_CRATES.contains(&dependency.name.as_str()), "{name} must not use {}", dependency.name);
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
