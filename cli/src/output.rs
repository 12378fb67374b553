//! Output of the commands; no other module prints. stdout carries results, stderr carries messages; with `--json`,
//! results are JSON, one value per line.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::Write;

use cfq_proto::review::CheckRun;
use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible, visible_json};
use serde::Serialize;

use crate::exit::Code;
use crate::json_times;

#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// Prints one result: as JSON, or as the text from `human`, which is sanitized because it may contain a model's
    /// text.
    pub fn print<T: Serialize>(&self, value: &T, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        let text = if self.json { json(value)? } else { sanitize(&human(value)) };
        print_line(&text);
        Ok(())
    }

    /// Prints one result: as JSON, or as lines with colours, which a terminal cuts.
    pub fn print_lines<T: Serialize>(&self, value: &T, human: impl FnOnce(&T) -> Vec<Line>) -> anyhow::Result<()> {
        let text = match self.json {
            true => json(value)?,
            false => paint(&human(value), terminal_columns(), console::colors_enabled()),
        };
        print_line(&text);
        Ok(())
    }

    /// Prints a list: as a JSON object with the list under `key`, or as the text from `human`.
    pub fn print_list<T: Serialize>(
        &self,
        key: &str,
        items: &[T],
        human: impl FnOnce(&[T]) -> String,
    ) -> anyhow::Result<()> {
        self.print(&std::collections::BTreeMap::from([(key, items)]), |_| human(items))
    }

    /// Prints a status message to stderr; silent with `--json`.
    pub fn status(&self, text: &str) {
        if !self.json {
            print_stderr(&sanitize(text));
        }
    }
}

/// A line of a text for a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub tone: Tone,
}

/// What a line says, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Heading,
    Good,
    Bad,
    /// A human is needed.
    NeedsUser,
    /// Ended without a result.
    Faint,
}

/// The lines of a text without colours.
pub fn plain_lines(text: &str) -> Vec<Line> {
    text.lines().map(|line| Line { text: line.to_owned(), tone: Tone::Plain }).collect()
}

