//! A private Postgres: it is reachable only through a socket in a private folder, has random passwords and settings
//! that guarantee durability, and always runs the major version that created the data folder.
//!
//! The settings are given on the command line, so an edited file in the data folder cannot weaken them.

mod connect;
mod dump;
mod initdb;
mod socket;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::child::{self, Account, ChildError, Exit, Process, ProcessIdentity, ProcessSpec, Signal};
use serde::{Deserialize, Serialize};

use crate::files::{self, FileError, FolderError};
use crate::orphans::{self, OrphanError};
use crate::paths::Paths;
use crate::services::ServiceProgram;
pub use connect::Setting;
pub use dump::RowCounts;

/// Port number, which is only part of the socket's file name: the server listens on no TCP port.
const SOCKET_PORT: u16 = 5432;
/// Index of the line of postmaster.pid with the folder of the socket.
const SOCKET_LINE: usize = 4;
/// Role that the scheduler connects as. It owns the database and may create others; it is not a superuser.
const SCHEDULER_ROLE: &str = "cfq";
const DATABASE: &str = "cfq";
/// Maximum number of connections to the server: enough for several schedulers with the default configuration.
pub const DEFAULT_MAX_CONNECTIONS: u32 = 100;
/// Maximum time that the server may take to exit after a stop request; then it is killed. A fast shutdown writes a
/// checkpoint, which is slow on a slow disk.
const STOP_GRACE: Duration = Duration::from_secs(60);
/// Size of the log excerpt in an error message, in bytes from the log's end.
const LOG_TAIL_BYTES: u64 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Orphan(#[from] OrphanError),
    #[error("initdb failed ({exit}){}\n{tail}", log_hint(tail))]
    Initialize { exit: Exit, tail: String },
    #[error(
        "the database was not created, because no space is left in {folder}: free some, or choose another data folder \
         with CFQ_DATA"
    )]
    NoSpace { folder: PathBuf },
    #[error("Postgres exited while starting ({exit}){}; the end of {log}:\n{tail}", log_hint(tail))]
    Exited { exit: Exit, log: PathBuf, tail: String },
    #[error("Postgres did not respond within {within:?}; its log is {log}")]
    Unresponsive { within: Duration, log: PathBuf, source: sqlx::Error },
    #[error(
        "{path} contains {text:?} instead of a Postgres version; restore the data folder from a backup, or choose \
         another with CFQ_DATA"
    )]
    Version { path: PathBuf, text: String },
    #[error(
        "the database password in {path} is missing; restore it from a backup, or choose another data folder with \
         CFQ_DATA"
    )]
    PasswordLost { path: PathBuf },
    #[error("the socket folder {path} belongs to another user or is open to others; remove it and try again")]
    SocketFolder { path: PathBuf },
    #[error(
        "{program} is not in {folder}: install the client programs of that Postgres (Debian: apt install \
         postgresql-client), or set CFQ_SERVICES=fetched for a Postgres that has them"
    )]
    NoClient { program: &'static str, folder: PathBuf },
    #[error("cannot run {program}")]
    Client { program: &'static str, source: std::io::Error },
    #[error("{program} failed: {message}")]
    ClientFailed { program: &'static str, message: String },
    #[error("cannot {action} in the private Postgres{}", query_hint(source))]
    Query { action: &'static str, source: sqlx::Error },
}

const NO_SPACE: &str = ": no space is left for the data folder; free some, or choose another with CFQ_DATA";

fn log_hint(tail: &str) -> &'static str {
    if tail.contains("No space left on device") { NO_SPACE } else { "" }
}

fn query_hint(error: &sqlx::Error) -> &'static str {
    // 53100 is SQLSTATE disk_full.
    let disk_full = error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "53100");
    if disk_full { NO_SPACE } else { "" }
}

/// Socket, role and password file of the scheduler's database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostgresAddress {
    /// The folder of the socket.
    pub host: PathBuf,
    pub port: u16,
    pub user: String,
    pub database: String,
    pub password_file: PathBuf,
}

