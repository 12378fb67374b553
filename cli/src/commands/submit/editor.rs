//! `cfq submit --edit`: the description is written in the user's editor: VISUAL, EDITOR, else `vi`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::Command;

use anyhow::Context;

use crate::exit;

/// What the file contains below the description.
const HINT: &str = "\n<!-- Describe the task above this line. Without a text, nothing is submitted. -->\n";

/// The text that the user writes, with `text` as the beginning.
pub fn description(text: &str) -> anyhow::Result<String> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(exit::usage("--edit needs a terminal: use `cfq submit \"...\"`, or standard input"));
    }
    let mut file = tempfile::Builder::new().prefix("cfq-task-").suffix(".md").tempfile()?;
    write!(file, "{text}\n{HINT}")?;
    file.flush()?;
    let editor =
        ["VISUAL", "EDITOR"].into_iter().find_map(|name| std::env::var_os(name).filter(|text| !text.is_empty()));
    let editor = editor.unwrap_or_else(|| OsString::from("vi"));
    let mut command = OsString::from("exec ");
    command.push(&editor);
    command.push(" \"$1\"");
    let status = Command::new("sh").arg("-c").arg(command).arg("sh").arg(file.path()).status();
    let status = status.context("cannot start a shell for the editor")?;
    if !status.success() {
        return Err(exit::failed(format!(
            "the editor {} ended with {status}, so nothing is submitted: set EDITOR to another one",
            editor.to_string_lossy()
        )));
    }
    // Editors may replace the file.
    let written = std::fs::read_to_string(file.path()).context("cannot read the text that the editor wrote")?;
    let description = written.replace(HINT.trim(), "").trim().to_owned();
    if description.is_empty() {
        return Err(exit::usage("there is no description, so nothing is submitted"));
    }
    Ok(description)
}
