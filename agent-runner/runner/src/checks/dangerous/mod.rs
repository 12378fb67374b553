//! Output that must never run unseen (L8, after the dual-agent specification's list): `rm -rf` of an absolute or home
//! path, `DROP TABLE`/`DATABASE`, `DELETE FROM x` without `WHERE`, loops that nothing leaves, `eval`/`exec` calls.
//!
//! Where a grammar exists, code is read by its nodes: comments and string literals do not count, except strings that are
//! arguments of a call that runs a shell or a database statement. Scripts in pages and commands in JSON files are found where
//! they stand and read as what they are. Elsewhere patterns are matched on the text without its comments; prose (Markdown and
//! the like) is not looked at.
//!
//! A danger is reported if the new text has more of its kind and wording than the old text had.

mod grammar;
mod html;
mod json;
mod loops;
mod plain;
mod shell;
mod sql;

use std::collections::HashMap;

use serde::Deserialize;

use super::language::Language;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum What {
    DeletesFiles,
    DropsTable,
    DeletesAllRows,
    EndlessLoop,
    DynamicCode,
}

impl What {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::DeletesFiles => "deletes files recursively from the root or the home folder",
            Self::DropsTable => "drops a table or database",
            Self::DeletesAllRows => "deletes all rows of a table, without WHERE",
            Self::EndlessLoop => "loops for ever, without break, return, await, yield or raise",
            Self::DynamicCode => "runs code made at run time",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Danger {
    pub what: What,
    /// From 1.
    pub line: u32,
    /// The line it begins on, shortened.
    pub code: String,
}

/// What `after` has that `before` had not.
pub(super) fn added(path: &str, before: &str, after: &str) -> Vec<Danger> {
    let mut known: HashMap<(What, String), usize> = HashMap::new();
    for danger in all(path, before) {
        *known.entry((danger.what, danger.code)).or_default() += 1;
    }
    all(path, after)
        .into_iter()
        .filter(|danger| match known.get_mut(&(danger.what, danger.code.clone())) {
            Some(left) if *left > 0 => {
                *left -= 1;
                false
            }
            Some(_) | None => true,
        })
        .collect()
}

fn all(path: &str, text: &str) -> Vec<Danger> {
    if text.is_empty() {
        return Vec::new();
    }
    match Language::of_path(path) {
        Some(language) => grammar::dangers(language, text),
        None => plain::dangers(path, text),
    }
}

/// Builds a [`Danger`] at a line counted from 0.
fn at(what: What, text: &str, row: usize) -> Danger {
    let code = text.lines().nth(row).unwrap_or_default().trim().chars().take(100).collect();
    Danger { what, line: u32::try_from(row + 1).unwrap_or(u32::MAX), code }
}
