//! `cfq mcp` and `cfq mcp install`.

use std::io::IsTerminal;
use std::path::Path;

use cfq_deploy::Paths;

use crate::exit::Code;
use crate::mcp::{self, McpClient};
use crate::output::Output;

/// Serves an MCP client on stdin and stdout. Nothing else may write to stdout meanwhile.
pub async fn serve(out: Output, paths: &Paths) -> anyhow::Result<Code> {
    if std::io::stdin().is_terminal() {
        out.status(
            "cfq mcp is started by an editor: `cfq mcp install --client claude-code` configures one; Ctrl-C ends it",
        );
    }
    mcp::serve_stdio(paths).await?;
    Ok(Code::Done)
}

pub fn install(out: Output, data: &Path, client: McpClient, print: bool) -> anyhow::Result<Code> {
    let installed = mcp::install(client, data, print)?;
    let file = installed.file.display().to_string();
    out.print(&installed, |installed| match (print, installed.written) {
        (true, _) => installed.entry.trim_end().to_owned(),
        (false, true) => format!("added cfq to {file}"),
        (false, false) => format!("{file} has cfq already"),
    })?;
    match print {
        true => out.status(&format!("add this to {file}")),
        false => out.status(&format!("restart {}, then ask it to delegate a task to cfq", client.title())),
    }
    Ok(Code::Done)
}
