//! Long output on a terminal goes through a pager, as `git diff` does it: CFQ_PAGER, else PAGER, else `less`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

use crate::output;

/// Prints the text, through a pager if stdout is a terminal and a pager is wanted.
pub async fn print(text: &str, wanted: bool) -> anyhow::Result<()> {
    let pager = if wanted && std::io::stdout().is_terminal() { pager() } else { None };
    let Some(pager) = pager else {
        output::print_line(text);
        return Ok(());
    };
    let mut command = Command::new("sh");
    command.arg("-c").arg(&pager).stdin(Stdio::piped());
    // As git does: less leaves a short text on the screen, and shows colours.
    for (name, value) in [("LESS", "FRX"), ("LV", "-c")] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    let Ok(mut child) = command.spawn() else {
        output::print_line(text);
        return Ok(());
    };
    // Ctrl-C is for the pager.
    let _interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    if let Some(mut input) = child.stdin.take() {
        // A user who has seen enough closes the pager.
        drop(input.write_all(text.as_bytes()).and_then(|()| input.write_all(b"\n")));
    }
    let status = child.wait()?;
    if status.code() == Some(127) {
        let pager = pager.to_string_lossy().into_owned();
        output::print_stderr(&format!("cfq: cannot start the pager {pager:?}: set PAGER, or use --no-pager"));
        output::print_line(text);
    }
    Ok(())
}

fn pager() -> Option<OsString> {
    let chosen = ["CFQ_PAGER", "PAGER"].into_iter().find_map(std::env::var_os);
    chosen_pager(chosen, is_installed("less"))
}

/// The command of the pager; `None` if the text is printed directly.
fn chosen_pager(chosen: Option<OsString>, has_less: bool) -> Option<OsString> {
    match chosen {
        Some(pager) => Some(pager).filter(|pager| !pager.is_empty() && pager != "cat"),
        None => has_less.then(|| "less".into()),
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_pager_and_cat_print_directly() {
        assert_eq!(chosen_pager(None, true), Some("less".into()));
        assert_eq!(chosen_pager(None, false), None);
        assert_eq!(chosen_pager(Some("more -s".into()), true), Some("more -s".into()));
        for direct in ["", "cat"] {
            assert_eq!(chosen_pager(Some(direct.into()), true), None, "{direct:?}");
        }
    }
}
