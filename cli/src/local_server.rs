//! All processes of one machine: Postgres and NATS, and on top of them scheduler, node and runner.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use cfq_deploy::certificates::CertificateFiles;
use cfq_deploy::{DataLock, Paths, ServiceOptions, Stack, StackOptions, StatusOutput, files};
use cfq_proto::client::Client;
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;

use crate::bind::DEFAULT_PORT;
use crate::config::Config;
use crate::connect::{self, ServerFile};
use crate::environment;
use crate::exit;
use crate::follow_machines::FollowMachines;
use crate::lan::Lan;
use crate::node_process::{self, NodeStart};
use crate::output;
use crate::rights::ProcessRights;
use crate::supervise::{self, Start, SupervisedProcess};

/// Longest wait for the API after all processes were started.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the registration of node and runner after that. Tasks are accepted without them.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Address of the HTTP API.
#[derive(Debug, Clone)]
pub struct ApiAddress {
    pub bind: SocketAddr,
    /// Whether the user allowed plain HTTP on an address other than loopback.
    pub allow_plaintext: bool,
    /// How other machines reach this one, with TLS; `None` if they do not.
    pub lan: Option<Lan>,
}

impl ApiAddress {
    /// Checks that plain HTTP is allowed on `bind`. On an address other than loopback it must be allowed twice, by the
    /// flag and in the configuration, so that neither a copied command nor a copied file is enough.
    pub fn new(bind: SocketAddr, flag: bool, config: &Config) -> anyhow::Result<Self> {
        let allow_plaintext = flag && config.server.allow_plaintext;
        if bind.ip().to_canonical().is_loopback() || allow_plaintext {
            return Ok(Self { bind, allow_plaintext, lan: None });
        }
        Err(exit::usage(format!(
            "{bind} is reachable from the network, so the API token could be intercepted: add --lan, with which cfq uses \
             TLS; or use a loopback address, and reach it from other machines through SSH (`ssh -L {DEFAULT_PORT}:\
             127.0.0.1:{DEFAULT_PORT} HOST`). To serve plain HTTP nevertheless, set allow_plaintext = true under \
             [server] in cfq.toml and start `cfq up --allow-plaintext`"
        )))
    }

    /// The address that other machines reach with TLS.
    pub fn of_lan(lan: Lan) -> anyhow::Result<Self> {
        if lan.bind.port() == lan.nats_port {
            return Err(exit::usage(format!(
                "HTTP and NATS cannot both listen on port {}: choose another port with --bind, or with nats_port under \
                 [server] in cfq.toml",
                lan.nats_port
            )));
        }
        if lan.bind.ip().to_canonical().is_loopback() {
            output::print_stderr(&format!(
                "cfq: warning: {} is reached by this machine only; without --bind, --lan uses all addresses",
                lan.bind
            ));
        }
        Ok(Self { bind: lan.bind, allow_plaintext: false, lan: Some(lan) })
    }

    /// URL for commands on this machine, which may use plain HTTP.
    fn local_url(&self) -> String {
        let ip = match self.bind.ip() {
            IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            address => address,
        };
        format!("http://{}", SocketAddr::new(ip, self.bind.port()))
    }
}

pub struct LocalServer {
    stack: Stack,
    paths: Paths,
    scheduler: SupervisedProcess,
    node: SupervisedProcess,
    runner: SupervisedProcess,
    pub client: Client,
    /// Lets the machines that joined connect to NATS.
    _machines: Option<FollowMachines>,
}

impl LocalServer {
    /// Starts everything; the server accepts tasks when this returns. On failure the started processes are stopped.
    pub async fn start(
        paths: &Paths,
        config: &Config,
        services: ServiceOptions,
        address: ApiAddress,
        status: StatusOutput,
    ) -> anyhow::Result<Self> {
        check_data_folder_is_free(paths)?;
        let bind = check_bind(address.bind)?;
        let lan = address.lan.map(|lan| lan.with_bind(bind));
        let address = ApiAddress { bind, lan, ..address };
        if address.lan.is_none() && !bind.ip().to_canonical().is_loopback() {
            output::print_stderr(&format!(
                "cfq: warning: {bind} is reachable from the network without TLS: the API token can be intercepted"
            ));
        }
        let node = NodeId::new(node_name())?;
        let runner = RunnerId::new(node_name())?;
        let identities = vec![Identity::Node(node.clone()), Identity::Runner(runner.clone())];
        let options = StackOptions {
            services,
            identities,
            status,
            nats_port: address.lan.as_ref().map(|lan| lan.nats_port),
            lan: address.lan.as_ref().map(Lan::options),
            ..StackOptions::default()
        };
        let stack = Stack::start(paths, options).await?;
        let started = start_processes(paths, config, &stack, &address, &node, &runner).await;
        match started {
            Ok(Started { scheduler, node, runner, client, machines }) => {
                Ok(Self { stack, paths: paths.clone(), scheduler, node, runner, client, _machines: machines })
            }
            Err(error) => {
                stack.stop().await?;
                Err(error)
            }
        }
    }

