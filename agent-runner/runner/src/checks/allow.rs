//! Allow-list of a project for dangerous additions (L8): `.cfq/checks.toml` in its repository.
//!
//! ```toml
//! [[allow]]
//! danger = "dynamic_code"      # deletes_files, drops_table, deletes_all_rows, endless_loop, dynamic_code or
//!                              # bidi_control
//! paths = ["plugins/", "tools/load.py"]   # a folder with everything in it, or a file
//! reason = "plugins are loaded by name"
//! ```
//!
//! Only the file in the base commit is used, so a change cannot allow itself. A change of the file is reported as
//! dangerous, so that a human reviews it. A file that cannot be parsed allows nothing.

use serde::Deserialize;

use super::dangerous::DangerKind;

/// Path of the allow-list in the repository.
pub(super) const ALLOW_LIST_PATH: &str = ".cfq/checks.toml";

/// The parsed allow-list.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AllowList {
    #[serde(default)]
    allow: Vec<AllowRule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowRule {
    danger: DangerKind,
    /// Paths that the rule applies to: files, and folders with a trailing `/`.
    paths: Vec<String>,
    /// Justification for human readers.
    #[serde(default, rename = "reason", alias = "why")]
    _reason: String,
}

impl AllowList {
    /// Parses the base's allow-list. Returns an empty list and the parse error if the text is invalid.
    pub fn parse(text: Option<&str>) -> (Self, Option<String>) {
        match toml::from_str(text.unwrap_or_default()) {
            Ok(list) => (list, None),
            Err(error) => (Self::default(), Some(error.message().to_owned())),
        }
    }

    /// True if the list allows this kind of danger in the file at `path`.
    pub fn covers(&self, kind: DangerKind, path: &str) -> bool {
        self.allow.iter().filter(|rule| rule.danger == kind).flat_map(|rule| &rule.paths).any(|allowed| {
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
    fn rule_covers_its_kind_in_its_files_and_folders() {
        let text =
            "[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"plugins/\", \"tools/load.py\"]\nreason = \"by name\"\n";
        let (allowed, problem) = AllowList::parse(Some(text));
        assert_eq!(problem, None);
        for path in ["plugins/a.py", "plugins/deep/b.py", "tools/load.py"] {
            assert!(allowed.covers(DangerKind::DynamicCode, path), "{path}");
            assert!(!allowed.covers(DangerKind::DeletesFiles, path), "{path}");
        }
        for path in ["plugins", "plugins2/a.py", "x/plugins/a.py", "tools/load.pyc", "tools/load.py/x", ""] {
            assert!(!allowed.covers(DangerKind::DynamicCode, path), "{path}");
        }
    }

    #[test]
    fn allow_list_of_0_1_still_loads() {
        let (allowed, problem) = AllowList::parse(Some(include_str!("../../tests/fixtures/checks-0.1.toml")));
        assert_eq!(problem, None);
        for (kind, folder) in [
            (DangerKind::DeletesFiles, "deletes_files"),
            (DangerKind::DropsTable, "drops_table"),
            (DangerKind::DeletesAllRows, "deletes_all_rows"),
            (DangerKind::EndlessLoop, "endless_loop"),
            (DangerKind::DynamicCode, "dynamic_code"),
        ] {
            assert!(allowed.covers(kind, &format!("{folder}/a.py")) && allowed.covers(kind, "one.py"), "{folder}");
            assert!(!allowed.covers(kind, "elsewhere.py"), "{folder}");
        }
    }

    #[test]
    fn invalid_list_allows_nothing_and_reports_the_error() {
        assert!(AllowList::parse(None).1.is_none());
        for bad in
            ["[[allow]]\ndanger = \"everything\"\npaths = [\"a/\"]\n", "allow = 1", "[[allow]]\npath = \"a\"", "[["]
        {
            let (allowed, problem) = AllowList::parse(Some(bad));
            assert!(problem.is_some() && !allowed.covers(DangerKind::DynamicCode, "a/b.py"), "{bad}");
        }
    }
}
