//! The only place that prints. stdout is data, stderr is talk; with `--json` data is one JSON value a line.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::Write;

use serde::Serialize;

use crate::exit::Code;

#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// One result: JSON, or the lines a person reads, which may hold words of a model.
    pub fn data<T: Serialize>(&self, value: &T, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        let text = if self.json { serde_json::to_string(value)? } else { plain(&human(value)) };
        line(&text);
        Ok(())
    }

    /// Progress and advice; silent where only data is wanted.
    pub fn talk(&self, text: &str) {
        if !self.json {
            talk(text);
        }
    }
}

pub fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    settle(out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()));
}

/// Text without a line end, as it is generated.
pub fn raw(text: &str) {
    let mut out = std::io::stdout().lock();
    settle(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

/// A closed pipe (`cfq ls | head`) has seen enough. Any other failure is one: what was asked for is not all there.
fn settle(written: std::io::Result<()>) {
    match written {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            talk(&format!("cfq: cannot write the output: {error}"));
            std::process::exit(i32::from(Code::Failed as u8));
        }
    }
}

pub fn talk(text: &str) {
    // Nowhere is left to complain when stderr is closed.
    drop(writeln!(std::io::stderr().lock(), "{text}"));
}

/// Columns as wide as their widest cell; the last one ends where it ends.
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

/// What comes from a model or a repository is shown without its control characters: it must not drive the terminal.
pub fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// `1 defect`, `2 defects`.
pub fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Duration for people: `0.4 s`, `12 s`, `3 min`.
pub fn duration(ms: u64) -> String {
    match ms {
        0..=9_999 => format!("{:.1} s", ms as f64 / 1000.0),
        10_000..=119_999 => format!("{} s", ms / 1000),
        _ => format!("{} min", ms / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_nothing_trails() {
        let text =
            table(&["TASK", "STATE"], &[vec!["t1".into(), "merged".into()], vec!["t1234".into(), "ready".into()]]);
        assert_eq!(text, "TASK   STATE\nt1     merged\nt1234  ready");
    }

    #[test]
    fn a_model_cannot_drive_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\n\tc\r"), "a[2Jb\n\tc");
    }
}
