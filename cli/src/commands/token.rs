//! `cfq token path` prints the path of the API token; `cfq token rotate` replaces the token. The running scheduler notices the new file by itself. No
//! request is sent, because the owner of the data folder may do this; it also works while the server is stopped.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_deploy::{Paths, files};
use cfq_link::child::Account;
use serde::Serialize;

use crate::args::TokenCommand;
use crate::connect;
use crate::exit::{self, Code};
use crate::output::Output;

#[derive(Serialize)]
struct TokenPath {
    token_file: PathBuf,
}

#[derive(Serialize)]
struct Rotated {
    token_file: PathBuf,
}

pub fn run(out: Output, paths: &Paths, command: TokenCommand) -> anyhow::Result<Code> {
    match command {
        TokenCommand::Path => path(out, paths),
        TokenCommand::Rotate => rotate(out, paths),
    }
}

fn path(out: Output, paths: &Paths) -> anyhow::Result<Code> {
    let token_file = connect::token_file(&paths.data);
    match std::fs::metadata(&token_file) {
        Ok(_) => out.print(&TokenPath { token_file }, |path| path.token_file.display().to_string())?,
        Err(error) => return Err(no_token(paths, &token_file, &error)),
    }
    Ok(Code::Done)
}

/// Why the token's file cannot be used.
fn no_token(paths: &Paths, token_file: &Path, error: &std::io::Error) -> anyhow::Error {
    if error.kind() == std::io::ErrorKind::NotFound {
        return exit::usage(format!("{} has no API token yet: `cfq up` creates one", paths.data.display()));
    }
    exit::usage(format!("cannot read {} ({error}): run this as the user who started cfq", token_file.display()))
}

fn rotate(out: Output, paths: &Paths) -> anyhow::Result<Code> {
    if let Some(url) = connect::foreign_url(&paths.data) {
        return Err(exit::usage(format!(
            "CFQ_URL is {url}, not the local server of {}: run this on the machine of that server, or unset CFQ_URL to \
             replace the token of the local server",
            paths.data.display()
        )));
    }
    let token_file = connect::token_file(&paths.data);
    let old = std::fs::metadata(&token_file).map_err(|error| no_token(paths, &token_file, &error))?;
    // The file keeps its owner if root rotates the token of another user.
    let owner = Account { uid: old.uid(), gid: old.gid() };
    files::write_private(&token_file, files::random_password()?.as_bytes(), Some(owner))?;
    out.print(&Rotated { token_file }, |rotated| {
        format!(
            "the new API token is in {}; the old one no longer works\nset CFQ_TOKEN again where you use it; the commands \
             on this machine read the new token by themselves",
            rotated.token_file.display()
        )
    })?;
    Ok(Code::Done)
}