/// The major version that created the data folder; `None` if the folder does not exist yet.
pub fn pinned_major(paths: &Paths) -> Result<Option<u32>, PostgresError> {
    let path = paths.postgres().join("PG_VERSION");
    match files::read_foreign(&path)? {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(major) => Ok(Some(major)),
            Err(_) => Err(PostgresError::Version { path, text }),
        },
    }
}

/// Removes a lock file that names a process other than a running Postgres.
///
/// Postgres refuses to start while any process has the id in the lock file. After a reboot that can be an unrelated
/// process. In a container whose first process does not reap its children, the dead postmaster keeps its id forever.
fn remove_stale_lock(lock: &Path) -> Result<(), PostgresError> {
    let named = files::read_foreign(lock)?.and_then(|text| text.lines().next()?.trim().parse::<u32>().ok());
    if let Some(pid) = named
        && let Ok(comm) = std::fs::read_to_string(format!("/proc/{pid}/comm"))
        && (comm.trim() != "postgres" || ProcessIdentity::of(pid).is_none())
    {
        tracing::warn!(pid, lock = %lock.display(), "removing a stale Postgres lock file");
        std::fs::remove_file(lock).map_err(files::error("remove", lock))?;
    }
    Ok(())
}

/// A private Postgres server: its programs, and one data folder.
#[derive(Debug, Clone)]
pub struct Postgres {
    bin: PathBuf,
    data: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    pidfile: PathBuf,
    keys: PathBuf,
    account: Option<Account>,
    /// User ids of the server's processes of this and earlier runs.
    users: Vec<u32>,
    /// Postgres's `cluster_name`, which is part of the title of each server process; identifies the processes of a
    /// killed server.
    cluster: String,
    max_connections: u32,
}

impl Postgres {
    /// Lets the server accept this number of connections instead of [`DEFAULT_MAX_CONNECTIONS`]. Takes effect when the
    /// server starts.
    pub fn set_max_connections(&mut self, max_connections: u32) {
        self.max_connections = max_connections;
    }

    /// Creates the data folder if it does not exist. `program` must be of the major version that created the folder.
    pub async fn prepare(
        paths: &Paths,
        program: &ServiceProgram,
        account: Option<Account>,
    ) -> Result<Self, PostgresError> {
        let this = Self::new(paths, program, account, socket::create_folder(paths, account)?);
        if pinned_major(paths)?.is_none() {
            this.initialize(paths).await?;
        }
        if account.is_some() {
            files::create_folder(&this.data, 0o700, account)?;
        }
        Ok(this)
    }

    /// The server that another process runs on these folders, for [`Postgres::dump`]. Creates and changes nothing.
    pub fn running(paths: &Paths, program: &ServiceProgram, account: Option<Account>) -> Self {
        // The server may have been started with another XDG_RUNTIME_DIR than this process has, for example a cron job.
        let pidfile = files::read_foreign(&paths.postgres().join("postmaster.pid")).ok().flatten();
        let recorded =
            pidfile.as_deref().and_then(|text| text.lines().nth(SOCKET_LINE)).filter(|line| !line.is_empty());
        let socket = recorded.map_or_else(|| socket::folder(paths, account), PathBuf::from);
        Self::new(paths, program, account, socket)
    }

    fn new(paths: &Paths, program: &ServiceProgram, account: Option<Account>, socket: PathBuf) -> Self {
        let data = paths.postgres();
        Self {
            bin: program.path.clone(),
            socket,
            log: paths.log("postgres"),
            pidfile: paths.pidfile("postgres"),
            keys: paths.keys(),
            account,
            users: orphans::users(&data, account),
            cluster: format!("cfq-{}", files::path_hash(&data)),
            data,
            max_connections: DEFAULT_MAX_CONNECTIONS,
        }
    }

    /// Address and credentials of this server.
    pub fn address(&self) -> PostgresAddress {
        PostgresAddress {
            host: self.socket.clone(),
            port: SOCKET_PORT,
            user: SCHEDULER_ROLE.to_owned(),
            database: DATABASE.to_owned(),
            password_file: self.password_file(),
        }
    }

