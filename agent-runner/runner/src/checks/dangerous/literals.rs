//! String arguments of calls: adjacent and added literals are joined, and names are replaced by the strings that the
//! file assigns to them (one step; a name assigned from another name is unknown).

use std::collections::HashMap;
use std::ops::Range;

use super::{DangerKind, WorkLimit, shell, sql};

/// Names of functions that run their string arguments as a shell command or program; only the last component of a
/// qualified name.
const SHELL_CALLS: [&str; 49] = [
    "$",
    "Command",
    "CommandContext",
    "NewProcess",
    "Popen",
    "Process",
    "ProcessBuilder",
    "ShellExecute",
    "ShellExecuteA",
    "ShellExecuteW",
    "Start",
    "WinExec",
    "_popen",
    "_wsystem",
    "call",
    "check_call",
    "check_output",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "exec",
    "execFile",
    "execFileSync",
    "execSync",
    "execa",
    "execaCommand",
    "execl",
    "execle",
    "execlp",
    "execlpe",
    "execv",
    "execve",
    "execvp",
    "execvpe",
    "getoutput",
    "getstatusoutput",
    "new",
    "passthru",
    "popen",
    "posix_spawn",
    "posix_spawnp",
    "proc_open",
    "run",
    "sh",
    "shell_exec",
    "spawn",
    "spawnSync",
    "spawnl",
    "spawnv",
    "system",
];

/// Names of functions and macros that run their string arguments as database statements; only the last component of a
/// qualified name.
const DATABASE_CALLS: [&str; 52] = [
    "$queryRawUnsafe",
    "Exec",
    "ExecContext",
    "ExecuteSqlCommand",
    "ExecuteSqlRaw",
    "ExecuteSqlRawAsync",
    "MustExec",
    "MySqlCommand",
    "NpgsqlCommand",
    "PQexec",
    "PQexecParams",
    "Prepare",
    "Query",
    "QueryContext",
    "QueryRow",
    "Raw",
    "SQLiteCommand",
    "SqlCommand",
    "SqliteCommand",
    "addBatch",
    "batch_execute",
    "createNativeQuery",
    "createQuery",
    "exec",
    "execSQL",
    "execute",
    "executeLargeUpdate",
    "executeQuery",
    "executeUpdate",
    "execute_batch",
    "executemany",
    "executescript",
    "mysql_query",
    "mysql_real_query",
    "mysqli_query",
    "pg_query",
    "prepare",
    "prepareStatement",
    "query",
    "queryForObject",
    "query_as",
    "query_scalar",
    "raw",
    "rawQuery",
    "run",
    "sql",
    "sqlite3_exec",
    "sqlite3_prepare",
    "sqlite3_prepare_v2",
    "text",
    "unsafe",
    "update",
];

/// Maximum number of strings that one name may stand for; further ones are ignored.
const MAX_STRINGS_PER_NAME: usize = 8;

/// True if a call with this name runs its string arguments.
pub(super) fn runs_strings(name: &str) -> bool {
    let last = last_component(name);
    SHELL_CALLS.contains(&last) || DATABASE_CALLS.contains(&last)
}

/// Last component of a qualified name.
pub(super) fn last_component(name: &str) -> &str {
    name.rsplit(['.', ':', '>']).next().unwrap_or(name)
}

/// A string literal or a name in an expression, with its position in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Operand {
    pub range: Range<usize>,
    pub value: OperandValue,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OperandValue {
    /// Content of a literal, without its quotes.
    Literal(String),
    Name(String),
}

/// What the names of a file stand for.
#[derive(Debug, Default)]
pub(super) struct Bindings {
    /// Strings assigned to a name.
    strings: HashMap<String, Vec<String>>,
    /// Functions that a name is another name of.
    aliases: HashMap<String, Vec<String>>,
}

impl Bindings {
    pub fn bind_string(&mut self, name: &str, value: String) {
        bind(&mut self.strings, name, value);
    }

    pub fn bind_alias(&mut self, name: &str, target: String) {
        bind(&mut self.aliases, name, target);
    }

    /// The name itself and the names that it stands for.
    pub fn names<'n>(&'n self, name: &'n str) -> impl Iterator<Item = &'n str> {
        std::iter::once(name).chain(self.aliases.get(name).into_iter().flatten().map(String::as_str))
    }
}

fn bind(bindings: &mut HashMap<String, Vec<String>>, name: &str, value: String) {
    let values = bindings.entry(name.to_owned()).or_default();
    if values.len() < MAX_STRINGS_PER_NAME && !values.contains(&value) {
        values.push(value);
    }
}

