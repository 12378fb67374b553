//! Detects calls that run dangerous commands or statements, in languages without a grammar. Calls are found as a name
//! followed by parentheses, in text whose comments and string contents are blank.

use super::literals::{self, Bindings, Operand, OperandValue};
use super::{DangerKind, WorkLimit};

/// Maximum length of the arguments of one call, in bytes.
const MAX_ARGUMENT_BYTES: usize = 20_000;

/// Returns the dangers in the calls of a text, with the positions of the calls. `code` is the text without comments and
/// without the contents of its strings, which are in `uncommented` at the same offsets.
pub(super) fn dangers(
    code: &str,
    uncommented: &str,
    skipped: &[DangerKind],
    work: &WorkLimit,
) -> Vec<(DangerKind, std::ops::Range<usize>)> {
    let bindings = bindings(code, uncommented);
    let mut found = Vec::new();
    for (open, _) in code.match_indices('(') {
        let (start, name) = name_before(code, open);
        let mut names = bindings.names(name).filter(|name| literals::runs_strings(name)).peekable();
        if names.peek().is_none() {
            continue;
        }
        if !work.take(1) {
            break;
        }
        let end = uncommented.floor_char_boundary(closing_parenthesis(code, open, work));
        let operands = operands(&code[open..end], uncommented, open);
        let mut kinds: Vec<DangerKind> = names
            .flat_map(|name| literals::dangers_in_arguments(name, &operands, uncommented, &bindings, work))
            .filter(|kind| !skipped.contains(kind))
            .collect();
        kinds.sort_unstable();
        kinds.dedup();
        found.extend(kinds.into_iter().map(|kind| (kind, start..end)));
    }
    found
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '$')
}

/// The name before an opening parenthesis, with its offset.
fn name_before(code: &str, open: usize) -> (usize, &str) {
    let before = code[..open].trim_end();
    let name = &before[before.trim_end_matches(is_name_char).len()..];
    (before.len() - name.len(), name)
}

/// Offset after the parenthesis that closes the one at `open`.
fn closing_parenthesis(code: &str, open: usize, work: &WorkLimit) -> usize {
    let mut depth = 0usize;
    for (i, c) in code[open..].char_indices().take_while(|(i, _)| *i < MAX_ARGUMENT_BYTES && work.take(1)) {
        match c {
            '(' => depth += 1,
            ')' if depth == 1 => return open + i + 1,
            ')' => depth -= 1,
            _ => {}
        }
    }
    code.len().min(open + MAX_ARGUMENT_BYTES)
}

/// String literals and names in `code`, which begins at `offset` of `uncommented`.
fn operands(code: &str, uncommented: &str, offset: usize) -> Vec<Operand> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at + c.len_utf8()..];
        let (length, value) = match c {
            '"' | '\'' => {
                let length = rest.find(c).unwrap_or(rest.len());
                let start = offset + at + 1;
                let text = uncommented.get(start..start + length).unwrap_or_default();
                (1 + (length + 1).min(rest.len()), Some(OperandValue::Literal(text.to_owned())))
            }
            c if is_name_char(c) => {
                let name = &code[at..code.len() - rest.trim_start_matches(is_name_char).len()];
                (name.len(), Some(OperandValue::Name(name.to_owned())))
            }
            c => (c.len_utf8(), None),
        };
        let range = offset + at..offset + at + length;
        found.extend(value.map(|value| Operand { range, value }));
        at += length;
    }
    found
}

/// Strings and functions that names of the text stand for: `name = "..."`, `name = function;`, and C's `#define`.
fn bindings(code: &str, uncommented: &str) -> Bindings {
    let mut bindings = Bindings::default();
    let mut offset = 0;
    for line in code.split_inclusive('\n') {
        let define = line.trim_start().strip_prefix("#define ").map(str::trim_start);
        let (name, value) = match (define, line.split_once('=')) {
            (Some(define), _) => define.split_once(char::is_whitespace).unwrap_or_default(),
            (None, Some((name, value))) => {
                let name = name.trim_end().trim_end_matches(['[', ']', ':', ' ']);
                (&name[name.trim_end_matches(is_name_char).len()..], value)
            }
            (None, None) => ("", ""),
        };
        // `value` is a slice of `line`.
        let start = offset + (value.as_ptr() as usize).saturating_sub(line.as_ptr() as usize);
        let trimmed = value.trim().trim_end_matches(';').trim_end();
        if !name.is_empty() && trimmed.starts_with(['"', '\'']) {
            let operands = operands(value, uncommented, start);
            let strings = literals::joined(&operands, uncommented, &Bindings::default(), 0);
            bindings.bind_string(name, strings.join(" "));
        } else if !name.is_empty() && literals::runs_strings(trimmed) {
            bindings.bind_alias(name, trimmed.to_owned());
        }
        offset += line.len();
    }
    bindings
}
