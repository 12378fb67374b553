//! A private NATS: on loopback at a port that stays the same over restarts, with a key for each client and no way in
//! without one. What a client may say and hear is written in `cfq_proto::subject`; this only renders it.

mod config;
mod keys;

use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use cfq_link::NatsConfig;
use cfq_link::child::{self, Account, ChildError, Exit, Process, Signal, Spec};
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::engines::Engine;
use crate::files::{self, FileError};
use crate::paths::Paths;
use crate::strays::{self, StrayError};

const POLL: Duration = Duration::from_millis(10);
/// Ready is measured in tens of milliseconds; a large store takes longer to read.
const READY: Duration = Duration::from_secs(60);
const STOP_GRACE: Duration = Duration::from_secs(20);
/// Somebody can take the port between our look and the server's bind; three times in a row is something else.
const PORT_TRIES: u32 = 3;
const TAIL: u64 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Stray(#[from] StrayError),
    #[error("port {port} on 127.0.0.1 is in use by another program; stop that one, or choose another port for NATS")]
    PortTaken { port: u16 },
    #[error("no free port could be found on 127.0.0.1")]
    NoPort(#[source] io::Error),
    #[error("{path} holds no usable NATS key; restore it from a backup, or remove it to have a new one made")]
    Key { path: PathBuf, source: nkeys::error::Error },
    #[error("nats-server ended while starting ({exit}){}; the end of {log}:\n{tail}", full(tail))]
    Ended { exit: Exit, log: PathBuf, tail: String },
    #[error("nats-server did not answer within {within:?}; its log is {log}")]
    Silent { within: Duration, log: PathBuf },
}

fn full(tail: &str) -> &'static str {
    if tail.contains("no space left on device") {
        ": no space is left for the data folder; free some, or choose another with CFQ_DATA"
    } else {
        ""
    }
}

/// How to reach NATS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NatsFacts {
    pub url: String,
    /// Where the seeds of all identities lie.
    pub keys: PathBuf,
}

impl NatsFacts {
    pub fn seed_file(&self, identity: &Identity) -> PathBuf {
        keys::seed_file(&self.keys, identity)
    }

    /// What a service of this identity is configured with.
    pub fn config(&self, identity: &Identity) -> NatsConfig {
        NatsConfig { url: self.url.clone(), seed_file: Some(self.seed_file(identity)) }
    }
}

/// What the caller chooses about the server.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// Who may connect.
    pub identities: Vec<Identity>,
    /// A fixed port, which must be free; else one is picked once and kept.
    pub port: Option<u16>,
    /// The most JetStream may keep on disk.
    pub store_bytes: u64,
}

/// One installation of the engine on one store.
#[derive(Debug, Clone)]
pub struct Nats {
    program: PathBuf,
    folder: PathBuf,
    log: PathBuf,
    pidfile: PathBuf,
    keys: PathBuf,
    name: String,
    account: Option<Account>,
    options: NatsOptions,
    port: u16,
}

impl Nats {
    /// Makes folders and keys, and settles the port.
    pub fn prepare(
        paths: &Paths,
        engine: &Engine,
        account: Option<Account>,
        options: NatsOptions,
    ) -> Result<Self, NatsError> {
        let folder = paths.nats();
        files::folder(&folder, 0o700, account)?;
        files::folder(&folder.join("store"), 0o700, account)?;
        let mut this = Self {
            program: engine.path.clone(),
            log: paths.log("nats"),
            pidfile: paths.pidfile("nats"),
            keys: paths.keys(),
            name: format!("cfq-{}", files::short_name(&folder)),
            account,
            port: 0,
            options,
            folder,
        };
        this.port = match this.options.port {
            Some(port) => port,
            None => match stored_port(paths)? {
                Some(port) => port,
                None => this.new_port()?,
            },
        };
        Ok(this)
    }

    pub fn facts(&self) -> NatsFacts {
        NatsFacts { url: format!("nats://127.0.0.1:{}", self.port), keys: self.keys.clone() }
    }

