//! `cfq token path` prints the path of the owner's API token; `cfq token rotate` without a name replaces this token. The
//! running scheduler notices the new file by itself. No request is sent, because the owner of the data folder may do this;
//! it also works while the server is stopped. The other commands ask the server to create, list and revoke further tokens:
//! for machines that join, and for clients of the API.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_deploy::{Paths, files};
use cfq_link::child::Account;
use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{
    ApiTokenLimits, ApiTokenReply, ApiTokenRequest, ApiTokenRole, ApiTokenView, JoinTokenReply, JoinTokenRequest,
    JoinTokenView, JoinTokensRemoved,
};
use cfq_proto::ids::{ApiTokenName, NodeId};
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use crate::args::TokenCreateArgs;
use crate::connect;
use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Line, Output, Tone};
use crate::repo;

/// How long the join token that `cfq up --lan` prints is valid.
pub const DEFAULT_JOIN_TTL: Duration = Duration::from_secs(30 * 60);
/// Longest validity of a join token.
const MAX_JOIN_TTL: Duration = Duration::from_secs(7 * 24 * 3600);

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
             on this machine read the new token by themselves; other tokens (`cfq token ls`) stay valid",
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

pub async fn create(client: &Client, out: Output, args: TokenCreateArgs) -> anyhow::Result<Code> {
    match args.role.of_api() {
        None => create_join_token(client, out, args).await,
        Some(role) => create_api_token(client, out, role, args).await,
    }
}

async fn create_join_token(client: &Client, out: Output, args: TokenCreateArgs) -> anyhow::Result<Code> {
    let TokenCreateArgs { role: _, name, ttl, open_tasks, running_tasks, calls, repositories } = args;
    if open_tasks.or(running_tasks).or(calls).is_some() || !repositories.is_empty() {
        return Err(exit::usage("a join token has no limits: leave them out, or choose --role submit"));
    }
    let ttl = ttl.unwrap_or(DEFAULT_JOIN_TTL);
    if ttl > MAX_JOIN_TTL {
        return Err(exit::usage("--ttl: a join token is valid for at most 7d"));
    }
    let name = name.map(NodeId::new).transpose().map_err(|error| exit::usage(format!("--name: {error}")))?;
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

async fn create_api_token(
    client: &Client,
    out: Output,
    role: ApiTokenRole,
    args: TokenCreateArgs,
) -> anyhow::Result<Code> {
    let TokenCreateArgs { role: _, name, ttl, open_tasks, running_tasks, calls, repositories } = args;
    let Some(name) = name else {
        return Err(exit::usage(
            "name the token with --name, for example --name editor: lists and changes show this name",
        ));
    };
    let name = ApiTokenName::new(name).map_err(|error| exit::usage(format!("--name: {error}")))?;
    let mut limits = ApiTokenLimits { open_tasks, running_tasks, calls, repositories: Vec::new() };
    for dir in repositories {
        let start = repo::resolve(&dir, None, &[])?;
        limits.repositories.push(start.root.to_string_lossy().into_owned());
    }
    let ttl_seconds = ttl.map(|ttl| u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX));
    print_token(out, &client.create_token(&ApiTokenRequest { name, role, ttl_seconds, limits }).await?)
}

pub async fn rotate_of_client(client: &Client, out: Output, name: &ApiTokenName) -> anyhow::Result<Code> {
    print_token(out, &client.rotate_token(name).await?)
}

fn print_token(out: Output, created: &ApiTokenReply) -> anyhow::Result<Code> {
    out.print(created, |created| created.token.clone())?;
    let name = &created.view.name;
    let validity = match created.view.expires_at {
        Some(at) => format!("until {}, or until `cfq token rm {name}`", local_time::describe(at)),
        None => format!("until `cfq token rm {name}`"),
    };
    out.status(&format!(
        "this token is shown only now, and valid {validity}; set it as CFQ_TOKEN beside CFQ_URL, or as the key (bearer token) of a \
         client"
    ));
    Ok(Code::Done)
}

/// A token of either kind.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct TokenRow {
    /// `node` for a join token, else what the API token allows.
    role: String,
    /// Id of a join token.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Uuid>,
    /// Name of an API token; name that the machine of a join token must take, if it names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Who created an API token.
    #[serde(skip_serializing_if = "Option::is_none")]
    created_by: Option<String>,
    /// Time at which the token becomes invalid, in seconds since 1970; absent: only when it is revoked.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    /// Time of the last request with an API token, in seconds since 1970, up to a minute too early.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used_at: Option<i64>,
    /// Limits of an API token.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<ApiTokenLimits>,
}

impl From<ApiTokenView> for TokenRow {
    fn from(token: ApiTokenView) -> Self {
        let ApiTokenView { name, role, created_at: _, created_by, expires_at, last_used_at, limits } = token;
        let name = Some(name.to_string());
        let (created_by, limits) = (Some(created_by), Some(limits));
        Self { role: role.to_string(), id: None, name, created_by, expires_at, last_used_at, limits }
    }
}

