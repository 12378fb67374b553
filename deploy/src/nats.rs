//! A private NATS server: on loopback, at a port that stays the same over restarts, with one key per client and no
//! anonymous access. The permissions of each client are defined in `cfq_proto::subject`; this module only writes them
//! to the server's configuration file.

mod config;
mod keys;

use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use cfq_link::NatsConfig;
use cfq_link::child::{self, Account, ChildError, Exit, Process, ProcessSpec, Signal};
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::files::{self, FileError, FolderError};
use crate::orphans::{self, OrphanError};
use crate::paths::Paths;
use crate::services::ServiceProgram;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait until a started server responds. A start takes tens of milliseconds, or longer if the store is large.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_GRACE: Duration = Duration::from_secs(20);
/// Maximum number of start attempts, each on a different port. Another program can take the port between the check and
/// the server's bind, but three times in a row indicates another cause.
const PORT_ATTEMPTS: u32 = 3;
/// Size of the log excerpt in an error message, in bytes from the log's end.
const LOG_TAIL_BYTES: u64 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Orphan(#[from] OrphanError),
    #[error("port {port} on 127.0.0.1 is in use by another program; stop it, or choose another port for NATS")]
    PortTaken { port: u16 },
    #[error("no free port on 127.0.0.1")]
    NoPort(#[source] io::Error),
    #[error("{path} contains no usable NATS key; restore it from a backup, or remove it to generate a new one")]
    Key { path: PathBuf, source: nkeys::error::Error },
    #[error("nats-server exited while starting ({exit}){}; the end of {log}:\n{tail}", log_hint(tail))]
    Exited { exit: Exit, log: PathBuf, tail: String },
    #[error("nats-server did not respond within {within:?}; its log is {log}")]
    Unresponsive { within: Duration, log: PathBuf },
}

fn log_hint(tail: &str) -> &'static str {
    if tail.contains("no space left on device") {
        ": no space is left for the data folder; free some, or choose another with CFQ_DATA"
    } else {
        ""
    }
}

/// URL of the NATS server, and the folder of its clients' keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NatsAddress {
    pub url: String,
    /// The folder with the seeds of all identities.
    pub keys: PathBuf,
}

impl NatsAddress {
    /// File that contains the private key of this identity.
    pub fn seed_file(&self, identity: &Identity) -> PathBuf {
        keys::seed_file(&self.keys, identity)
    }

    /// The connection settings of the process with this identity.
    pub fn config(&self, identity: &Identity) -> NatsConfig {
        NatsConfig { url: self.url.clone(), seed_file: Some(self.seed_file(identity)) }
    }
}

/// Options of the server.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// The clients that may connect.
    pub identities: Vec<Identity>,
    /// A fixed port, which must be free; if absent, a port is picked once and kept.
    pub port: Option<u16>,
    /// Disk limit of JetStream, in bytes.
    pub store_bytes: u64,
}

/// A private NATS server: its program, folder, port and options.
#[derive(Debug, Clone)]
pub struct Nats {
    program: PathBuf,
    folder: PathBuf,
    log: PathBuf,
    pidfile: PathBuf,
    keys: PathBuf,
    name: String,
    account: Option<Account>,
    /// User ids of the server's processes of this and earlier runs.
    users: Vec<u32>,
    options: NatsOptions,
    port: u16,
}

impl Nats {
    /// Creates the folder and picks the port. The server creates its store itself: cfq changes nothing inside a folder
    /// that the server's account can write to.
    pub fn prepare(
        paths: &Paths,
        program: &ServiceProgram,
        account: Option<Account>,
        options: NatsOptions,
    ) -> Result<Self, NatsError> {
        let folder = paths.nats();
        let users = orphans::users(&folder, account);
        files::create_folder(&folder, 0o700, account)?;
        let mut this = Self {
            program: program.path.clone(),
            log: paths.log("nats"),
            pidfile: paths.pidfile("nats"),
            keys: paths.keys(),
            name: format!("cfq-{}", files::path_hash(&folder)),
            account,
            users,
            port: 0,
            options,
            folder,
        };
        this.port = match this.options.port {
            Some(port) => port,
            None => match stored_port(paths)? {
                Some(port) => port,
                None => this.pick_port()?,
            },
        };
        Ok(this)
    }

    /// Address and credentials of this server.
    pub fn address(&self) -> NatsAddress {
        NatsAddress { url: format!("nats://127.0.0.1:{}", self.port), keys: self.keys.clone() }
    }

