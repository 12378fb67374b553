//! Output of the commands; no other module prints. stdout carries results, stderr carries messages; with `--json`,
//! results are JSON, one value per line.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod lines;

use std::io::Write;

use cfq_proto::review::CheckRun;
use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible, visible_json};
use schemars::JsonSchema;
use serde::Serialize;

use crate::exit::Code;
use crate::json_times;

#[cfg(test)]
pub use lines::at_widths;
pub use lines::{
    Column, Line, Tone, View, blank_line, cut_rows, fitted_table, list_lines, paint, plain_lines, rows, table,
};

#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// Prints one result: as JSON, whose schema `cfq schema` prints, or as the text from `human`, which is sanitized because it may contain a model's
    /// text.
    pub fn print<T: Serialize + JsonSchema>(&self, value: &T, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        let text = if self.json { json(value)? } else { sanitize(&human(value)) };
        print_line(&text);
        Ok(())
    }

    /// Prints one result: as JSON, or as lines, with colours and in the width of the terminal.
    pub fn print_lines<T: Serialize + JsonSchema>(
        &self,
        value: &T,
        human: impl FnOnce(&T) -> Vec<Line>,
    ) -> anyhow::Result<()> {
        let text = match self.json {
            true => json(value)?,
            false => paint(&human(value), terminal_columns(), console::colors_enabled()),
        };
        print_line(&text);
        Ok(())
    }

    /// Prints a list: as a JSON object with the list under `key`, or as the lines from `human`.
    pub fn print_list<T: Serialize + JsonSchema>(
        &self,
        key: &str,
        items: &[T],
        human: impl FnOnce(&[T]) -> Vec<Line>,
    ) -> anyhow::Result<()> {
        self.print_lines(&std::collections::BTreeMap::from([(key, items)]), |_| human(items))
    }

    /// Prints a status message to stderr; silent with `--json`.
    pub fn status(&self, text: &str) {
        if !self.json {
            print_message(text);
        }
    }
}

/// Width of the terminal; `None` if stdout is no terminal.
pub fn terminal_columns() -> Option<usize> {
    console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns))
}

/// Prints a line to stdout.
pub fn print_line(text: &str) {
    let mut out = std::io::stdout().lock();
    exit_on_error(out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()));
}

/// Prints text to stdout without a line end.
pub fn print_raw(text: &str) {
    print_bytes(text.as_bytes());
}

/// Prints bytes to stdout as they are.
pub fn print_bytes(bytes: &[u8]) {
    let mut out = std::io::stdout().lock();
    exit_on_error(out.write_all(bytes).and_then(|()| out.flush()));
}

/// Ends the process if stdout cannot be written: successfully if a pipe was closed (`cfq ls | head`), else with an
/// error, because the output is incomplete.
fn exit_on_error(written: std::io::Result<()>) {
    match written {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            print_stderr(&format!("cfq: cannot write the output: {error}"));
            std::process::exit(i32::from(Code::Failed as u8));
        }
    }
}

/// Prints a text to stderr, sanitized and in the width of the terminal.
pub fn print_message(text: &str) {
    let columns = console::Term::stderr().size_checked().map(|(_, columns)| usize::from(columns));
    print_stderr(&paint(&plain_lines(text), columns, false));
}

/// Prints a line to stderr.
pub fn print_stderr(text: &str) {
    // A closed stderr leaves no place to report the failure.
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}

/// Shows control characters, except line ends and tabs, and invisible characters as code points such as `<U+001B>`:
/// text of a model or a repository must not control the terminal or hide a part of itself.
pub fn sanitize(text: &str) -> String {
    visible(&text.replace("\r\n", "\n"), TERMINAL_CHARACTERS).into_owned()
}

/// The text in one line, for a cell of a table or a line of several texts.
pub fn one_line(text: &str) -> String {
    sanitize(text).replace(['\n', '\t'], " ")
}

