//! `cfq join`: adds this machine to a cfq on another machine, and runs its node. The machine makes its key itself; it checks
//! the server's certificate against the token before it sends anything.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{DataLock, Paths, StatusOutput, account, files, nats, stack};
use cfq_link::child::Account;
use cfq_link::stop::Signals;
use cfq_link::{LinkError, Session, outbound, tls};
use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::JoinRequest;
use cfq_proto::ids::NodeId;
use cfq_proto::join_token::JoinToken;
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};

use crate::args::JoinArgs;
use crate::commands::models;
use crate::config::{Config, DEFAULT_PORT};
use crate::connect;
use crate::detach::{self, Started};
use crate::exit::{self, Code};
use crate::machine;
use crate::membership::{self, Membership};
use crate::node_process::{self, NodeStart};
use crate::output::Output;

/// Exit code that shells use for a program ended by Ctrl-C.
const INTERRUPTED_CODE: i32 = 130;
/// Longest wait until a server that let this machine join also lets it connect to NATS; usually a second.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which is checked whether the server still accepts this machine.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct Joined {
    name: NodeId,
    url: String,
    data: String,
    models: Vec<String>,
}

impl Joined {
    fn new(member: &Membership, config: &Config, paths: &Paths) -> Self {
        let models = config.models().iter().map(|model| model.as_str().to_owned()).collect();
        let data = paths.data.display().to_string();
        Self { name: member.name.clone(), url: member.url.clone(), data, models }
    }

    fn text(&self) -> String {
        format!("connected to {} as {}; serves {}; data in {}", self.url, self.name, self.models.join(", "), self.data)
    }
}

/// The file `run/member.json`: the process that runs this machine's node, once it is connected.
#[derive(Serialize, Deserialize)]
struct MemberFile {
    pid: u32,
}

pub async fn run(
    out: Output,
    paths: &Paths,
    config: Config,
    args: JoinArgs,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    machine::check_data_folder_is_free(paths)?;
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    let account = account::for_services(config.services.account.as_deref(), status)?;
    paths.prepare(account)?;
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let is_new = args.url.is_some();
    let member = match (args.url, args.token) {
        (Some(url), Some(token)) => {
            let joined = join(out, paths, &url, &token, args.name);
            tokio::select! {
                joined = joined => joined?,
                _ = signals.next() => std::process::exit(INTERRUPTED_CODE),
            }
        }
        _ => Membership::load(paths)?.ok_or_else(|| {
            exit::usage(
                "this machine has not joined a cluster: start `cfq up --lan` on the machine with the queue, which prints \
                 the command to run here",
            )
        })?,
    };
    let config = member.configure(config, paths)?;
    tokio::select! {
        () = models::fetch_missing(out, &config, paths) => {}
        _ = signals.next() => {
            out.status("interrupted; this machine has joined, and `cfq join` without arguments continues");
            std::process::exit(INTERRUPTED_CODE);
        }
    }
    if args.detach {
        return detach(out, paths, &member, &config, file, &mut signals).await;
    }
    run_node(out, paths, &member, &config, account, is_new, signals).await
}