/// The lines as one text: sanitized, cut to the width of a terminal, and coloured if the terminal shows colours.
pub fn paint(lines: &[Line], columns: Option<usize>, is_coloured: bool) -> String {
    let paint = |line: &Line| {
        let text = sanitize(&line.text);
        let text = match columns {
            Some(columns) => console::truncate_str(&text, columns.max(1), "…").into_owned(),
            None => text,
        };
        let style = console::Style::new().force_styling(true);
        let style = match line.tone {
            _ if !is_coloured => return text,
            Tone::Plain => return text,
            Tone::Heading => style.bold(),
            Tone::Good => style.green(),
            Tone::Bad => style.red(),
            Tone::NeedsUser => style.yellow(),
            Tone::Faint => style.dim(),
        };
        style.apply_to(text).to_string()
    };
    lines.iter().map(paint).collect::<Vec<_>>().join("\n")
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

/// Prints a line to stderr.
pub fn print_stderr(text: &str) {
    // A closed stderr leaves no place to report the failure.
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}

/// A table whose columns are as wide as their widest cell, without trailing spaces.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(console::measure_text_width(cell));
        }
    }
    let render = |cells: Vec<&str>| {
        let mut text = String::new();
        for (i, cell) in cells.iter().enumerate() {
            text.push_str(cell);
            if i + 1 < cells.len() {
                let pad = widths[i].saturating_sub(console::measure_text_width(cell)) + 2;
                text.push_str(&" ".repeat(pad));
            }
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![render(header.to_vec())];
    lines.extend(rows.iter().map(|row| render(row.iter().map(String::as_str).collect())));
    lines.join("\n")
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

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub name: &'static str,
    /// The columns with the highest number are left out first on a narrow terminal; those with 0 never.
    pub expendable: u8,
}

/// Minimum width of the last column of a table, for which others are left out.
const MIN_LAST_COLUMN: usize = 24;

/// A table as in [`table`], with those columns of which enough fit beside each other, so that the last one has a usable
/// width.
pub fn fitted_table(columns: &[Column], rows: &[Vec<String>], terminal: Option<usize>) -> Vec<String> {
    let width = |n: usize| {
        let cells = rows.iter().filter_map(|row| row.get(n)).map(|cell| console::measure_text_width(cell));
        cells.chain([columns[n].name.len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    if let Some(terminal) = terminal {
        let needed = |shown: &[usize]| -> usize {
            let before = shown.split_last().map_or(0, |(_, rest)| rest.iter().map(|n| widths[*n] + 2).sum());
            before + shown.last().map_or(0, |last| widths[*last].min(MIN_LAST_COLUMN))
        };
        while needed(&shown) > terminal {
            let least = shown.iter().copied().filter(|n| columns[*n].expendable > 0);
            let Some(least) = least.max_by_key(|n| columns[*n].expendable) else { break };
            shown.retain(|n| *n != least);
        }
    }
    let header: Vec<&str> = shown.iter().map(|n| columns[*n].name).collect();
    let select = |row: &Vec<String>| shown.iter().map(|n| row.get(*n).cloned().unwrap_or_default()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(select).collect();
    table(&header, &rows).split('\n').map(str::to_owned).collect()
}

/// A list of columns (each with its [`Column::expendable`]) that fits the terminal, with long lines cut; whole without a
/// terminal.
pub fn list_table(columns: &[(&'static str, u8)], rows: &[Vec<String>], terminal: Option<usize>) -> String {
    let columns: Vec<Column> =
        columns.iter().map(|(name, expendable)| Column { name, expendable: *expendable }).collect();
    let lines = fitted_table(&columns, rows, terminal);
    let lines: Vec<Line> = lines.into_iter().map(|text| Line { text, tone: Tone::Plain }).collect();
    paint(&lines, terminal, false)
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
    use cfq_proto::review::TestNames;

    use super::*;

    #[test]
    fn check_run_names_known_and_flaky_failures() {
        let mut run = CheckRun {
            name: "tests".into(),
            passed: true,
            sandbox: "namespaces".into(),
            ms: 1_250,
            tests: None,
            known_failures: TestNames::default(),
            flaky: TestNames::default(),
        };
        assert_eq!(check_run(&run), "tests passed in 1.2 s (namespaces)");
        (run.passed, run.tests) = (false, Some(1));
        run.known_failures = TestNames { count: 3, names: vec!["a".into(), "b\nc".into()] };
        run.flaky = TestNames { count: 1, names: vec!["d\u{1b}".into()] };
        let expected =
            "tests failed in 1.2 s (namespaces, 1 test); known failures: a, b c, and 1 more; flaky: d<U+001B>";
        assert_eq!(check_run(&run), expected);
    }

    #[test]
    fn age_is_shown_in_one_unit() {
        let shown = [-5, 0, 119, 120, 7_199, 7_200, 172_799, 172_800].map(age);
        assert_eq!(shown, ["0 s", "0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]);
    }

    #[test]
    fn wide_lines_are_cut() {
        let lines = plain_lines("TASK  TITLE\nt1    a longer title\nt2    名前の長い題");
        assert_eq!(paint(&lines, Some(12), false), "TASK  TITLE\nt1    a lon…\nt2    名前…");
    }

    #[test]
    fn colours_are_added_around_sanitized_text() {
        let lines =
            [Line { text: "t1 \u{1b}[2J".into(), tone: Tone::Bad }, Line { text: "t2".into(), tone: Tone::Plain }];
        assert_eq!(paint(&lines, None, true), "\u{1b}[31mt1 <U+001B>[2J\u{1b}[0m\nt2");
    }

    #[test]
    fn narrow_table_leaves_columns_out() {
        let column = |name, expendable| Column { name, expendable };
        let columns = [column("TASK", 0), column("LOOP", 2), column("PRIO", 1), column("TITLE", 0)];
        let row = vec!["t1".to_owned(), "generating".to_owned(), "P2".to_owned(), "x".repeat(40)];
        let header = |terminal| fitted_table(&columns, std::slice::from_ref(&row), terminal)[0].clone();
        assert_eq!(header(None), "TASK  LOOP        PRIO  TITLE");
        assert_eq!(header(Some(48)), "TASK  LOOP        PRIO  TITLE");
        assert_eq!(header(Some(47)), "TASK  PRIO  TITLE");
        assert_eq!(header(Some(20)), "TASK  TITLE");
    }

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let text =
            table(&["TASK", "STATE"], &[vec!["t1".into(), "merged".into()], vec!["t1234".into(), "ready".into()]]);
        assert_eq!(text, "TASK   STATE\nt1     merged\nt1234  ready");
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
