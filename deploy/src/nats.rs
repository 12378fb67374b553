//! A private NATS server: on loopback, or with TLS where other machines reach it; at a port that stays the same over
//! restarts, with one key per client and no anonymous access. The permissions of each client are defined in
//! `cfq_proto::subject`; this module only writes them to the server's configuration file.

mod config;
mod keys;
mod remote;

use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_link::NatsConfig;
use cfq_link::child::{self, Account, ChildError, Exit, Process, ProcessSpec, Signal};
use cfq_proto::subject::Identity;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

pub use keys::public_key_in;
use remote::RemoteState;
pub use remote::{RemoteNode, RemoteNodes};

use crate::certificates::CertificateFiles;
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
    #[error(
        "{address} is in use by another program; stop it, or choose another port for NATS (nats_port under [server] in \
         cfq.toml)"
    )]
    AddressTaken { address: SocketAddr },
    #[error("cannot listen on {address}: is it an address of this machine?")]
    Address { address: SocketAddr, source: io::Error },
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
    /// Certificate authority of the server (PEM), if it uses TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
}

impl NatsAddress {
    /// File that contains the private key of this identity.
    pub fn seed_file(&self, identity: &Identity) -> PathBuf {
        keys::seed_file(&self.keys, identity)
    }

    /// The connection settings of the process with this identity.
    pub fn config(&self, identity: &Identity) -> NatsConfig {
        NatsConfig { url: self.url.clone(), ca_file: self.ca.clone(), seed_file: Some(self.seed_file(identity)) }
    }
}

/// Options of the server.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// The clients that may connect.
    pub identities: Vec<Identity>,
    /// A fixed port, which must be free; if absent, that of the last start, or a free one.
    pub port: Option<u16>,
    /// Disk limit of JetStream, in bytes.
    pub store_bytes: u64,
    /// Where other machines reach the server, if they may.
    pub lan: Option<NatsLan>,
}

