//! Detects code that must not run without human review (L8; the list is from the dual-agent specification): `rm -rf` of
//! an absolute or home path, `DROP TABLE`/`DATABASE`, `DELETE FROM x` without `WHERE`, infinite loops, `eval`/`exec`
//! calls.
//!
//! Code in a language with a grammar is checked by its syntax nodes: comments and string literals are ignored, except
//! string arguments of calls that run a shell command or a database statement. Scripts in HTML pages and commands in
//! JSON files are extracted and checked in their own language. Other files are matched with patterns after their
//! comments are removed; prose (Markdown and similar) is not checked.
//!
//! Only added dangers are reported: each danger of the old text cancels one danger of the new text that has the same
//! kind and is on an equal line of code.

mod grammar;
mod html;
mod json;
mod loops;
mod patterns;
mod shell;
mod sql;

use std::collections::HashMap;

use serde::Deserialize;

use super::language::Language;

/// Kind of danger, as named in `.cfq/checks.toml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DangerKind {
    DeletesFiles,
    DropsTable,
    DeletesAllRows,
    EndlessLoop,
    DynamicCode,
}

impl DangerKind {
    /// Description for findings.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::DeletesFiles => "deletes files recursively from the root or the home folder",
            Self::DropsTable => "drops a table or database",
            Self::DeletesAllRows => "deletes all rows of a table, without WHERE",
            Self::EndlessLoop => "has an infinite loop without break, return, await, yield or raise",
            Self::DynamicCode => "runs code generated at run time",
        }
    }
}

/// A detected danger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Danger {
    pub kind: DangerKind,
    /// First line of the dangerous code, from 1.
    pub line: u32,
    /// Text of that line, truncated.
    pub code: String,
}

/// Returns the dangers of `after` that `before` does not have.
pub(super) fn added_dangers(path: &str, before: &str, after: &str) -> Vec<Danger> {
    let mut existing: HashMap<(DangerKind, String), usize> = HashMap::new();
    for danger in dangers(path, before) {
        *existing.entry((danger.kind, danger.code)).or_default() += 1;
    }
    dangers(path, after)
        .into_iter()
        .filter(|danger| match existing.get_mut(&(danger.kind, danger.code.clone())) {
            Some(remaining) if *remaining > 0 => {
                *remaining -= 1;
                false
            }
            Some(_) | None => true,
        })
        .collect()
}

fn dangers(path: &str, text: &str) -> Vec<Danger> {
    if text.is_empty() {
        return Vec::new();
    }
    match Language::of_path(path) {
        Some(language) => grammar::dangers(language, text),
        None => patterns::dangers(path, text),
    }
}

/// Builds a [`Danger`] at a row of `text`, counted from 0.
fn danger_at(kind: DangerKind, text: &str, row: usize) -> Danger {
    let code = text.lines().nth(row).unwrap_or_default().trim().chars().take(100).collect();
    Danger { kind, line: u32::try_from(row + 1).unwrap_or(u32::MAX), code }
}
