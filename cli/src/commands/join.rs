//! `cfq join`: connects this machine to the server on another machine, and runs models for it.

mod request;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{DataLock, Paths, StatusOutput, account, files, stack};
use cfq_inference_node::models::Presence;
use cfq_link::child::Account;
use cfq_link::stop::Signals;
use cfq_link::{LinkError, Session, tls};
use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::args::JoinArgs;
use crate::commands::models;
use crate::config::Config;
use crate::detach::{self, Started};
use crate::exit::{self, Code};
use crate::local_server;
use crate::membership::Membership;
use crate::node_process::{self, NodeStart};
use crate::output::Output;

/// How long NATS must reject this machine, or not be reached, before that counts as the answer. NATS accepts a new key after
/// about a second.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two checks whether the server still accepts this machine.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum size of a token on stdin, in bytes.
const MAX_TOKEN_BYTES: u64 = 1024;

#[derive(Serialize, JsonSchema)]
pub struct Joined {
    name: NodeId,
    url: String,
    data: String,
    models: Vec<ModelId>,
    /// Models that it would serve, but that could not be fetched.
    missing: Vec<ModelId>,
}

impl Joined {
    fn new(membership: &Membership, config: &Config, paths: &Paths) -> Self {
        let store = config.store(paths);
        let is_here = |model: &ModelId| !model.is_file() || matches!(store.presence(model), Ok(Presence::Present));
        let (models, missing) = config.models().into_iter().partition(is_here);
        let data = paths.data.display().to_string();
        Self { name: membership.name.clone(), url: membership.url.clone(), data, models, missing }
    }

    fn text(&self) -> String {
        let list = |models: &[ModelId]| models.iter().map(ModelId::as_str).collect::<Vec<_>>().join(", ");
        let serves = match &self.models[..] {
            [] => "serves no model yet".to_owned(),
            models => format!("serves {}", list(models)),
        };
        let missing = match &self.missing[..] {
            [] => String::new(),
            missing => format!(", without {}", list(missing)),
        };
        format!("connected to {} as {}; {serves}{missing}; data in {}", self.url, self.name, self.data)
    }
}

/// The file `run/join.json`: the process that runs this machine's node, once it is connected.
#[derive(Serialize, Deserialize)]
struct JoinFile {
    pid: u32,
}

pub async fn run(
    out: Output,
    paths: &Paths,
    config: Config,
    args: JoinArgs,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    request::check(args.url.as_deref(), args.token.as_deref())?;
    if args.token.is_none() && Membership::load(&paths.data)?.is_none() {
        return Err(no_membership(args.url.is_some()));
    }
    local_server::check_data_folder_is_free(paths)?;
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    let account = account::for_services(config.services.account.as_deref(), status)?;
    paths.prepare(account)?;
    let lock = DataLock::acquire(paths)?;
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let is_new = args.just_joined || args.token.is_some();
    let membership = tokio::select! {
        found = membership(out, paths, args.url, args.token, args.name) => found?,
        _ = signals.next() => std::process::exit(Code::Interrupted as i32),
    };
    let config = membership.configure(config, paths)?;
    tokio::select! {
        () = models::fetch_missing(out, &config, paths) => {}
        _ = signals.next() => {
            out.status("interrupted; this machine has joined, and `cfq join` without arguments continues");
            std::process::exit(Code::Interrupted as i32);
        }
    }
    if args.detach {
        // The background process takes it.
        drop(lock);
        return start_in_background(out, paths, &membership, &config, file, is_new, &mut signals).await;
    }
    run_node(out, paths, &membership, &config, account, is_new, signals).await
}

/// The membership that the arguments ask for: a new one, that of an earlier join, or that one at another URL.
async fn membership(
    out: Output,
    paths: &Paths,
    url: Option<String>,
    token: Option<String>,
    name: Option<NodeId>,
) -> anyhow::Result<Membership> {
    let joined = Membership::load(&paths.data)?;
    match (url, token, joined) {
        (Some(url), Some(token), joined) => {
            let token = if token == "-" { token_on_stdin()? } else { token };
            request::join(out, paths, &url, &token, name, joined).await
        }
        (Some(url), None, Some(joined)) => request::change_url(out, paths, joined, &url).await,
        (None, _, Some(joined)) => Ok(joined),
        (url, _, None) => Err(no_membership(url.is_some())),
    }
}