    /// Address and credentials of the server that runs on these folders. The function starts and creates nothing.
    pub fn address_of(paths: &Paths, account: Option<Account>) -> PostgresAddress {
        PostgresAddress {
            host: socket::folder(paths, account),
            port: SOCKET_PORT,
            user: SCHEDULER_ROLE.to_owned(),
            database: DATABASE.to_owned(),
            password_file: password_file(&paths.keys()),
        }
    }

    fn password_file(&self) -> PathBuf {
        password_file(&self.keys)
    }

    fn admin_password_file(&self) -> PathBuf {
        self.keys.join("postgres-admin.password")
    }

    /// Starts the server, waits until it responds, and creates role and database if they are missing.
    pub async fn start(&self) -> Result<Process, PostgresError> {
        self.clear_leftovers().await?;
        let process = child::spawn(self.server_spec())?;
        match self.wait_until_ready(&process).await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.stop(STOP_GRACE).await?;
                Err(error)
            }
        }
    }

    /// Stops the server; kills it if it does not exit in time.
    pub async fn stop(process: &Process) -> Result<Exit, PostgresError> {
        Ok(process.stop(STOP_GRACE).await?)
    }

    /// Terminates processes that an earlier run left on this data folder, and removes stale lock files.
    async fn clear_leftovers(&self) -> Result<(), PostgresError> {
        let title = format!("postgres: {}: ", self.cluster).into_bytes();
        let data = self.data.as_os_str().as_encoded_bytes();
        orphans::terminate(&self.data, &self.users, Signal::Interrupt, |args| {
            args.first().is_some_and(|first| first.starts_with(&title))
                || args.windows(2).any(|pair| pair[0] == b"-D" && pair[1] == data)
        })
        .await?;
        let socket_lock = self.socket.join(format!(".s.PGSQL.{SOCKET_PORT}.lock"));
        for lock in [self.data.join("postmaster.pid"), socket_lock] {
            remove_stale_lock(&lock)?;
        }
        Ok(())
    }

    fn server_spec(&self) -> ProcessSpec {
        let mut spec = self.program_spec("postgres", &self.bin.join("postgres"), &self.log, &self.pidfile);
        spec.args = vec!["-D".into(), self.data.clone().into()];
        let socket = format!("unix_socket_directories={}", quoted(&self.socket));
        let port = format!("port={SOCKET_PORT}");
        let cluster = format!("cluster_name={}", self.cluster);
        let connections = format!("max_connections={}", self.max_connections);
        let settings = [
            "listen_addresses=",
            &socket,
            &port,
            &cluster,
            "unix_socket_permissions=0700",
            "password_encryption=scram-sha-256",
            // Durability of accepted tasks depends on these three settings.
            "fsync=on",
            "full_page_writes=on",
            "synchronous_commit=on",
            // Without these, a change of the machine's time zone would show in the log and in casts.
            "timezone=UTC",
            "log_timezone=UTC",
            "logging_collector=off",
            "log_destination=stderr",
            // cfq's statements are small; compiling a statement costs more than running it.
            "jit=off",
            &connections,
        ];
        for setting in settings {
            spec.args.extend([OsString::from("-c"), setting.into()]);
        }
        spec.stop_signal = Signal::Interrupt;
        spec
    }

    /// Returns how to run a Postgres program, with a fixed environment: inherited variables such as PGDATA would change
    /// its behaviour.
    fn program_spec(&self, name: &str, program: &Path, log: &Path, pidfile: &Path) -> ProcessSpec {
        let mut spec = ProcessSpec::new(name, program, log, pidfile);
        spec.clear_env = true;
        spec.env =
            [("LC_ALL", "C"), ("TZ", "UTC"), ("PATH", "/usr/bin:/bin")].map(|(k, v)| (k.into(), v.into())).into();
        spec.run_as = self.account;
        spec
    }
}

fn password_file(keys: &Path) -> PathBuf {
    keys.join("postgres.password")
}

/// Quotes a path for a setting that takes a list: an unquoted comma or space in the path would split it.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('"', "\"\""))
}