    /// Restarts Postgres and NATS when they exit; never returns. Cancel safe.
    pub async fn supervise(&mut self) {
        loop {
            match self.stack.supervise().await {
                Ok(restarted) => {
                    tracing::warn!(service = %restarted.kind, exit = %restarted.exit, "service exited, restarted it");
                }
                Err(error) => tracing::error!(%error, "cannot restart a service"),
            }
        }
    }

    /// Removes the server file, so that commands find no server; then stops runner, node, scheduler, NATS and Postgres,
    /// in this order.
    pub async fn stop(self) -> anyhow::Result<()> {
        remove_server_file(&self.paths);
        self.runner.stop().await;
        self.node.stop().await;
        self.scheduler.stop().await;
        self.stack.stop().await?;
        Ok(())
    }
}

/// Removes the server file, so that other commands report that no server is running.
fn remove_server_file(paths: &Paths) {
    if let Err(error) = std::fs::remove_file(connect::server_file(&paths.data)) {
        tracing::debug!(%error, "cannot remove the server file");
    }
}

/// What [`start_processes`] has started.
struct Started {
    scheduler: SupervisedProcess,
    node: SupervisedProcess,
    runner: SupervisedProcess,
    client: Client,
    machines: Option<FollowMachines>,
}

async fn start_processes(
    paths: &Paths,
    config: &Config,
    stack: &Stack,
    address: &ApiAddress,
    node_id: &NodeId,
    runner: &RunnerId,
) -> anyhow::Result<Started> {
    let (addresses, account) = (stack.addresses(), stack.account());
    let socket_file = connect::socket_file(&paths.data);
    let token_file = connect::token_file(&paths.data);
    if files::read_if_exists(&token_file)?.is_none() {
        files::write_private(&token_file, files::random_password()?.as_bytes(), None)?;
    }
    let timing = config.timing.clone();
    let grace = node_process::stop_grace(&timing);
    let level = &config.log.level;

    let scheduler = cfq_scheduler::Config {
        database: cfq_scheduler::DatabaseConfig {
            host: addresses.postgres.host.to_string_lossy().into_owned(),
            port: addresses.postgres.port,
            user: addresses.postgres.user.clone(),
            database: addresses.postgres.database.clone(),
            password_file: Some(addresses.postgres.password_file.clone()),
        },
        nats: addresses.nats.config(&Identity::Scheduler),
        http: cfq_scheduler::HttpConfig {
            bind: address.bind,
            socket: Some(socket_file.clone()),
            socket_on_stdin: account.is_some(),
            allow_plaintext: address.allow_plaintext,
            lan: lan_config(address, addresses.certificates.as_ref()),
            token_file: token_file.clone(),
            allowed_hosts: match &address.lan {
                Some(lan) => lan.hosts().to_vec(),
                None => config.server.allowed_hosts.clone(),
            },
        },
        defaults: cfq_scheduler::Defaults {
            agents: config.agents(),
            threshold: config.loop_defaults.threshold,
            max_iterations: config.loop_defaults.max_iterations,
            timeout_minutes: config.loop_defaults.timeout_minutes,
        },
        limits: cfq_scheduler::SchedulerLimits::default(),
        retention: config.retention.clone(),
        timing: timing.clone(),
    };
    let runner = cfq_agent_runner::Config {
        runner: runner.clone(),
        nats: addresses.nats.config(&Identity::Runner(runner.clone())),
        data_dir: paths.data.join("workstreams"),
        concurrency: config.runner.concurrency,
        timing: timing.clone(),
        server_policies_folder: Some(paths.server_policies_folder()),
        checks: config.checks.clone(),
    };
    let mut socket = None;
    if let Some(account) = account {
        let seeds = [Identity::Scheduler, Identity::Node(node_id.clone())].map(|i| addresses.nats.seed_file(&i));
        for key in seeds.iter().chain([&token_file, &addresses.postgres.password_file]) {
            files::give_file(key, account)?;
        }
        // The account could replace a socket that it creates itself; commands would then connect to another one.
        socket = Some(cfq_scheduler::create_socket(&socket_file)?.into());
    }
    let shared = || environment::shared(std::env::vars_os());
    let start = |environment, rights| Start { paths, level, grace, environment, rights, stdin: None };
    let of_scheduler = Start { stdin: socket, ..start(shared(), ProcessRights::of_scheduler(account, address.bind)) };
    let scheduler = supervise::start("scheduler", &scheduler, of_scheduler)?;
    let nats = addresses.nats.config(&Identity::Node(node_id.clone()));
    let node = node_process::start(NodeStart {
        paths,
        config,
        id: node_id.clone(),
        nats,
        timing,
        account,
        offers_coding_agents: true,
    })?;
    let runner = supervise::start("runner", &runner, start(shared(), ProcessRights::of_runner(account)))?;

    let url = address.local_url();
    let client = connect::local_client(&paths.data, &url)?;
    if let Err(error) = wait_until_ready(&client, paths, &scheduler).await {
        runner.stop().await;
        node.stop().await;
        scheduler.stop().await;
        return Err(error);
    }
    let follow = || FollowMachines::start(client.clone(), stack.remote_nodes(), node_id.clone());
    let machines = address.lan.is_some().then(follow);
    if address.lan.is_none() {
        warn_of_cut_machines(&client).await;
    }
    wait_for_registrations(&client).await;
    let server = ServerFile { url, pid: std::process::id(), lan: address.lan.is_some() };
    files::write_private(&connect::server_file(&paths.data), &serde_json::to_vec(&server)?, None)?;
    Ok(Started { scheduler, node, runner, client, machines })
}