fn no_membership(has_url: bool) -> anyhow::Error {
    exit::usage(match has_url {
        true => {
            "this machine has joined no server yet, so it needs a join token: `cfq token create` on the server prints the \
             whole command"
        }
        false => {
            "this machine has joined no server yet: start `cfq up --lan` on the machine with the queue, which prints the \
             command to run here"
        }
    })
}

fn token_on_stdin() -> anyhow::Result<String> {
    let mut token = String::new();
    std::io::stdin().take(MAX_TOKEN_BYTES).read_to_string(&mut token).context("cannot read the token on stdin")?;
    Ok(token)
}

/// Runs the node until a signal ends it.
async fn run_node(
    out: Output,
    paths: &Paths,
    membership: &Membership,
    config: &Config,
    account: Option<Account>,
    is_new: bool,
    mut signals: Signals,
) -> anyhow::Result<Code> {
    stack::stop_leftovers(paths).await?;
    let nats = membership.nats(paths);
    if let Some(account) = account {
        give_credentials(&nats, account)?;
    }
    let session = tokio::select! {
        connected = wait_for_nats(out, membership, paths, is_new) => connected?,
        _ = signals.next() => std::process::exit(Code::Interrupted as i32),
    };
    let timing = membership.timing.clone();
    let node = node_process::start(NodeStart {
        paths,
        config,
        id: membership.name.clone(),
        nats,
        timing,
        account,
        offers_coding_agents: false,
    })?;
    let ready = JoinFile { pid: std::process::id() };
    files::write_private(&join_file(paths), &serde_json::to_vec(&ready)?, None)?;
    out.print(&Joined::new(membership, config, paths), Joined::text)?;
    out.status("see it:  cfq nodes, on the server      stop: Ctrl-C, or cfq down");
    // SIGHUP is ignored: closing the terminal must not stop the node.
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let rejected = wait_for_rejection(&session, membership, paths);
    tokio::pin!(rejected);
    let ended = loop {
        tokio::select! {
            _ = signals.next() => break Ok(Code::Done),
            _ = hangup.recv() => {}
            () = &mut rejected => break Err(rejection(membership)),
        }
    };
    out.status("stopping the node");
    if let Err(error) = std::fs::remove_file(join_file(paths)) {
        tracing::debug!(%error, "cannot remove the join file");
    }
    node.stop().await;
    ended
}

/// Lets the account of the node read its key and the certificate of the authority. It may not change the latter, which
/// commands of root trust too.
fn give_credentials(nats: &cfq_link::NatsConfig, account: Account) -> anyhow::Result<()> {
    if let Some(seed) = &nats.seed_file {
        files::give_file(seed, account)?;
    }
    if let Some(authority) = &nats.ca_file
        && let Some(certificate) = files::read_if_exists(authority)?
    {
        files::write_for_reader(authority, certificate.as_bytes(), account)?;
    }
    Ok(())
}

