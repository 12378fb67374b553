//! `cfq man FOLDER`

use std::path::{Path, PathBuf};

use clap::CommandFactory;
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::Cli;
use crate::exit::{self, Code};
use crate::output::{self, Output};

#[derive(Serialize, JsonSchema)]
pub struct Written {
    folder: PathBuf,
}

/// Writes a manual page for `cfq` and one for each command into the folder, which is created if it does not exist.
pub fn run(out: Output, folder: &Path) -> anyhow::Result<Code> {
    let written = std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    if let Err(error) = written {
        return Err(exit::usage(format!("cannot write manual pages to {}: {error}", folder.display())));
    }
    out.print(&Written { folder: std::path::absolute(folder)? }, |written| {
        let page = output::shell_word(&written.folder.join("cfq.1").to_string_lossy());
        format!("manual pages written; to read one: man {page}")
    })?;
    Ok(Code::Done)
}