fn lan_config(address: &ApiAddress, certificates: Option<&CertificateFiles>) -> Option<cfq_scheduler::LanConfig> {
    let (lan, files) = (address.lan.as_ref()?, certificates?);
    Some(cfq_scheduler::LanConfig {
        certificate_file: files.certificate.clone(),
        key_file: files.key.clone(),
        authority_file: files.authority.clone(),
        urls: lan.urls(),
        nats_port: lan.nats_port,
    })
}

async fn wait_until_ready(client: &Client, paths: &Paths, scheduler: &SupervisedProcess) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        match client.check_ready().await {
            Ok(()) => return Ok(()),
            Err(error) if scheduler.has_refused() || start.elapsed() > READY_TIMEOUT => {
                let log = paths.log("scheduler");
                let tail = cfq_link::child::log_tail(&log, 2_000);
                let reason = connect::describe_error(&error);
                return Err(exit::failed(format!(
                    "the scheduler did not become ready ({reason}); the end of {}:\n{tail}",
                    log.display()
                )));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(25)).await,
        }
    }
}

/// Warns that machines which joined cannot connect, because other machines do not reach this one.
async fn warn_of_cut_machines(client: &Client) {
    // An error is not reported here: the scheduler is ready, and its supervisor reports when it ends.
    let machines = client.machines().await.unwrap_or_default();
    let joined: Vec<String> =
        machines.into_iter().filter(|m| m.revoked_at.is_none()).map(|machine| machine.name.to_string()).collect();
    if !joined.is_empty() {
        output::print_stderr(&format!(
            "cfq: warning: {} cannot connect without --lan: start with `cfq up --lan`, or set lan = true under [server] in \
             cfq.toml",
            joined.join(", ")
        ));
    }
}

/// Waits until node and runner have registered, so that the first task starts at once.
async fn wait_for_registrations(client: &Client) {
    let start = Instant::now();
    while start.elapsed() < REGISTRATION_TIMEOUT {
        // An error is not reported here: the scheduler is ready, and its supervisor reports when it ends.
        if client.status().await.is_ok_and(|status| status.nodes_alive > 0 && status.runners_alive > 0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    output::print_stderr(
        "cfq: warning: node or runner have not registered yet, so tasks wait: `cfq status` says for what",
    );
}

/// Fails if another process holds the data folder. Call it before the port is checked, because that process most likely
/// uses the port too.
pub fn check_data_folder_is_free(paths: &Paths) -> anyhow::Result<()> {
    // A lock that cannot be read is reported when it is acquired.
    match DataLock::holder(paths).unwrap_or(None) {
        None => Ok(()),
        // Not a usage error, after which systemd would not start cfq again.
        Some(holder) if holder.runs("backup") => Err(exit::failed(format!(
            "a backup of {} is being made (process {}): start cfq when it is done",
            paths.data.display(),
            holder.process.pid
        ))),
        Some(holder) => Err(exit::usage(format!(
            "the data folder {} is in use by `{}` (process {}): stop it with `cfq down`, or choose another folder with \
             --data",
            paths.data.display(),
            holder.command,
            holder.process.pid
        ))),
    }
}

/// The server that a `cfq up` in the background or in another terminal runs on this data folder.
pub fn running_server(paths: &Paths) -> Option<ServerFile> {
    let holder = DataLock::holder(paths).unwrap_or(None)?;
    let is_up = holder.runs("up");
    connect::read_server_file(&paths.data).filter(|server| is_up && server.pid == holder.process.pid)
}

/// Checks the address before anything is started, and replaces port 0 by a free port.
fn check_bind(bind: SocketAddr) -> anyhow::Result<SocketAddr> {
    match std::net::TcpListener::bind(bind).and_then(|listener| listener.local_addr()) {
        Ok(bind) => Ok(bind),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(exit::usage(format!(
            "{bind} is in use by another program: choose another address with --bind, or stop that program"
        ))),
        // The address may be assigned to this machine later, for example while it starts.
        Err(error) => {
            Err(exit::failed(format!("cannot listen on {bind}: {error}; choose another address with --bind")))
        }
    }
}

/// Name of this machine's node and runner: its host name, reduced to characters that one token of a NATS subject may contain.
pub fn node_name() -> String {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME")).unwrap_or_default();
    let first = name.trim().split('.').next().unwrap_or_default().to_ascii_lowercase();
    let token: String = first.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    let token = token.trim_matches('-').to_owned();
    if token.is_empty() { "local".to_owned() } else { token }
}
