//! Tests of the workspace's structure: which crate may depend on which, and what pure crates must not contain.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

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
    ("cfq-agent-runner", &["cfq-proto", "cfq-link", "cfq-convergence", "cfq-transformer"]),
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
        let known = MAY_IMPORT.iter().any(|(n, _)| *n == name) || ["cfq-tests", "cfq-benches"].contains(&name);
        assert!(known, "{name} has no place in the import rules: add it here and to ARCHITECTURE.md");
    }
}

#[test]
fn tests_and_benches_are_not_imported() {
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

/// Source folders whose modules must not have import cycles.
const LAYERED: &[&str] = &[
    "proto/proto/src",
    "proto/link/src",
    "scheduler/core/src",
    "scheduler/service/src",
    "inference-node/memory/src",
    "inference-node/engine/src",
    "inference-node/node/src",
    "agent-runner/convergence/src",
    "agent-runner/transformer/src",
    "agent-runner/runner/src",
    "deploy/src",
    "cli/src",
];

/// Within a crate, modules have no import cycles, except that a module and its own submodules may use each other. Test
/// modules may import anything.
#[test]
fn modules_import_without_circles() {
    for folder in LAYERED {
        let imports = module_imports(&Path::new("..").join(folder));
        assert!(!imports.is_empty(), "{folder}");
        let circle = find_circle(&imports);
        assert!(circle.is_none(), "{folder}: {}", circle.unwrap_or_default().join(" -> "));
    }
}

#[test]
fn circle_detection_finds_circles() {
    let imports = |edges: &[(&str, &str)]| {
        let mut imports = BTreeMap::<String, BTreeSet<String>>::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    assert_eq!(find_circle(&imports(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(find_circle(&imports(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap(), ["b", "c", "b"]);
    let use_list = "a::{b, c::{d, self}, e as f}";
    assert_eq!(use_paths(use_list), ["a::b", "a::c::d", "a::c::self", "a::e"]);
}

/// For each module, the modules of the same crate that it imports, without its own submodules. A module's name is its
/// path, such as `a::b`; the name of the crate's root is empty.
fn module_imports(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let module = |path: &Path| {
        let relative = path.strip_prefix(folder).unwrap().with_extension("");
        let mut parts: Vec<String> = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if ["mod", "lib", "main"].contains(&parts.last().unwrap().as_str()) {
            parts.pop();
        }
        parts
    };
    let modules: BTreeMap<Vec<String>, std::path::PathBuf> = rust_files(folder)
        .into_iter()
        .map(|path| (module(&path), path))
        .filter(|(parts, _)| !parts.iter().any(|part| part.starts_with("test")))
        .collect();
    let mut imports = BTreeMap::new();
    for (own, path) in &modules {
        let text = std::fs::read_to_string(path).unwrap();
        // Test modules stand at the end of a file.
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap();
        let code: String =
            code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        let mut found = BTreeSet::new();
        for (position, _) in code.match_indices("use ") {
            if !code[..position].ends_with(['\n', ' ', '\t', ')']) && position > 0 {
                continue;
            }
            let Some((list, _)) = code[position + 4..].split_once(';') else { continue };
            for path in use_paths(list) {
                let Some(mut target) = resolve(own, &path, &modules) else { continue };
                while !modules.contains_key(&target) {
                    target.pop();
                }
                if target != *own && !target.is_empty() && !target.starts_with(own) {
                    found.insert(target.join("::"));
                }
            }
        }
        imports.insert(own.join("::"), found);
    }
    imports
}

/// The paths of a `use` declaration, one for each leaf of its braces.
fn use_paths(list: &str) -> Vec<String> {
    let Some((prefix, rest)) = list.split_once('{') else {
        return vec![list.split(" as ").next().unwrap().trim().to_owned()];
    };
    let inside = &rest[..rest.rfind('}').unwrap_or(rest.len())];
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, letter) in inside.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inside[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inside[start..]);
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(use_paths).map(|path| format!("{}{path}", prefix.trim())).collect()
}

/// Resolves `path`, as written in module `own`, to a path from the crate's root; `None` if it belongs to another crate.
fn resolve(own: &[String], path: &str, modules: &BTreeMap<Vec<String>, std::path::PathBuf>) -> Option<Vec<String>> {
    let parts: Vec<String> = path.split("::").map(|part| part.trim().to_owned()).collect();
    match parts[0].as_str() {
        "crate" => Some(parts[1..].to_vec()),
        "self" => Some([own, &parts[1..]].concat()),
        "super" => {
            let up = parts.iter().take_while(|part| *part == "super").count();
            Some([&own[..own.len().checked_sub(up)?], &parts[up..]].concat())
        }
        _ => modules.contains_key(&[own, &parts[..1]].concat()).then(|| [own, &parts[..]].concat()),
    }
}

/// Returns an import cycle, if there is one, with its first module repeated at the end.
fn find_circle(imports: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit(
        module: &str,
        imports: &BTreeMap<String, BTreeSet<String>>,
        way: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(at) = way.iter().position(|visited| visited == module) {
            let mut circle = way[at..].to_vec();
            circle.push(module.to_owned());
            return Some(circle);
        }
        if !done.insert(module.to_owned()) {
            return None;
        }
        way.push(module.to_owned());
        let circle = imports.get(module).into_iter().flatten().find_map(|next| visit(next, imports, way, done));
        way.pop();
        circle
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| visit(module, imports, &mut Vec::new(), &mut done))
}