impl From<JoinTokenView> for TokenRow {
    fn from(token: JoinTokenView) -> Self {
        let JoinTokenView { id, name, expires_at } = token;
        let name = name.map(|name| name.to_string());
        let (id, expires_at) = (Some(id), Some(expires_at));
        let role = "node".to_owned();
        Self { role, id, name, created_by: None, expires_at, last_used_at: None, limits: None }
    }
}

pub async fn list(client: &Client, out: Output) -> anyhow::Result<Code> {
    let mut rows: Vec<TokenRow> = api_tokens(client).await?.into_iter().map(TokenRow::from).collect();
    rows.extend(client.join_tokens().await?.into_iter().map(TokenRow::from));
    out.print_list("tokens", &rows, |rows| render(rows, output::terminal_columns()))?;
    Ok(Code::Done)
}

/// The API tokens; none if the server is of an earlier version, which has only that of its data folder.
async fn api_tokens(client: &Client) -> Result<Vec<ApiTokenView>, ClientError> {
    match client.tokens().await {
        Err(ClientError::Refused { status: 404, .. }) => Ok(Vec::new()),
        tokens => tokens,
    }
}

pub(super) fn render(tokens: &[TokenRow], terminal: Option<usize>) -> Vec<Line> {
    if tokens.is_empty() {
        return output::plain_lines(
            "there are no tokens besides that of `cfq token path`; `cfq token create` creates one",
        );
    }
    let time = |at: Option<i64>, none: &str| at.map_or_else(|| none.to_owned(), local_time::describe);
    let row = |token: &TokenRow| {
        let (key, note) = match (&token.id, &token.limits) {
            (Some(id), _) => (id.to_string(), token.name.as_ref().map(|name| format!("machine {name}"))),
            (None, limits) => (token.name.clone().unwrap_or_default(), limits.as_ref().map(describe_limits)),
        };
        let used = if token.id.is_some() { "" } else { "never" };
        let (expires, used) = (time(token.expires_at, "never"), time(token.last_used_at, used));
        vec![key, token.role.clone(), expires, used, note.unwrap_or_default()]
    };
    let columns = [("NAME OR ID", 0), ("ROLE", 1), ("EXPIRES", 2), ("LAST USED", 3), ("LIMITS", 4)];
    let rows: Vec<Vec<String>> = tokens.iter().map(row).collect();
    output::list_lines(&columns, &rows, tokens.iter().map(|_| Tone::Plain), terminal)
}

fn describe_limits(limits: &ApiTokenLimits) -> String {
    let ApiTokenLimits { open_tasks, running_tasks, calls, repositories } = limits;
    let numbers = [(open_tasks, "open task"), (running_tasks, "running task"), (calls, "call")];
    let numbers =
        numbers.into_iter().filter_map(|(limit, noun)| Some(output::count(limit.as_ref().copied()? as usize, noun)));
    numbers.chain(repositories.iter().cloned()).collect::<Vec<_>>().join(", ")
}

pub async fn remove(client: &Client, out: Output, tokens: Vec<String>, all: bool) -> anyhow::Result<Code> {
    if all {
        let removed = client.remove_join_tokens(None).await?;
        out.print(&removed, |removed| format!("revoked {}", output::count(removed.removed as usize, "join token")))?;
        return Ok(Code::Done);
    }
    let (mut removed, mut unknown) = (JoinTokensRemoved { removed: 0 }, Vec::new());
    for token in tokens {
        let of_name = match ApiTokenName::new(token.as_str()) {
            Ok(name) => match client.revoke_token(&name).await {
                Ok(_) => 1,
                Err(ClientError::Refused { status: 404, .. }) => 0,
                Err(error) => return Err(error.into()),
            },
            Err(_) => 0,
        };
        let is_revoked = match (of_name, token.parse::<Uuid>()) {
            (0, Ok(id)) => client.remove_join_tokens(Some(vec![id])).await?.removed,
            (revoked, _) => revoked,
        };
        removed.removed += is_revoked;
        if is_revoked == 0 {
            unknown.push(token);
        }
    }
    out.print(&removed, |removed| format!("revoked {}", output::count(removed.removed as usize, "token")))?;
    if unknown.is_empty() {
        return Ok(Code::Done);
    }
    out.status(&format!(
        "not valid: {}; a token that was used by a machine, has expired or was revoked is no longer listed by `cfq token ls`",
        unknown.join(", ")
    ));
    Ok(Code::Failed)
}

/// Creates a join token.
pub async fn new_join_command(client: &Client, name: Option<NodeId>, ttl: Duration) -> anyhow::Result<JoinCommand> {
    let ttl_seconds = u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX);
    let token = client.create_join_token(&JoinTokenRequest { name, ttl_seconds }).await?;
    let url = token.urls.first().map_or("URL", String::as_str);
    Ok(JoinCommand { command: format!("cfq join {url} {}", token.token), token })
}