    /// Starts the server and waits until it responds. If another program uses the port, the server gets a new port,
    /// which is stored; a port given in the options is not replaced, and the start fails.
    pub async fn start(&mut self) -> Result<Process, NatsError> {
        self.clear_leftovers().await?;
        for _ in 0..PORT_ATTEMPTS {
            if is_port_free(self.port) {
                match self.try_start().await {
                    Err(NatsError::PortTaken { .. }) => {}
                    started => return started,
                }
            }
            match self.options.port {
                Some(port) => return Err(NatsError::PortTaken { port }),
                None => self.port = self.pick_port()?,
            }
        }
        Err(NatsError::PortTaken { port: self.port })
    }

    /// Restarts the server at the same port, because its clients reconnect to that port. Fails if another program
    /// uses the port by now.
    pub async fn restart(&self) -> Result<Process, NatsError> {
        self.clear_leftovers().await?;
        if is_port_free(self.port) { self.try_start().await } else { Err(NatsError::PortTaken { port: self.port }) }
    }

    /// Stops the server; kills it if it does not exit in time.
    pub async fn stop(process: &Process) -> Result<Exit, NatsError> {
        Ok(process.stop(STOP_GRACE).await?)
    }

    fn config_file(&self) -> PathBuf {
        self.folder.join("nats.conf")
    }

    /// Terminates servers that an earlier run left: nats-server does not lock its store, so two servers could use it at
    /// once.
    async fn clear_leftovers(&self) -> Result<(), NatsError> {
        let config = self.config_file();
        let config = config.as_os_str().as_encoded_bytes();
        orphans::terminate(&self.folder, &self.users, Signal::Terminate, |args| {
            args.windows(2).any(|pair| pair[0] == b"--config" && pair[1] == config)
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
        let mut spec = ProcessSpec::new("nats", &self.program, &self.log, &self.pidfile);
        spec.args = vec!["--config".into(), self.config_file().into()];
        spec.clear_env = true;
        spec.run_as = self.account;
        let logged = std::fs::metadata(&self.log).map_or(0, |meta| meta.len());
        let process = child::spawn(spec)?;
        match self.wait_until_ready(&process, logged).await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.stop(STOP_GRACE).await?;
                Err(error)
            }
        }
    }

    /// Waits until this server, not another one at the same port, sends its greeting. `logged` is the length of the log
    /// before the start, in bytes.
    async fn wait_until_ready(&self, process: &Process, logged: u64) -> Result<(), NatsError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let server_name = format!("\"server_name\":\"{}\"", self.name);
        loop {
            if let Some(exit) = process.exit() {
                let written = std::fs::metadata(&self.log).map_or(0, |meta| meta.len()).saturating_sub(logged);
                let tail = child::log_tail(&self.log, written.min(LOG_TAIL_BYTES));
                if tail.contains("address already in use") {
                    return Err(NatsError::PortTaken { port: self.port });
                }
                return Err(NatsError::Exited { exit, log: self.log.clone(), tail });
            }
            let port = self.port;
            let info = tokio::task::spawn_blocking(move || read_info(port)).await;
            if info.is_ok_and(|info| info.is_some_and(|line| line.contains(&server_name))) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(NatsError::Unresponsive { within: READY_TIMEOUT, log: self.log.clone() });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Picks a free port and stores it for later starts.
    fn pick_port(&self) -> Result<u16, NatsError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(NatsError::NoPort)?;
        let port = listener.local_addr().map_err(NatsError::NoPort)?.port();
        files::write_private(&self.folder.join("port"), port.to_string().as_bytes(), self.account)?;
        Ok(port)
    }
}

/// The port stored by an earlier start; `None` if the file is missing or is not a port number.
pub fn stored_port(paths: &Paths) -> Result<Option<u16>, FileError> {
    Ok(files::read_foreign(&paths.nats().join("port"))?.and_then(|text| text.trim().parse().ok()))
}

/// Whether a server could bind to this port on loopback.
pub fn is_port_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The INFO line that a NATS server sends to a new client; it contains the server's name. `None` if no NATS server
/// responds within a second.
pub fn read_info(port: u16) -> Option<String> {
    let timeout = Duration::from_secs(1);
    let stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), timeout).ok()?;
    stream.set_read_timeout(Some(timeout)).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.starts_with("INFO ").then_some(line)
}
