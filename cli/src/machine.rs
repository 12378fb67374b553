//! Everything of one machine, running: the engines, and the three services over them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{DataLock, EngineOptions, Options, Paths, Stack, Talk, files};
use cfq_proto::client::Client;
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;

use crate::config::Config;
use crate::connect::{self, ServerFile};
use crate::exit;
use crate::output;
use crate::supervise::{self, Service};

/// Longest wait for the API after the services were started.
const READY: Duration = Duration::from_secs(60);

pub struct Machine {
    stack: Stack,
    paths: Paths,
    scheduler: Service,
    node: Service,
    runner: Service,
    pub client: Client,
}

impl Machine {
    /// Accepting tasks when it returns. What was started is stopped again if it fails.
    pub async fn start(
        paths: &Paths,
        config: &Config,
        engines: EngineOptions,
        bind: SocketAddr,
        talk: Talk,
    ) -> anyhow::Result<Self> {
        check_holder(paths)?;
        let bind = check_bind(bind)?;
        if !bind.ip().is_loopback() {
            output::talk(&format!(
                "cfq: {bind} is open to the network without TLS: who can listen there can read the API token"
            ));
        }
        let node = NodeId::new(host_name())?;
        let runner = RunnerId::new(host_name())?;
        let identities = vec![Identity::Node(node.clone()), Identity::Runner(runner.clone())];
        let options = Options { engines, identities, talk, ..Options::default() };
        let stack = Stack::start(paths, options).await?;
        let started = services(paths, config, &stack, bind, &node, &runner).await;
        match started {
            Ok((scheduler, node, runner, client)) => {
                Ok(Self { stack, paths: paths.clone(), scheduler, node, runner, client })
            }
            Err(error) => {
                stack.stop().await?;
                Err(error)
            }
        }
    }

    /// Restarts engines that die, for ever; drop it to stop tending.
    pub async fn tend(&mut self) {
        loop {
            match self.stack.tend().await {
                Ok(again) => tracing::warn!(engine = %again.kind, exit = %again.exit, "engine died and runs again"),
                Err(error) => tracing::error!(%error, "engine"),
            }
        }
    }

    /// Intake first, then runners, nodes, scheduler, NATS, Postgres.
    pub async fn stop(self) -> anyhow::Result<()> {
        withdraw(&self.paths);
        self.runner.stop().await;
        self.node.stop().await;
        self.scheduler.stop().await;
        self.stack.stop().await?;
        Ok(())
    }
}

fn withdraw(paths: &Paths) {
    // Commands that come now are told that nothing runs.
    if let Err(error) = std::fs::remove_file(connect::server_file(&paths.data)) {
        tracing::debug!(%error, "no server file to remove");
    }
}