/// Dangers in the arguments of a call to `name`.
pub(super) fn dangers_in_arguments(
    name: &str,
    operands: &[Operand],
    text: &str,
    bindings: &Bindings,
    work: &WorkLimit,
) -> Vec<DangerKind> {
    let last = last_component(name);
    let (shell, database) = (SHELL_CALLS.contains(&last), DATABASE_CALLS.contains(&last));
    let alternatives = operands.iter().map(|operand| match &operand.value {
        OperandValue::Name(name) => bindings.strings.get(name).map_or(1, Vec::len),
        OperandValue::Literal(_) => 1,
    });
    let mut found = Vec::new();
    for alternative in 0..alternatives.max().unwrap_or(0) {
        let strings = joined(operands, text, bindings, alternative);
        if !work.take(strings.iter().map(String::len).sum()) {
            break;
        }
        if shell {
            found.extend(shell::dangers(&strings.join(" "), work).into_iter().map(|(kind, _)| kind));
        }
        if database {
            let statements = strings.iter().flat_map(|s| sql::destructive(s, sql::SqlSource::Call, work));
            found.extend(statements.map(|(kind, _)| kind));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Strings of an expression, with added and adjacent operands joined. A name without a known string counts as `x` in a
/// sum, and is omitted elsewhere. A name with several strings has the one with the number `alternative`.
pub(super) fn joined(operands: &[Operand], text: &str, bindings: &Bindings, alternative: usize) -> Vec<String> {
    let mut strings: Vec<String> = Vec::new();
    let mut previous: Option<(usize, bool)> = None;
    for Operand { range, value } in operands {
        let known = match value {
            OperandValue::Literal(literal) => Some(literal.as_str()),
            OperandValue::Name(name) => {
                bindings.strings.get(name).map(|values| values[alternative % values.len()].as_str())
            }
        };
        let between = previous.and_then(|(end, _)| text.get(end..range.start)).unwrap_or("(");
        // The arguments of a call in a sum are unknown, but the sum continues after them.
        let is_argument = between.trim_start().starts_with('(');
        let is_sum = !is_argument && is_sum(between);
        match (known, is_sum, previous) {
            (Some(known), true, Some((_, true))) => {
                if let Some(last) = strings.last_mut() {
                    last.push_str(known);
                }
            }
            (Some(known), true, _) => strings.push(format!("x{known}")),
            (Some(known), false, _) => strings.push(known.to_owned()),
            (None, true, Some((_, true))) => {
                if let Some(last) = strings.last_mut() {
                    last.push('x');
                }
            }
            (None, _, _) => {}
        }
        let after_string = previous.is_some_and(|(_, is_string)| is_string);
        let continues = known.is_some() || ((is_sum || is_argument) && after_string);
        previous = Some((range.end, continues));
    }
    strings
}

/// True if the text between two operands adds them.
fn is_sum(between: &str) -> bool {
    let mut operators = between.chars().filter(|c| !c.is_whitespace() && !matches!(c, '(' | ')' | '\\'));
    matches!((operators.next(), operators.next()), (Some('+') | None, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(text: &str) -> Vec<Operand> {
        let mut found = Vec::new();
        let mut at = 0;
        for part in text.split_inclusive(|c: char| !c.is_alphanumeric() && c != '"' && c != '-' && c != '/') {
            let word = part.trim_matches(|c: char| !c.is_alphanumeric() && c != '"' && c != '-' && c != '/');
            if !word.is_empty() {
                let literal = word.starts_with('"');
                let value = word.trim_matches('"').to_owned();
                let value = if literal { OperandValue::Literal(value) } else { OperandValue::Name(value) };
                found.push(Operand { range: at..at + word.len(), value });
            }
            at += part.len();
        }
        found
    }

    #[test]
    fn sums_are_joined_and_known_names_replaced() {
        let mut bindings = Bindings::default();
        bindings.bind_string("a", "one".into());
        bindings.bind_string("a", "two".into());
        for (text, strings) in [
            ("\"x\"+\"y\"", vec!["xy"]),
            ("\"x\"+b+\"y\"", vec!["xxy"]),
            ("b+\"y\"", vec!["xy"]),
            ("b,\"y\",c", vec!["y"]),
            ("a+\"/\"", vec!["one/"]),
            ("\"x\"+f(b)+\"y\"", vec!["xxy"]),
            ("f(\"x\")", vec!["x"]),
        ] {
            assert_eq!(joined(&operands(text), text, &bindings, 0), strings, "{text}");
        }
        assert_eq!(joined(&operands("a"), "a", &bindings, 1), ["two"]);
    }
}
