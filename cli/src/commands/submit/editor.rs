//! `cfq submit --edit`: the description is written in the user's editor: VISUAL, EDITOR, else `vi`. The file is kept
//! until the task is submitted, so that no text is lost.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use tempfile::NamedTempFile;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit;
use crate::output;

/// What the file contains below the description.
const HINT: &str = "<!-- The task is described above. Empty: nothing is submitted. -->";

/// A description that the user has written, in its file.
pub struct Description {
    pub text: String,
    file: NamedTempFile,
}

impl Description {
    /// Lets the user write, with `text` as the beginning.
    pub async fn write(text: &str) -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Err(exit::usage("--edit needs a terminal: use `cfq submit \"...\"`, or standard input"));
        }
        let mut file = tempfile::Builder::new().prefix("cfq-task-").suffix(".md").tempfile()?;
        write!(file, "{text}\n\n{HINT}\n")?;
        file.flush()?;
        match edited(file.path()).await {
            Ok(text) if text.is_empty() => Err(exit::usage("there is no description, so nothing is submitted")),
            Ok(text) => Ok(Self { text, file }),
            Err(error) => {
                keep(file);
                Err(error)
            }
        }
    }

    /// Keeps the file, and says where, because its text was not submitted.
    pub fn keep(self) {
        keep(self.file);
    }
}

fn keep(file: NamedTempFile) {
    let written = std::fs::read_to_string(file.path());
    let text = written.as_deref().map(without_hint);
    // A file without a text of the user is not worth keeping; one that cannot be read as text stays as it is.
    if text.as_ref().is_ok_and(String::is_empty) {
        return;
    }
    if let Ok(text) = text {
        drop(std::fs::write(file.path(), text + "\n"));
    }
    if let Ok((_, path)) = file.keep() {
        let path = output::shell_word(&path.to_string_lossy());
        output::print_stderr(&format!(
            "your text is kept; to submit it, use the same flags and: cfq submit - < {path}"
        ));
    }
}

/// Starts the editor, and reads what it has written.
async fn edited(path: &Path) -> anyhow::Result<String> {
    let chosen =
        ["VISUAL", "EDITOR"].into_iter().find_map(|name| std::env::var_os(name).filter(|text| !text.is_empty()));
    let editor = chosen.unwrap_or_else(|| OsString::from("vi"));
    let mut command = OsString::from("exec ");
    command.push(&editor);
    command.push(" \"$1\"");
    // Ctrl-C is for the editor.
    let _interrupt = signal(SignalKind::interrupt())?;
    let mut child = Command::new("sh");
    child.arg("-c").arg(command).arg("sh").arg(path);
    let status = tokio::task::spawn_blocking(move || child.status()).await?;
    let status = status.context("cannot start a shell for the editor")?;
    if !status.success() {
        let editor = editor.to_string_lossy();
        return Err(exit::failed(match status.code() {
            Some(126 | 127) => format!("the editor {editor} cannot be started: set EDITOR to one that is installed"),
            _ => format!("the editor {editor} ended with {status}, so nothing is submitted"),
        }));
    }
    // Editors may replace the file.
    let written = std::fs::read_to_string(path).context("cannot read the text that the editor wrote")?;
    Ok(without_hint(&written))
}

/// The text above the hint, which an editor may have broken into several lines.
fn without_hint(written: &str) -> String {
    let start = HINT.split(' ').take(3).collect::<Vec<_>>().join(" ");
    written.rsplit_once(&start).map_or(written, |(above, _)| above).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_is_not_a_part_of_the_description() {
        assert_eq!(without_hint(&format!("Write it.\n\n# Notes\n\n{HINT}\n")), "Write it.\n\n# Notes");
        assert_eq!(without_hint("<!-- The task is\ndescribed above. -->"), "");
        assert_eq!(without_hint(" \n"), "");
        assert_eq!(without_hint("Write it."), "Write it.");
        let own = "<!-- The task is a comment -->\nWrite it.";
        assert_eq!(without_hint(&format!("{own}\n{HINT}")), own);
    }
}