/// How a NATS server that other machines may reach listens: with TLS only.
#[derive(Debug, Clone)]
pub struct NatsLan {
    pub listen: IpAddr,
    pub certificates: CertificateFiles,
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
    /// File with the nodes on other machines.
    remote_file: PathBuf,
    /// Nodes on other machines, which change while the server runs. The lock is held while the configuration is written and
    /// the server is signalled, so that the server has always read the newest nodes.
    remote: Arc<Mutex<RemoteState>>,
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
            remote_file: paths.keys().join("remote-nodes.json"),
            remote: Arc::default(),
        };
        if this.options.lan.is_some() {
            // A node that is known from the last start can connect before the scheduler has read which nodes may. A
            // damaged file is written again when the scheduler has read them.
            let known = files::read_if_exists(&this.remote_file)?.and_then(|text| serde_json::from_str(&text).ok());
            let mut known: Vec<RemoteNode> = known.unwrap_or_default();
            known.retain(|node| !this.options.identities.contains(&Identity::Node(node.name.clone())));
            lock(&this.remote).nodes = known;
        }
        this.port = match (this.options.port, stored_address(paths)?) {
            (Some(port), _) => port,
            (None, Some(stored)) => stored.port(),
            (None, None) => this.pick_port()?,
        };
        Ok(this)
    }

    /// Address and credentials of this server.
    pub fn address(&self) -> NatsAddress {
        let (scheme, ca) = match &self.options.lan {
            Some(lan) => ("tls", Some(lan.certificates.authority.clone())),
            None => ("nats", None),
        };
        let host = SocketAddr::new(self.own_ip(), self.port);
        NatsAddress { url: format!("{scheme}://{host}"), keys: self.keys.clone(), ca }
    }

    /// The nodes on other machines, which can be changed while the server runs.
    pub fn remote_nodes(&self) -> RemoteNodes {
        RemoteNodes::new(self.clone())
    }

    /// Address at which this machine's processes reach the server.
    fn own_ip(&self) -> IpAddr {
        match self.listen_ip() {
            IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            address => address,
        }
    }

    fn listen_ip(&self) -> IpAddr {
        self.options.lan.as_ref().map_or(Ipv4Addr::LOCALHOST.into(), |lan| lan.listen)
    }

    /// Starts the server and waits until it responds. If another program uses the port, the server gets a new port,
    /// which is stored; a port given in the options is not replaced, and the start fails.
    pub async fn start(&mut self) -> Result<Process, NatsError> {
        self.clear_leftovers().await?;
        for _ in 0..PORT_ATTEMPTS {
            if self.check_address()? {
                match self.try_start().await {
                    Err(NatsError::AddressTaken { .. }) => {}
                    started => return started,
                }
            }
            match self.options.port {
                Some(_) => return Err(NatsError::AddressTaken { address: self.listen_address() }),
                None => self.port = self.pick_port()?,
            }
        }
        Err(NatsError::AddressTaken { address: self.listen_address() })
    }

    /// Restarts the server at the same port, because its clients reconnect to that port. Fails if another program
    /// uses the port by now.
    pub async fn restart(&self) -> Result<Process, NatsError> {
        self.clear_leftovers().await?;
        match self.check_address()? {
            true => self.try_start().await,
            false => Err(NatsError::AddressTaken { address: self.listen_address() }),
        }
    }

    /// Whether the server's address is free. Fails if it cannot be used for another reason.
    fn check_address(&self) -> Result<bool, NatsError> {
        let address = self.listen_address();
        match TcpListener::bind(address) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(false),
            Err(source) => Err(NatsError::Address { address, source }),
        }
    }

    fn listen_address(&self) -> SocketAddr {
        SocketAddr::new(self.listen_ip(), self.port)
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

    /// Writes the configuration with these nodes on other machines.
    fn write_config(&self, remote: &[RemoteNode]) -> Result<(), NatsError> {
        let mut users = Vec::new();
        for identity in &self.options.identities {
            users.push((keys::public_key(&self.keys, identity)?, identity));
        }
        let remote: Vec<_> = remote.iter().map(|node| (&node.key, Identity::Node(node.name.clone()))).collect();
        users.extend(remote.iter().map(|(key, identity)| ((*key).clone(), identity)));
        let text = config::render(&config::Server {
            name: &self.name,
            address: self.listen_address(),
            certificates: self.options.lan.as_ref().map(|lan| &lan.certificates),
            store: &self.folder.join("store"),
            store_bytes: self.options.store_bytes,
            users: &users,
        });
        Ok(files::write_private(&self.config_file(), text.as_bytes(), self.account)?)
    }

    async fn try_start(&self) -> Result<Process, NatsError> {
        let written = {
            let mut remote = lock(&self.remote);
            remote.running = None;
            self.write_config(&remote.nodes)?;
            remote.nodes.clone()
        };
        self.store_address()?;
        let mut spec = ProcessSpec::new("nats", &self.program, &self.log, &self.pidfile);
        spec.args = vec!["--config".into(), self.config_file().into()];
        spec.clear_env = true;
        spec.run_as = self.account;
        let logged = std::fs::metadata(&self.log).map_or(0, |meta| meta.len());
        let process = child::spawn(spec)?;
        match self.wait_until_ready(&process, logged).await {
            Ok(()) => {
                let mut remote = lock(&self.remote);
                // The nodes may have changed while the server read its configuration.
                remote.running = Some(process.clone());
                if remote.nodes != written {
                    let applied = self.write_config(&remote.nodes).and_then(|()| Ok(process.signal(Signal::Hangup)?));
                    if let Err(error) = applied {
                        // The server runs with the nodes before; the next call of `RemoteNodes::set` tries again.
                        tracing::error!(%error, "cannot update the keys that NATS accepts");
                        remote.nodes = written;
                    }
                }
                Ok(process)
            }
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
                    return Err(NatsError::AddressTaken { address: self.listen_address() });
                }
                return Err(NatsError::Exited { exit, log: self.log.clone(), tail });
            }
            let address = SocketAddr::new(self.own_ip(), self.port);
            let info = tokio::task::spawn_blocking(move || read_info(address)).await;
            if info.is_ok_and(|info| info.is_some_and(|line| line.contains(&server_name))) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(NatsError::Unresponsive { within: READY_TIMEOUT, log: self.log.clone() });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Picks a free port.
    fn pick_port(&self) -> Result<u16, NatsError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(NatsError::NoPort)?;
        Ok(listener.local_addr().map_err(NatsError::NoPort)?.port())
    }

    /// Stores the address, or only the port of an address on loopback, for later starts and the doctor.
    fn store_address(&self) -> Result<(), FileError> {
        let text = match self.own_ip() {
            IpAddr::V4(Ipv4Addr::LOCALHOST) => self.port.to_string(),
            address => SocketAddr::new(address, self.port).to_string(),
        };
        files::write_private(&self.folder.join("port"), text.as_bytes(), self.account)
    }
}

/// The address stored by the last start; `None` if the file is missing or is not an address.
pub fn stored_address(paths: &Paths) -> Result<Option<SocketAddr>, FileError> {
    let address = |text: String| match text.trim().parse::<u16>() {
        Ok(port) => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        Err(_) => text.trim().parse().ok(),
    };
    Ok(files::read_foreign(&paths.nats().join("port"))?.and_then(address))
}

/// Whether a server could bind to this address, for the doctor.
pub fn is_address_free(address: SocketAddr) -> bool {
    TcpListener::bind(address).is_ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The INFO line that a NATS server sends to a new client; it contains the server's name. `None` if no NATS server
/// responds within a second.
pub fn read_info(address: SocketAddr) -> Option<String> {
    let timeout = Duration::from_secs(1);
    let stream = TcpStream::connect_timeout(&address, timeout).ok()?;
    stream.set_read_timeout(Some(timeout)).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.starts_with("INFO ").then_some(line)
}