async fn services(
    paths: &Paths,
    config: &Config,
    stack: &Stack,
    bind: SocketAddr,
    node: &NodeId,
    runner: &RunnerId,
) -> anyhow::Result<(Service, Service, Service, Client)> {
    let facts = stack.facts();
    let token_file = connect::token_file(&paths.data);
    if files::read_if_there(&token_file)?.is_none() {
        files::write_private(&token_file, files::random_password()?.as_bytes(), None)?;
    }
    let token = std::fs::read_to_string(&token_file).context("cannot read the API token just written")?;
    let timing = config.timing.clone();
    let grace = timing.drain() + Duration::from_secs(5);
    let level = &config.log.level;

    let scheduler = cfq_scheduler::Config {
        database: cfq_scheduler::DatabaseConfig {
            host: facts.postgres.host.to_string_lossy().into_owned(),
            port: facts.postgres.port,
            user: facts.postgres.user.clone(),
            database: facts.postgres.database.clone(),
            password_file: Some(facts.postgres.password_file.clone()),
        },
        nats: facts.nats.config(&Identity::Scheduler),
        http: cfq_scheduler::HttpConfig { bind, token_file, allowed_hosts: config.server.allowed_hosts.clone() },
        defaults: cfq_scheduler::Defaults {
            agents: config.agents(),
            threshold: config.looping.threshold,
            max_iterations: config.looping.max_iterations,
            timeout_minutes: config.looping.timeout_minutes,
        },
        limits: cfq_scheduler::Limits::default(),
        timing: timing.clone(),
    };
    let node = cfq_inference_node::Config {
        node: node.clone(),
        nats: facts.nats.config(&Identity::Node(node.clone())),
        models: config.models(),
        endpoints: config.endpoints.clone(),
        model_dir: config.model_dir(paths),
        model_quota: config.node.model_quota,
        threads: config.node.threads,
        memory_limit: config.node.memory_limit,
        device: config.node.device,
        parked_kv: config.node.parked_kv,
        parked_kv_as: config.node.parked_kv_as,
        parked_weights: config.node.parked_weights,
        critic_warm_up: config.node.critic_warm_up,
        yield_at: config.node.yield_at,
        yield_ignores: config.node.yield_ignores.clone(),
        max_sequences: config.node.max_sequences,
        timing: timing.clone(),
        hub: config.hub.clone(),
    };
    let runner = cfq_agent_runner::Config {
        runner: runner.clone(),
        nats: facts.nats.config(&Identity::Runner(runner.clone())),
        data_dir: paths.data.join("workstreams"),
        concurrency: config.runner.concurrency,
        timing,
    };
    let threads = cfq_inference_node::thread_environment(config.node.threads);
    let scheduler = supervise::start("scheduler", &scheduler, paths, level, grace, &[])?;
    let node = supervise::start("node", &node, paths, level, grace, &threads)?;
    let runner = supervise::start("runner", &runner, paths, level, grace, &[])?;

    let url = format!("http://{bind}");
    let client = Client::new(cfq_link::outbound::api_client()?, &url, token.trim());
    if let Err(error) = ready(&client, paths).await {
        runner.stop().await;
        node.stop().await;
        scheduler.stop().await;
        return Err(error);
    }
    let server = ServerFile { url, pid: std::process::id() };
    files::write_private(&connect::server_file(&paths.data), &serde_json::to_vec(&server)?, None)?;
    Ok((scheduler, node, runner, client))
}

async fn ready(client: &Client, paths: &Paths) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        match client.ready().await {
            Ok(()) => return Ok(()),
            Err(error) if start.elapsed() > READY => {
                let log = paths.log("scheduler");
                let tail = cfq_link::child::log_tail(&log, 2_000);
                return Err(anyhow::Error::from(error)
                    .context(format!("the scheduler does not get ready; the end of {}:\n{tail}", log.display())));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(25)).await,
        }
    }
}

/// Said first: the one who holds the folder most likely holds the port too.
pub fn check_holder(paths: &Paths) -> anyhow::Result<()> {
    match DataLock::holder(paths) {
        None => Ok(()),
        Some(holder) => Err(exit::usage(format!(
            "the data folder {} is in use by `{}` (process {}): stop it with `cfq down`, or choose another folder with --data",
            paths.data.display(),
            holder.command,
            holder.process.pid
        ))),
    }
}

/// A port that is taken is found before anything is started; port 0 becomes a free one.
fn check_bind(bind: SocketAddr) -> anyhow::Result<SocketAddr> {
    match std::net::TcpListener::bind(bind).and_then(|listener| listener.local_addr()) {
        Ok(bind) => Ok(bind),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(exit::usage(format!(
            "{bind} is taken by another program: choose another address with --bind, or stop that program"
        ))),
        Err(error) => Err(exit::usage(format!("cannot listen on {bind}: {error}; choose another address with --bind"))),
    }
}

/// This machine's name, as far as it can be one token of a NATS subject.
fn host_name() -> String {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME")).unwrap_or_default();
    let first = name.trim().split('.').next().unwrap_or_default().to_ascii_lowercase();
    let fits: String = first.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    let fits = fits.trim_matches('-').to_owned();
    if fits.is_empty() { "local".to_owned() } else { fits }
}
