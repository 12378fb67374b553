//! What a project lets pass (L8): `.cfq/checks.toml` in its repository.
//!
//! ```toml
//! [[allow]]
//! danger = "dynamic_code"      # deletes_files, drops_table, deletes_all_rows, endless_loop or dynamic_code
//! paths = ["plugins/", "tools/load.py"]   # a folder with everything in it, or a file
//! why = "plugins are loaded by name"
//! ```
//!
//! Only the base's file counts, so nothing a model writes can allow itself; and a change to the file is reported as a danger,
//! so that a human sees it. A file that cannot be read allows nothing.

use serde::Deserialize;

use super::dangerous::What;

pub(super) const FILE: &str = ".cfq/checks.toml";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Allowed {
    #[serde(default)]
    allow: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    danger: What,
    paths: Vec<String>,
    /// For people.
    #[serde(default, rename = "why")]
    _why: String,
}

impl Allowed {
    /// The base's list, and why it could not be read, where it could not.
    pub fn of(text: Option<&str>) -> (Self, Option<String>) {
        match toml::from_str(text.unwrap_or_default()) {
            Ok(allowed) => (allowed, None),
            Err(error) => (Self::default(), Some(error.message().to_owned())),
        }
    }

    pub fn covers(&self, what: What, path: &str) -> bool {
        self.allow.iter().filter(|entry| entry.danger == what).flat_map(|entry| &entry.paths).any(|allowed| {
            match allowed.strip_suffix('/') {
                Some(folder) => path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')),
                None => path == allowed,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_covers_its_kind_in_its_files_and_folders() {
        let text =
            "[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"plugins/\", \"tools/load.py\"]\nwhy = \"by name\"\n";
        let (allowed, problem) = Allowed::of(Some(text));
        assert_eq!(problem, None);
        for path in ["plugins/a.py", "plugins/deep/b.py", "tools/load.py"] {
            assert!(allowed.covers(What::DynamicCode, path), "{path}");
            assert!(!allowed.covers(What::DeletesFiles, path), "{path}");
        }
        for path in ["plugins", "plugins2/a.py", "x/plugins/a.py", "tools/load.pyc", "tools/load.py/x", ""] {
            assert!(!allowed.covers(What::DynamicCode, path), "{path}");
        }
    }

    #[test]
    fn a_list_of_0_1_allows_what_it_allowed() {
        let (allowed, problem) = Allowed::of(Some(include_str!("../../tests/fixtures/checks-0.1.toml")));
        assert_eq!(problem, None);
        for (what, folder) in [
            (What::DeletesFiles, "deletes_files"),
            (What::DropsTable, "drops_table"),
            (What::DeletesAllRows, "deletes_all_rows"),
            (What::EndlessLoop, "endless_loop"),
            (What::DynamicCode, "dynamic_code"),
        ] {
            assert!(allowed.covers(what, &format!("{folder}/a.py")) && allowed.covers(what, "one.py"), "{folder}");
            assert!(!allowed.covers(what, "elsewhere.py"), "{folder}");
        }
    }

    #[test]
    fn what_cannot_be_read_allows_nothing_and_says_why() {
        assert!(Allowed::of(None).1.is_none());
        for bad in
            ["[[allow]]\ndanger = \"everything\"\npaths = [\"a/\"]\n", "allow = 1", "[[allow]]\npath = \"a\"", "[["]
        {
            let (allowed, problem) = Allowed::of(Some(bad));
            assert!(problem.is_some() && !allowed.covers(What::DynamicCode, "a/b.py"), "{bad}");
        }
    }
}
