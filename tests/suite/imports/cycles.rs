//! Tests that the modules of a crate have no import cycles, except that a module and its own submodules may use each
//! other.
//!
//! An import is a path in a `use` declaration or in code (`crate::a::f()`). It counts as an import of the module that
//! defines the item, also if another module (such as the crate's root) re-exports it. Test modules may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::rust_files;

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

#[test]
fn modules_import_without_cycles() {
    for folder in LAYERED {
        let imports = Modules::of_folder(&Path::new("..").join(folder)).imports();
        assert!(!imports.is_empty(), "{folder}");
        let cycle = find_cycle(&imports);
        assert!(cycle.is_none(), "{folder}: {}", cycle.unwrap_or_default().join(" -> "));
    }
}

#[test]
fn cycle_detection_finds_cycles() {
    let imports = |edges: &[(&str, &str)]| {
        let mut imports = BTreeMap::<String, BTreeSet<String>>::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    assert_eq!(find_cycle(&imports(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(find_cycle(&imports(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap(), ["b", "c", "b"]);
    let leaf = |path: &str, name: &str| (path.to_owned(), name.to_owned());
    let leaves = [leaf("a::b", "b"), leaf("a::c::d", "d"), leaf("a::c", "c"), leaf("a::e", "f")];
    assert_eq!(use_leaves("a::{b, c::{d, self}, e as f}"), leaves);
}

#[test]
fn inline_paths_and_re_exports_count_as_imports() {
    let cycle = |a: &str| {
        let root = "mod a;\nmod b;\n#[cfg(test)]\nmod c;\npub use b::Item;\n";
        let sources = [("", root), ("a", a), ("b", "use crate::a::f;\npub struct Item;\n"), ("c", "use crate::a;\n")];
        let sources = sources.map(|(module, text)| (item_path(module), text.to_owned()));
        find_cycle(&Modules::of_sources(sources).imports())
    };
    assert_eq!(cycle("pub fn f() -> crate::Item {}\n").unwrap(), ["a", "b", "a"]);
    assert_eq!(cycle("use crate::{\n    Item,\n};\npub fn f() -> Item {}\n").unwrap(), ["a", "b", "a"]);
    assert_eq!(cycle("pub fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::b::Item;\n}\n"), None);
    assert_eq!(cycle("pub fn f() {}\n// Used by crate::b.\nfn g() -> crate::c::C {}\n"), None);
}

/// Path of a module or item from the crate's root; the root's path is empty.
type ItemPath = Vec<String>;

fn item_path(text: &str) -> ItemPath {
    text.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// The modules of one crate, without its test modules.
struct Modules {
    /// The paths of this crate that occur in each module.
    paths: BTreeMap<ItemPath, Vec<ItemPath>>,
    /// Path under which an item is re-exported, and the path that is re-exported.
    re_exports: BTreeMap<ItemPath, ItemPath>,
}

impl Modules {
    fn of_folder(folder: &Path) -> Self {
        Self::of_sources(rust_files(folder).into_iter().map(|file| {
            let relative = file.strip_prefix(folder).unwrap().with_extension("");
            let mut module: ItemPath = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
                module.pop();
            }
            (module, std::fs::read_to_string(&file).unwrap())
        }))
    }

    fn of_sources(sources: impl IntoIterator<Item = (ItemPath, String)>) -> Self {
        let mut test_modules = Vec::new();
        let mut code = BTreeMap::new();
        for (module, text) in sources {
            let (text, tests) = without_tests(&text);
            test_modules.extend(tests.into_iter().map(|name| [module.as_slice(), &[name]].concat()));
            code.insert(module, text);
        }
        code.retain(|module, _| !test_modules.iter().any(|tests| module.starts_with(tests)));

        let (mut paths, mut re_exports) = (BTreeMap::new(), BTreeMap::new());
        for (module, text) in &code {
            let (declarations, rest) = split_uses(text);
            let mut found = inline_paths(&rest);
            for (public, list) in declarations {
                for (path, name) in use_leaves(&list) {
                    if public && let Some(target) = resolve(module, &path, &code) {
                        assert!(!path.ends_with('*'), "{module:?} re-exports {path}: name the items");
                        re_exports.insert([module.as_slice(), &[name]].concat(), target);
                    }
                    found.push(path);
                }
            }
            let found: Vec<ItemPath> = found.iter().filter_map(|path| resolve(module, path, &code)).collect();
            paths.insert(module.clone(), found);
        }
        Self { paths, re_exports }
    }

    /// For each module, the modules that it imports, without its own submodules and the crate's root.
    fn imports(&self) -> BTreeMap<String, BTreeSet<String>> {
        let imports_of = |own: &ItemPath, paths: &Vec<ItemPath>| {
            let modules = paths.iter().map(|path| self.defining_module(path.clone()));
            let others = modules.filter(|module| !module.is_empty() && !module.starts_with(own));
            let names: BTreeSet<String> = others.map(|module| module.join("::")).collect();
            (own.join("::"), names)
        };
        self.paths.iter().map(|(own, paths)| imports_of(own, paths)).collect()
    }

    /// The module that defines the item at `path`, after all re-exports are followed.
    fn defining_module(&self, mut path: ItemPath) -> ItemPath {
        loop {
            let mut length = path.len();
            while !self.paths.contains_key(&path[..length]) {
                length -= 1;
            }
            let Some(target) = path.get(..=length).and_then(|name| self.re_exports.get(name)) else {
                path.truncate(length);
                return path;
            };
            path = [target.as_slice(), &path[length + 1..]].concat();
        }
    }
}

/// Removes comments, declarations for tests, and the test module at the end of a file. Returns the remaining code and
/// the names of the test modules that are separate files.
fn without_tests(text: &str) -> (String, Vec<String>) {
    let (mut code, mut test_modules, mut for_tests) = (String::new(), Vec::new(), false);
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        let (_, item) = split_visibility(line.trim());
        let module = item.strip_prefix("mod ");
        if for_tests && module.is_some_and(|module| module.ends_with('{')) {
            break;
        }
        if let Some(name) = module.and_then(|module| module.strip_suffix(';')).filter(|_| for_tests) {
            test_modules.push(name.to_owned());
        }
        if !(for_tests && item.starts_with("use ")) {
            code.push_str(line);
            code.push('\n');
        }
        for_tests = line.trim() == "#[cfg(test)]" || (for_tests && line.trim().starts_with("#["));
    }
    (code, test_modules)
}

/// Splits a visibility from a line; returns whether there was one, and the rest.
fn split_visibility(line: &str) -> (bool, &str) {
    let rest = match line.strip_prefix("pub(") {
        Some(scope) => scope.split_once(") ").map(|(_, rest)| rest),
        None => line.strip_prefix("pub "),
    };
    (rest.is_some(), rest.unwrap_or(line))
}

/// Splits code into its `use` declarations and all other lines. Each declaration is returned as its list, and whether
/// it has a visibility.
fn split_uses(code: &str) -> (Vec<(bool, String)>, String) {
    let (mut declarations, mut rest) = (Vec::new(), String::new());
    let mut open: Option<(bool, String)> = None;
    for line in code.lines() {
        let (public, item) = split_visibility(line.trim_start());
        let (public, list) = match (open.take(), item.strip_prefix("use ")) {
            (Some((public, list)), _) => (public, list + line),
            (None, Some(list)) => (public, list.to_owned()),
            (None, None) => {
                rest.push_str(line);
                rest.push('\n');
                continue;
            }
        };
        match list.split_once(';') {
            Some((list, _)) => declarations.push((public, list.to_owned())),
            None => open = Some((public, list)),
        }
    }
    (declarations, rest)
}

/// The paths in code that begin with `crate`, `self` or `super`.
fn inline_paths(code: &str) -> Vec<String> {
    let words = code.split(|letter: char| !(letter.is_alphanumeric() || "_:$".contains(letter)));
    let relative = |word: &&str| ["crate::", "self::", "super::"].iter().any(|start| word.starts_with(*start));
    words.filter(relative).map(str::to_owned).collect()
}

/// The leaves of a `use` list: the path of each, and the name under which it is imported.
fn use_leaves(list: &str) -> Vec<(String, String)> {
    let Some((prefix, rest)) = list.split_once('{') else {
        let (path, alias) = list.split_once(" as ").unwrap_or((list, ""));
        let path = path.trim().trim_end_matches("::self");
        let name = if alias.is_empty() { path.rsplit("::").next().unwrap() } else { alias };
        return vec![(path.to_owned(), name.trim().to_owned())];
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
    let parts = parts.into_iter().map(str::trim).filter(|part| !part.is_empty());
    parts.flat_map(|part| use_leaves(&format!("{}{part}", prefix.trim()))).collect()
}

/// Resolves `path`, as written in module `own`, to a path from the crate's root; `None` if it belongs to another crate.
fn resolve(own: &[String], path: &str, modules: &BTreeMap<ItemPath, String>) -> Option<ItemPath> {
    let parts = item_path(path);
    match parts.first()?.as_str() {
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
fn find_cycle(imports: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit(
        module: &str,
        imports: &BTreeMap<String, BTreeSet<String>>,
        trail: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(at) = trail.iter().position(|visited| visited == module) {
            let mut cycle = trail[at..].to_vec();
            cycle.push(module.to_owned());
            return Some(cycle);
        }
        if !done.insert(module.to_owned()) {
            return None;
        }
        trail.push(module.to_owned());
        let cycle = imports.get(module).into_iter().flatten().find_map(|next| visit(next, imports, trail, done));
        trail.pop();
        cycle
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| visit(module, imports, &mut Vec::new(), &mut done))
}
