//! `cfq diff TASK`

mod between;
mod pager;

use std::io::IsTerminal;

use cfq_proto::client::Client;
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::loop_step::Artifact;
use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use console::Style;
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::DiffArgs;
use crate::exit::{Code, usage};
use crate::file_diffs::{self, Section, encode_diff, sections};
use crate::output::{self, Output};

/// Width of the table of `--stat` without a terminal, as in git.
const STAT_COLUMNS: usize = 80;

/// A changed file, for `--stat` and `--name-only` with `--json`.
#[derive(Serialize, JsonSchema)]
pub struct ChangedFile {
    path: String,
    added: usize,
    removed: usize,
}

#[derive(Serialize, JsonSchema)]
pub struct ChangedFiles {
    /// Number of the task.
    number: TaskNumber,
    files: Vec<ChangedFile>,
}

/// The difference between two iterations, with `--json`.
#[derive(Serialize, JsonSchema)]
pub struct Difference {
    number: TaskNumber,
    from: u32,
    iteration: u32,
    diff: String,
}

pub async fn run(client: &Client, out: Output, args: DiffArgs) -> anyhow::Result<Code> {
    let (number, artifact) = artifact(client, args.task, args.iteration).await?;
    let between = match args.from {
        None => None,
        Some(from) => {
            let (_, earlier) = self::artifact(client, args.task, Some(from)).await?;
            Some(between::diff_between(&earlier, &artifact)?)
        }
    };
    let (mut artifact, mut between) = (artifact, between);
    if !args.paths.is_empty() {
        match &mut between {
            Some(between) => select(&mut between.text, &mut between.windows_1252, &args.paths)?,
            None => select(&mut artifact.diff, &mut artifact.windows_1252_in_diff, &args.paths)?,
        }
    }
    let diff = between.as_ref().map_or(&artifact.diff, |between| &between.text);
    if args.stat || args.name_only {
        print_files(out, number, &sections(diff), args.stat)?;
        return Ok(Code::Done);
    }
    if out.json {
        match (args.from, between) {
            (Some(from), Some(between)) => {
                let diff = between.text;
                out.print(&Difference { number, from, iteration: artifact.iteration, diff }, |_| String::new())?;
            }
            _ => out.print(&artifact, |_| String::new())?,
        }
    } else if std::io::stdout().is_terminal() || args.color.is_some_and(|when| when.colors(false)) {
        let is_coloured =
            args.color.map_or_else(console::colors_enabled, |when| when.colors(console::colors_enabled()));
        pager::print(&for_terminal(diff, is_coloured), !args.no_pager).await?;
    } else {
        // Other programs, such as `git apply`, need the exact bytes.
        let encoded = between.as_ref().map_or(&artifact.windows_1252_in_diff, |between| &between.windows_1252);
        output::print_bytes(&encode_diff(diff, encoded));
    }
    Ok(Code::Done)
}

/// Keeps the changes of these files, and of the files in these folders.
fn select(diff: &mut String, windows_1252: &mut Vec<u32>, paths: &[String]) -> anyhow::Result<()> {
    let all = sections(diff);
    let (mut text, mut encoded, mut kept) = (String::new(), Vec::new(), 0);
    let mut used = vec![false; paths.len()];
    for (n, section) in (0..).zip(&all) {
        let is_in = |path: &String| {
            let path = path.trim_start_matches("./").trim_end_matches('/');
            path.is_empty()
                || path == "."
                || section.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let matching: Vec<usize> = (0..paths.len()).filter(|n| is_in(&paths[*n])).collect();
        matching.iter().for_each(|n| used[*n] = true);
        if !matching.is_empty() {
            text += section.text;
            encoded.extend(windows_1252.contains(&n).then_some(kept));
            kept += 1;
        }
    }
    if let Some(unused) = (0..paths.len()).find(|n| !used[*n]) {
        let changed: Vec<String> = all.iter().map(|section| output::one_line(&section.path)).collect();
        let path = output::one_line(&paths[unused]);
        return Err(usage(format!("nothing in {path} is changed; the changed files are {}", changed.join(", "))));
    }
    (*diff, *windows_1252) = (text, encoded);
    Ok(())
}

async fn artifact(client: &Client, task: TaskKey, iteration: Option<u32>) -> anyhow::Result<(TaskNumber, Artifact)> {
    let chain = client.artifacts(task, iteration).await?;
    let missing = || usage(format!("{task} has no result yet; follow it with `cfq watch {task}`"));
    let number = chain.number;
    chain.artifacts.into_iter().next_back().map(|artifact| (number, artifact)).ok_or_else(missing)
}

/// Prints the names of the changed files, with the number of changed lines if `with_lines`.
fn print_files(out: Output, number: TaskNumber, sections: &[Section<'_>], with_lines: bool) -> anyhow::Result<()> {
    let file = |section: &Section<'_>| {
        let lines = section.changed_lines();
        ChangedFile { path: section.path.clone(), added: lines.added, removed: lines.removed }
    };
    let files = ChangedFiles { number, files: sections.iter().map(file).collect() };
    let columns = console::Term::stdout().size_checked().map_or(STAT_COLUMNS, |(_, columns)| usize::from(columns));
    out.print(&files, |files| match with_lines {
        true => file_diffs::stat(sections, columns),
        false => {
            let one_line = |file: &ChangedFile| output::one_line(&file.path);
            files.files.iter().map(one_line).collect::<Vec<_>>().join("\n")
        }
    })
}

/// The diff with visible control characters, also those at the ends of lines, which may be the only change, and with the
/// colours of git.
fn for_terminal(diff: &str, is_coloured: bool) -> String {
    let text = visible(diff.strip_suffix('\n').unwrap_or(diff), TERMINAL_CHARACTERS);
    if !is_coloured {
        return text.into_owned();
    }
    let mut in_hunk = false;
    let mut paint = |line: &str| {
        if line.starts_with("diff --git ") {
            in_hunk = false;
        }
        let style = match line.as_bytes().first() {
            Some(b'@') => {
                in_hunk = true;
                Style::new().cyan()
            }
            Some(b'+') if in_hunk => Style::new().green(),
            Some(b'-') if in_hunk => Style::new().red(),
            Some(_) if !in_hunk => Style::new().bold(),
            _ => return line.to_owned(),
        };
        style.force_styling(true).apply_to(line).to_string()
    };
    text.split('\n').map(&mut paint).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_shows_changed_line_ends_and_blank_context_lines() {
        assert_eq!(for_terminal("-a\n+a\r\n+\u{202e}\n \n \n", false), "-a\n+a<U+000D>\n+<U+202E>\n \n ");
    }

    #[test]
    fn colours_are_those_of_the_kind_of_line() {
        let text = for_terminal("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- a\n+\u{1b}[2J\n c\n", true);
        let lines: Vec<&str> = text.split('\n').collect();
        assert!(lines[..3].iter().all(|line| line.starts_with("\u{1b}[1m")), "{text:?}");
        assert_eq!(lines[4], "\u{1b}[31m--- a\u{1b}[0m");
        assert_eq!(lines[5], "\u{1b}[32m+<U+001B>[2J\u{1b}[0m", "an escape of the file is shown");
        assert_eq!(lines[6], " c");
    }
}