/// How a check of the project ended, in one line: tests that failed on the base commit too, and flaky ones, are named.
pub fn check_run(run: &CheckRun) -> String {
    let end = if run.passed { "passed" } else { "failed" };
    let (name, sandbox) = (sanitize(&run.name), sanitize(&run.sandbox));
    let mut text = format!("{name} {end} in {:.1} s ({sandbox}", run.ms as f64 / 1000.0);
    if let Some(tests) = run.tests {
        text.push_str(&format!(", {}", count(tests as usize, "test")));
    }
    if let Some(coverage) = run.coverage {
        text.push_str(&format!(", covers {coverage}"));
    }
    text.push(')');
    for (names, what) in [(&run.known_failures, "known failures"), (&run.flaky, "flaky")] {
        if !names.is_empty() {
            text.push_str(&format!("; {what}: {}", sanitize(&names.to_string())));
        }
    }
    text.replace('\n', " ")
}

/// How checks of the project ended, in one line.
pub fn check_runs(runs: &[CheckRun]) -> String {
    runs.iter().map(check_run).collect::<Vec<_>>().join(", ")
}

/// Indents all lines except the first, so that they are recognized as its continuation.
pub fn indent_rest(text: &str) -> String {
    text.replace('\n', "\n          ")
}

/// One line of JSON, with the same characters escaped, and with times as RFC 3339.
pub fn json<T: Serialize>(value: &T) -> serde_json::Result<String> {
    let mut value = serde_json::to_value(value)?;
    json_times::to_rfc_3339(&mut value);
    Ok(visible_json(&serde_json::to_string(&value)?).into_owned())
}

/// Items, separated by commas.
pub fn list<T: std::fmt::Display>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A number with its noun: `1 defect`, `2 defects`.
pub fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// A duration for display: `0.4 s`, `12 s`, `3 min`.
pub fn duration(ms: u64) -> String {
    match ms {
        0..=9_999 => format!("{:.1} s", ms as f64 / 1000.0),
        10_000..=119_999 => format!("{} s", ms / 1000),
        _ => format!("{} min", ms / 60_000),
    }
}

/// An age in seconds for display: `40 s`, `12 min`, `5 h`, `3 d`.
pub fn age(seconds: i64) -> String {
    match seconds.max(0) {
        seconds @ 0..=119 => format!("{seconds} s"),
        seconds @ 120..=7_199 => format!("{} min", seconds / 60),
        seconds @ 7_200..=172_799 => format!("{} h", seconds / 3_600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// The text as one word of a POSIX shell.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::review::{LineCoverage, TestNames};

    use super::*;

    #[test]
    fn check_run_names_known_and_flaky_failures() {
        let mut run = CheckRun {
            name: "tests".into(),
            passed: true,
            sandbox: "namespaces".into(),
            ms: 1_250,
            tests: None,
            coverage: None,
            known_failures: TestNames::default(),
            flaky: TestNames::default(),
        };
        assert_eq!(check_run(&run), "tests passed in 1.2 s (namespaces)");
        (run.passed, run.tests) = (false, Some(1));
        run.coverage = Some(LineCoverage { covered: 1_999, total: 2_000 });
        run.known_failures = TestNames { count: 3, names: vec!["a".into(), "b\nc".into()] };
        run.flaky = TestNames { count: 1, names: vec!["d\u{1b}".into()] };
        let expected = "tests failed in 1.2 s (namespaces, 1 test, covers 99.9 % of 2000 lines); known failures: a, b c, and 1 more; flaky: d<U+001B>";
        assert_eq!(check_run(&run), expected);
    }

    #[test]
    fn age_is_shown_in_one_unit() {
        let shown = [-5, 0, 119, 120, 7_199, 7_200, 172_799, 172_800].map(age);
        assert_eq!(shown, ["0 s", "0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]);
    }

    #[test]
    fn control_and_invisible_characters_are_shown() {
        assert_eq!(sanitize("a\x1b[2Jb\r\n\tc\r\u{202e}"), "a<U+001B>[2Jb\n\tc<U+000D><U+202E>");
        assert_eq!(json(&"\x1b\u{202e}").unwrap(), r#""\u001b\u202e""#);
    }

    #[test]
    fn shell_word_is_quoted_if_a_shell_would_change_it() {
        for (text, word) in [
            ("/home/a/t1.tar.zst", "/home/a/t1.tar.zst"),
            ("my file", "'my file'"),
            ("it's $HOME", r"'it'\''s $HOME'"),
            ("", "''"),
            ("~/a", "'~/a'"),
        ] {
            assert_eq!(shell_word(text), word);
        }
    }
}
