//! Detects code that must not run without human review (L8; the list is from the dual-agent specification): `rm -rf` of
//! an absolute or home path, `DROP TABLE`/`DATABASE`, `DELETE FROM x` without `WHERE`, infinite loops, `eval`/`exec`
//! calls; and characters that make code look different from what it does.
//!
//! The check is a tripwire for mistakes of a model. It recognises common forms and cannot stop code that hides what it
//! does; nothing is executed or evaluated.
//!
//! Code in a language with a grammar is checked by its syntax nodes: comments and string literals are ignored, except
//! string arguments of calls that run a shell command or a database statement. Scripts in HTML pages, commands in
//! JSON files and cells of notebooks are extracted and checked in their own language. Other files are matched with
//! patterns after their comments are removed; prose (Markdown and similar) is not checked.
//!
//! Only added dangers are reported: each danger of the old text cancels one danger of the new text that has the same
//! kind and the same code, apart from white space.

mod bidi;
mod bindings;
mod calls;
mod grammar;
mod html;
mod json;
mod literals;
mod logical_lines;
mod loops;
mod notebook;
mod patterns;
mod python_path;
mod shell;
mod sql;
mod work;

use std::collections::HashMap;

use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use serde::Deserialize;

use super::language::Language;
use super::limits::{CheckLimitExceeded, MAX_CHECKED_BYTES};
use work::{Lines, WorkLimit};

/// Kind of danger, as named in `.cfq/checks.toml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DangerKind {
    DeletesFiles,
    DropsTable,
    DeletesAllRows,
    EndlessLoop,
    DynamicCode,
    BidiControl,
    /// Found by the check of test integrity, not here.
    TestRunner,
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
            Self::TestRunner => "influences the test runner",
            Self::BidiControl => "has a bidirectional control character, which hides the order of the code",
        }
    }
}

/// Maximum number of characters of code in a finding.
const MAX_SHOWN_CHARS: usize = 100;

/// A detected danger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Danger {
    pub kind: DangerKind,
    /// First line of the dangerous code, from 1.
    pub line: u32,
    /// Text of that line, truncated, with visible control characters.
    pub code: String,
    /// The dangerous code with single spaces as white space; identifies the danger in another version of the file.
    source: String,
}

impl Danger {
    /// A danger whose code `source` begins at `row`, counted from 0.
    fn new(kind: DangerKind, lines: &Lines<'_>, row: usize, source: &str) -> Self {
        Self {
            kind,
            line: u32::try_from(row + 1).unwrap_or(u32::MAX),
            code: shown(lines.line(row)),
            source: source.split_whitespace().collect::<Vec<_>>().join(" "),
        }
    }

    /// The danger at another row, counted from 0.
    fn at_row(self, row: usize) -> Self {
        Self { line: u32::try_from(row + 1).unwrap_or(u32::MAX), ..self }
    }

    /// The danger in a text that has `rows` more rows before it.
    fn moved_down(self, rows: usize) -> Self {
        Self { line: self.line.saturating_add(u32::try_from(rows).unwrap_or(u32::MAX)), ..self }
    }
}

/// A line of code as findings show it.
fn shown(line: &str) -> String {
    let text: String = line.trim().chars().take(MAX_SHOWN_CHARS).collect();
    visible(&text, TERMINAL_CHARACTERS).into_owned()
}

/// Returns the dangers of `after` that `before` does not have.
///
/// # Errors
/// [`CheckLimitExceeded`] if `after` cannot be checked to its end.
pub(super) fn added_dangers(path: &str, before: &str, after: &str) -> Result<Vec<Danger>, CheckLimitExceeded> {
    let found = dangers(path, after)?;
    if found.is_empty() {
        return Ok(found);
    }
    let mut existing: HashMap<(DangerKind, String), usize> = HashMap::new();
    // If the old version exceeds a limit, all dangers count as added.
    for danger in dangers(path, before).unwrap_or_default() {
        *existing.entry((danger.kind, danger.source)).or_default() += 1;
    }
    let added = found.into_iter().filter(|danger| match existing.get_mut(&(danger.kind, danger.source.clone())) {
        Some(remaining) if *remaining > 0 => {
            *remaining -= 1;
            false
        }
        Some(_) | None => true,
    });
    Ok(added.collect())
}

fn dangers(path: &str, text: &str) -> Result<Vec<Danger>, CheckLimitExceeded> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if text.len() > MAX_CHECKED_BYTES {
        return Err(CheckLimitExceeded::Bytes { bytes: text.len() });
    }
    let work = WorkLimit::default();
    let mut found = match Language::of_path(path).or_else(|| shebang_language(path, text)) {
        Some(language) => grammar::dangers(language, text, &work),
        None => patterns::dangers(path, text, &work),
    };
    if !patterns::is_prose(path) {
        found.extend(bidi::dangers(text));
    }
    if work.is_exceeded() { Err(CheckLimitExceeded::Work) } else { Ok(found) }
}

/// Language of a script without a file extension, such as a git hook, by the interpreter in its first line.
fn shebang_language(path: &str, text: &str) -> Option<Language> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let interpreter = text.lines().next()?.strip_prefix("#!").filter(|_| !name.contains('.'))?;
    let mut words = interpreter.split(['/', ' ', '\t']);
    words.find_map(|word| match word.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
        "python" | "pypy" => Some(Language::Python),
        "node" | "nodejs" | "bun" | "deno" => Some(Language::JavaScript),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