/// Asks the server to let this machine join, and stores the membership.
async fn join(out: Output, paths: &Paths, url: &str, token: &str, name: Option<NodeId>) -> anyhow::Result<Membership> {
    let url = server_url(url)?;
    let token: JoinToken = token.parse().map_err(|error| exit::usage(format!("{error}")))?;
    if let Some(member) = Membership::load(paths).unwrap_or(None).filter(|member| member.token == token.id) {
        out.status(&format!("this machine has joined with this token already, as {}", member.name));
        return Ok(member);
    }
    let nats_key = nats::public_key_in(&membership::seed_file(paths, token.id))?;
    let (tls, authority) = tls::trust_only_fingerprint(token.authority);
    let http = outbound::tls_api_client(tls).context("cannot create an HTTP client")?;
    let request = JoinRequest {
        token: token.to_string(),
        name,
        fallback_name: NodeId::new(machine::host_name()).ok(),
        nats_key,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let reply = Client::join(http, &url, &request).await.map_err(|error| describe(&error))?;
    let authority = authority.pem().context("the server sent no certificate of its authority")?;
    let host = host_of(&url)?;
    let member = Membership {
        nats_url: format!("tls://{host}:{}", reply.nats_port),
        url,
        name: reply.name,
        token: token.id,
        models: reply.models,
        timing: reply.timing,
    };
    member.write(paths, &authority)?;
    Ok(member)
}

/// The root URL of a server: `host`, `host:port` or a URL with HTTPS.
fn server_url(text: &str) -> anyhow::Result<String> {
    let wrong = || {
        exit::usage(format!("{text:?} is not the URL of a server: it must be like https://192.168.1.5:{DEFAULT_PORT}"))
    };
    if text.starts_with("http://") {
        return Err(exit::usage(format!("{text} is not encrypted: joining needs https://")));
    }
    let with_scheme = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let mut url = reqwest::Url::parse(&with_scheme).map_err(|_| wrong())?;
    if url.scheme() != "https" || !matches!(url.path(), "" | "/") || url.query().is_some() || url.host_str().is_none() {
        return Err(wrong());
    }
    let authority = with_scheme.trim_start_matches("https://").trim_end_matches('/');
    if url.port().is_none() && !authority.ends_with(":443") {
        url.set_port(Some(DEFAULT_PORT)).map_err(|()| wrong())?;
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

fn host_of(url: &str) -> anyhow::Result<String> {
    let host = reqwest::Url::parse(url).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.with_context(|| format!("{url} has no host"))
}

fn describe(error: &ClientError) -> anyhow::Error {
    match error {
        ClientError::Unreachable { url, source } => {
            if let Some(problem) = tls::certificate_problem(source) {
                return exit::usage(format!(
                    "the server at {url} could not prove that it is the one that made the token ({problem}); nothing was \
                     sent to it. Check the address. If the server is reached under another name, add that name to \
                     allowed_hosts under [server] in its cfq.toml"
                ));
            }
            if tls::is_not_tls(source) {
                return exit::usage(format!(
                    "the server at {url} does not use TLS: start it with `cfq up --lan`, which prints the command to run \
                     here"
                ));
            }
            exit::unreachable(format!(
                "cannot reach {url}: check that `cfq up --lan` runs there, and that its firewall lets this port and that \
                 of NATS through (by default 7710 and 7711)"
            ))
        }
        ClientError::Refused { status: 401, .. } => {
            exit::usage("that server is of a version that machines cannot join: install this version there".to_owned())
        }
        ClientError::Refused { status, body } if *status < 500 => exit::usage(body.message.clone()),
        other => exit::failed(connect::describe_error(other)),
    }
}

/// Runs the node until a signal ends it.
async fn run_node(
    out: Output,
    paths: &Paths,
    member: &Membership,
    config: &Config,
    account: Option<Account>,
    is_new: bool,
    mut signals: Signals,
) -> anyhow::Result<Code> {
    let _lock = DataLock::acquire(paths)?;
    stack::stop_leftovers(paths).await?;
    let nats = member.nats(paths);
    if let Some(account) = account {
        for secret in [&nats.seed_file, &nats.ca_file].into_iter().flatten() {
            files::give_file(secret, account)?;
        }
    }
    let session = tokio::select! {
        connected = wait_for_nats(out, member, paths, is_new) => connected?,
        _ = signals.next() => std::process::exit(INTERRUPTED_CODE),
    };
    let timing = member.timing.clone();
    let node = node_process::start(NodeStart { paths, config, id: member.name.clone(), nats, timing, account })?;
    let ready = MemberFile { pid: std::process::id() };
    files::write_private(&member_file(paths), &serde_json::to_vec(&ready)?, None)?;
    out.print(&Joined::new(member, config, paths), Joined::text)?;
    out.status("see it:  cfq nodes, on the machine of the server      stop: Ctrl-C, or cfq down");
    // SIGHUP is ignored: closing the terminal must not stop the node.
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let rejected = wait_for_rejection(&session, member, paths);
    tokio::pin!(rejected);
    let ended = loop {
        tokio::select! {
            _ = signals.next() => break Ok(Code::Done),
            _ = hangup.recv() => {}
            () = &mut rejected => break Err(rejection(member)),
        }
    };
    out.status("stopping the node");
    if let Err(error) = std::fs::remove_file(member_file(paths)) {
        tracing::debug!(%error, "cannot remove the member file");
    }
    node.stop().await;
    ended
}

/// Waits until the server does not accept this machine any more. A server that is away is waited for without limit.
async fn wait_for_rejection(session: &Session, member: &Membership, paths: &Paths) {
    let mut rejected_since: Option<Instant> = None;
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if session.is_connected() {
            rejected_since = None;
            continue;
        }
        let connected = Session::connect(&member.nats(paths), identity(member), &member.timing).await;
        let since = rejected_since.get_or_insert_with(Instant::now);
        match connected {
            Err(LinkError::AuthRejected { .. }) if since.elapsed() > ACCEPT_TIMEOUT => return,
            Err(LinkError::AuthRejected { .. }) => {}
            Ok(_) | Err(_) => rejected_since = None,
        }
    }
}

fn identity(member: &Membership) -> Identity {
    Identity::Node(member.name.clone())
}

fn rejection(member: &Membership) -> anyhow::Error {
    exit::usage(format!(
        "{} does not accept this machine any more: its access was revoked, or that server lost its data. Create a new token \
         there with `cfq token create`, and join again",
        member.url
    ))
}

/// Waits until NATS accepts this machine. A machine that joined before waits for a server that is away.
async fn wait_for_nats(out: Output, member: &Membership, paths: &Paths, is_new: bool) -> anyhow::Result<Session> {
    let start = Instant::now();
    let mut is_told = false;
    loop {
        let config = member.nats(paths);
        let error = match Session::connect(&config, identity(member), &member.timing).await {
            Ok(session) => return Ok(session),
            Err(error) => error,
        };
        let is_late = start.elapsed() > ACCEPT_TIMEOUT;
        match &error {
            LinkError::AuthRejected { .. } if is_late => return Err(rejection(member)),
            LinkError::Connect { source, .. } if is_late && is_new => {
                return Err(exit::unreachable(format!(
                    "this machine has joined {}, but cannot connect to {} ({source}): let this port through the firewall \
                     of the server, then run `cfq join` without arguments",
                    member.url, member.nats_url
                )));
            }
            LinkError::AuthRejected { .. } | LinkError::Connect { .. } => {
                if !is_told && !is_new {
                    out.status(&format!("waiting for {}", member.nats_url));
                    is_told = true;
                }
            }
            _ => return Err(error.into()),
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

fn member_file(paths: &Paths) -> std::path::PathBuf {
    paths.run().join("member.json")
}

async fn detach(
    out: Output,
    paths: &Paths,
    member: &Membership,
    config: &Config,
    file: Option<&Path>,
    signals: &mut Signals,
) -> anyhow::Result<Code> {
    let mut command = detach::own_command(paths, file)?;
    command.arg("join");
    let is_ready = |pid| {
        let text = std::fs::read_to_string(member_file(paths)).ok()?;
        serde_json::from_str::<MemberFile>(&text).ok().filter(|member| member.pid == pid)
    };
    match detach::start(paths, "join", command)?.wait(signals, is_ready).await? {
        Started::Ready(_) => {
            out.print(&Joined::new(member, config, paths), Joined::text)?;
            out.status("see it:  cfq nodes, on the machine of the server      stop: cfq down");
            Ok(Code::Done)
        }
        Started::Interrupted => {
            out.status("cfq continues to start in the background; stop it with `cfq down`");
            std::process::exit(INTERRUPTED_CODE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_server_is_completed() {
        for (text, url) in [
            ("192.168.1.5", "https://192.168.1.5:7710"),
            ("den.lan:7000", "https://den.lan:7000"),
            ("https://den.lan/", "https://den.lan:7710"),
            ("https://[fd00::5]:7710", "https://[fd00::5]:7710"),
            ("https://den.lan:443", "https://den.lan"),
        ] {
            assert_eq!(server_url(text).unwrap(), url, "{text}");
        }
        assert_eq!(host_of("https://[fd00::5]:7710").unwrap(), "[fd00::5]");
        for wrong in ["http://den.lan:7710", "", "https://", "ftp://den", "https://den/api", "den lan"] {
            let error = server_url(wrong).unwrap_err();
            assert_eq!(exit::of_error(&error), Code::Usage, "{wrong}");
        }
    }
}
