//! `cfq token path` prints the path of the API token; `cfq token rotate` replaces the token. The running scheduler notices
//! the new file by itself. No request is sent, because the owner of the data folder may do this; it also works while the
//! server is stopped. `cfq token create` asks the server for a token with which a machine can join.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_deploy::{Paths, files};
use cfq_link::child::Account;
use cfq_proto::client::Client;
use cfq_proto::http::{JoinTokenReply, JoinTokenRequest, JoinTokenView};
use cfq_proto::ids::NodeId;
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use crate::connect;
use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Line, Output, Tone};

/// How long the join token that `cfq up --lan` prints is valid.
pub const DEFAULT_JOIN_TTL: Duration = Duration::from_secs(30 * 60);

#[derive(Serialize, JsonSchema)]
pub struct TokenPath {
    token_file: PathBuf,
}

#[derive(Serialize, JsonSchema)]
pub struct Rotated {
    token_file: PathBuf,
}

pub fn path(out: Output, paths: &Paths) -> anyhow::Result<Code> {
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

pub fn rotate(out: Output, paths: &Paths) -> anyhow::Result<Code> {
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
             on this machine read the new token by themselves; join tokens stay valid (`cfq token rm --all`)",
            rotated.token_file.display()
        )
    })?;
    Ok(Code::Done)
}

/// A join token, and the command that uses it.
#[derive(Serialize, JsonSchema)]
pub struct JoinCommand {
    /// The command for the other machine.
    pub command: String,
    #[serde(flatten)]
    token: JoinTokenReply,
}

pub async fn create(client: &Client, out: Output, name: Option<NodeId>, ttl: Duration) -> anyhow::Result<Code> {
    let join = new_join_command(client, name, ttl).await?;
    out.print(&join, |join| join.command.clone())?;
    let further = match &join.token.urls[..] {
        [_, further @ ..] if !further.is_empty() => {
            format!("; if it cannot reach that address: {}", further.join(", "))
        }
        _ => String::new(),
    };
    out.status(&format!(
        "run this on the other machine; it works once, until {}{further}",
        local_time::describe(join.token.expires_at)
    ));
    Ok(Code::Done)
}

pub async fn list(client: &Client, out: Output) -> anyhow::Result<Code> {
    out.print_list("tokens", &client.join_tokens().await?, |tokens| render(tokens, output::terminal_columns()))?;
    Ok(Code::Done)
}

pub(super) fn render(tokens: &[JoinTokenView], terminal: Option<usize>) -> Vec<Line> {
    if tokens.is_empty() {
        return output::plain_lines("no join token can be used; `cfq token create` creates one");
    }
    let row = |token: &JoinTokenView| {
        let name = token.name.as_ref().map_or_else(|| "(any)".to_owned(), NodeId::to_string);
        vec![token.id.to_string(), local_time::describe(token.expires_at), name]
    };
    let columns = [("TOKEN", 0), ("EXPIRES", 1), ("MACHINE", 2)];
    let rows: Vec<Vec<String>> = tokens.iter().map(row).collect();
    output::list_lines(&columns, &rows, tokens.iter().map(|_| Tone::Plain), terminal)
}

pub async fn remove(client: &Client, out: Output, ids: Vec<Uuid>, all: bool) -> anyhow::Result<Code> {
    let removed = client.remove_join_tokens(if all { None } else { Some(ids.clone()) }).await?;
    out.print(&removed, |removed| format!("withdrew {}", output::count(removed.removed as usize, "join token")))?;
    if !all && (removed.removed as usize) < ids.len() {
        out.status("the others were used, have expired, or do not exist: `cfq token ls` lists those that can be used");
        return Ok(Code::Failed);
    }
    Ok(Code::Done)
}

/// Creates a join token.
pub async fn new_join_command(client: &Client, name: Option<NodeId>, ttl: Duration) -> anyhow::Result<JoinCommand> {
    let ttl_seconds = u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX);
    let token = client.create_join_token(&JoinTokenRequest { name, ttl_seconds }).await?;
    let url = token.urls.first().map_or("URL", String::as_str);
    Ok(JoinCommand { command: format!("cfq join {url} {}", token.token), token })
}