    /// Starts it and waits until it answers. If the stored port has been taken since, another is stored.
    pub async fn start(&mut self) -> Result<Process, NatsError> {
        self.clear().await?;
        for _ in 0..PORT_TRIES {
            if is_free(self.port) {
                match self.try_start().await {
                    Err(NatsError::PortTaken { .. }) => {}
                    started => return started,
                }
            }
            match self.options.port {
                Some(port) => return Err(NatsError::PortTaken { port }),
                None => self.port = self.new_port()?,
            }
        }
        Err(NatsError::PortTaken { port: self.port })
    }

    /// Starts it again at the same port, where everybody looks for it; a port taken meanwhile is an error.
    pub async fn restart(&self) -> Result<Process, NatsError> {
        self.clear().await?;
        if is_free(self.port) { self.try_start().await } else { Err(NatsError::PortTaken { port: self.port }) }
    }

    pub async fn stop(process: &Process) -> Result<Exit, NatsError> {
        Ok(process.stop(STOP_GRACE).await?)
    }

    fn config_file(&self) -> PathBuf {
        self.folder.join("nats.conf")
    }

    /// nats-server takes no lock on its store, so nobody else may be at it.
    async fn clear(&self) -> Result<(), NatsError> {
        let config = self.config_file();
        let ours = config.as_os_str().as_encoded_bytes();
        strays::end(&self.folder, Signal::Terminate, |args| {
            args.windows(2).any(|pair| pair[0] == b"--config" && pair[1] == ours)
        })
        .await?;
        Ok(())
    }

    async fn try_start(&self) -> Result<Process, NatsError> {
        let mut users = Vec::new();
        for identity in &self.options.identities {
            users.push((keys::public_key(&self.keys, identity)?, identity));
        }
        let text = config::render(&config::Server {
            name: &self.name,
            port: self.port,
            store: &self.folder.join("store"),
            store_bytes: self.options.store_bytes,
            users: &users,
        });
        files::write_private(&self.config_file(), text.as_bytes(), self.account)?;
        let mut spec = Spec::new("nats", &self.program, &self.log, &self.pidfile);
        spec.args = vec!["--config".into(), self.config_file().into()];
        spec.clear_env = true;
        spec.run_as = self.account;
        let logged = std::fs::metadata(&self.log).map_or(0, |meta| meta.len());
        let process = child::spawn(spec)?;
        match self.ready(&process, logged).await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.stop(STOP_GRACE).await?;
                Err(error)
            }
        }
    }

    async fn ready(&self, process: &Process, logged: u64) -> Result<(), NatsError> {
        let deadline = Instant::now() + READY;
        let word = format!("\"server_name\":\"{}\"", self.name);
        loop {
            if let Some(exit) = process.exit() {
                let written = std::fs::metadata(&self.log).map_or(0, |meta| meta.len()).saturating_sub(logged);
                let tail = child::log_tail(&self.log, written.min(TAIL));
                if tail.contains("address already in use") {
                    return Err(NatsError::PortTaken { port: self.port });
                }
                return Err(NatsError::Ended { exit, log: self.log.clone(), tail });
            }
            let port = self.port;
            let greeting = tokio::task::spawn_blocking(move || greeting(port)).await;
            if greeting.is_ok_and(|greeting| greeting.is_some_and(|line| line.contains(&word))) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(NatsError::Silent { within: READY, log: self.log.clone() });
            }
            sleep(POLL).await;
        }
    }

    fn new_port(&self) -> Result<u16, NatsError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(NatsError::NoPort)?;
        let port = listener.local_addr().map_err(NatsError::NoPort)?.port();
        files::write_private(&self.folder.join("port"), port.to_string().as_bytes(), self.account)?;
        Ok(port)
    }
}

/// The port kept from earlier starts. What cannot be read as one is as good as none.
pub fn stored_port(paths: &Paths) -> Result<Option<u16>, FileError> {
    Ok(files::read_if_there(&paths.nats().join("port"))?.and_then(|text| text.trim().parse().ok()))
}

pub fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The line a NATS server greets with; it names the server.
pub fn greeting(port: u16) -> Option<String> {
    let within = Duration::from_secs(1);
    let stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), within).ok()?;
    stream.set_read_timeout(Some(within)).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.starts_with("INFO ").then_some(line)
}