/// Waits until NATS accepts this machine. A machine that joined before waits without limit for a server that cannot be
/// reached, and says once what it waits for.
async fn wait_for_nats(out: Output, membership: &Membership, paths: &Paths, is_new: bool) -> anyhow::Result<Session> {
    let start = Instant::now();
    let mut rejected_since: Option<Instant> = None;
    let mut reported: Option<String> = None;
    loop {
        let error = match membership.connect(paths).await {
            Ok(session) => return Ok(session),
            Err(error) => error,
        };
        match &error {
            LinkError::AuthRejected { .. } => {
                let since = *rejected_since.get_or_insert_with(Instant::now);
                if since.elapsed() > REJECTION_TIMEOUT {
                    return Err(if is_new { not_admitted(membership) } else { rejection(membership) });
                }
            }
            LinkError::Connect { source, .. } => {
                rejected_since = None;
                let problem = tls::certificate_problem(source);
                let is_late = start.elapsed() > REJECTION_TIMEOUT;
                if is_new && is_late {
                    return Err(unreachable(membership, &problem.unwrap_or_else(|| source.to_string())));
                }
                let text = match problem {
                    Some(problem) => format!(
                        "waiting for {}: its certificate is not accepted, because {problem}. If the server has lost its \
                         data, create a token there with `cfq token create` and join again",
                        membership.nats_url
                    ),
                    None => format!(
                        "waiting for {}, which cannot be reached; if the server has another address now: cfq join URL",
                        membership.nats_url
                    ),
                };
                if !is_new && reported.as_ref() != Some(&text) {
                    out.status(&text);
                    reported = Some(text);
                }
            }
            _ => return Err(error.into()),
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

/// Waits until the server has rejected this machine for a while. A server that cannot be reached is waited for without limit;
/// the node reconnects by itself.
async fn wait_for_rejection(session: &Session, membership: &Membership, paths: &Paths) {
    let mut rejected_since: Option<Instant> = None;
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if session.is_connected() {
            rejected_since = None;
            continue;
        }
        match membership.connect(paths).await {
            Err(LinkError::AuthRejected { .. }) => {
                let since = *rejected_since.get_or_insert_with(Instant::now);
                if since.elapsed() > REJECTION_TIMEOUT {
                    return;
                }
            }
            Ok(_) | Err(_) => rejected_since = None,
        }
    }
}

fn rejection(membership: &Membership) -> anyhow::Error {
    exit::usage(format!(
        "{} does not accept this machine any more: its access was revoked, or that server lost its data. Create a new \
         token there with `cfq token create`, and join again",
        membership.url
    ))
}

fn not_admitted(membership: &Membership) -> anyhow::Error {
    exit::failed(format!(
        "this machine has joined {}, but NATS there does not accept its key yet: see `cfq logs --process up` on the server, \
         then run `cfq join` without arguments",
        membership.url
    ))
}

fn unreachable(membership: &Membership, reason: &str) -> anyhow::Error {
    exit::unreachable(format!(
        "this machine has joined {}, but cannot connect to {} ({reason}): let this port through the firewall of the \
         server, then run `cfq join` without arguments",
        membership.url, membership.nats_url
    ))
}

fn join_file(paths: &Paths) -> PathBuf {
    paths.run().join("join.json")
}

/// What `cfq status` prints on a machine that has joined a server and runs none itself.
#[derive(Serialize, JsonSchema)]
pub struct JoinStatus {
    url: String,
    name: NodeId,
    /// The process that runs this machine's node; absent if it does not run.
    pid: Option<u32>,
    /// Whether the server accepts this machine.
    connected: bool,
}

/// Prints whether this machine runs models for the server that it joined.
pub async fn status(out: Output, paths: &Paths, membership: &Membership) -> anyhow::Result<Code> {
    let holder = DataLock::holder(paths).unwrap_or(None);
    let connected = membership.connect(paths).await;
    let status = JoinStatus {
        url: membership.url.clone(),
        name: membership.name.clone(),
        pid: holder.map(|holder| holder.process.pid),
        connected: connected.is_ok(),
    };
    out.print(&status, |status| {
        let node = match status.pid {
            Some(pid) => format!("its node runs (process {pid})"),
            None => "its node does not run: cfq join -d".to_owned(),
        };
        let server = match &connected {
            Ok(_) => "the server accepts it".to_owned(),
            Err(LinkError::AuthRejected { .. }) => rejection(membership).to_string(),
            Err(LinkError::Connect { source, .. }) => match tls::certificate_problem(source) {
                Some(problem) => {
                    format!("the certificate of {} is not accepted, because {problem}", membership.nats_url)
                }
                None => format!("{} cannot be reached", membership.nats_url),
            },
            Err(error) => error.to_string(),
        };
        format!("this machine runs models for {} as {}: {node}; {server}", status.url, status.name)
    })?;
    out.status("tasks, and the state of all machines, are on the server");
    Ok(if status.pid.is_some() && status.connected { Code::Done } else { Code::Unreachable })
}

async fn start_in_background(
    out: Output,
    paths: &Paths,
    membership: &Membership,
    config: &Config,
    file: Option<&Path>,
    is_new: bool,
    signals: &mut Signals,
) -> anyhow::Result<Code> {
    let mut command = detach::own_command(paths, file)?;
    command.arg("join");
    if is_new {
        command.arg("--just-joined");
    }
    let is_ready = |pid| {
        let text = std::fs::read_to_string(join_file(paths)).ok()?;
        serde_json::from_str::<JoinFile>(&text).ok().filter(|ready| ready.pid == pid)
    };
    let background = detach::start(paths, "join", command)?;
    if !is_new {
        out.status(&format!("connecting to {}; its progress: cfq logs --process join", membership.nats_url));
    }
    match background.wait(signals, is_ready).await? {
        Started::Ready(_) => {
            out.print(&Joined::new(membership, config, paths), Joined::text)?;
            out.status("see it:  cfq nodes, on the server      stop: cfq down");
            Ok(Code::Done)
        }
        Started::Interrupted => {
            out.status("cfq continues to start in the background; stop it with `cfq down`");
            std::process::exit(Code::Interrupted as i32);
        }
    }
}
