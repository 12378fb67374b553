//! A private Postgres: reachable only through a socket in a folder of its own, with passwords nobody chose, settings
//! that keep every promise of durability, and the version of whoever made the data.
//!
//! The settings are given on the command line, so an edited file in the data folder cannot weaken them.

mod connect;
mod initialise;
mod socket;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::child::{self, Account, ChildError, Exit, Process, ProcessIdentity, Signal, Spec};
use serde::{Deserialize, Serialize};

use crate::engines::Engine;
use crate::files::{self, FileError};
use crate::paths::Paths;
use crate::strays::{self, StrayError};
pub use connect::Setting;

/// The folder of the socket is ours alone, so the number needs not be free; it is only part of the socket's name.
const PORT: u16 = 5432;
/// What the services connect as: it owns the database and may create others, nothing more.
const USER: &str = "cfq";
const DATABASE: &str = "cfq";
/// A fast shutdown writes a checkpoint; a slow disk may need a while for it.
const STOP_GRACE: Duration = Duration::from_secs(60);
/// How much of the log goes into an error.
const TAIL: u64 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Stray(#[from] StrayError),
    #[error("initdb failed ({exit}){}\n{tail}", full(tail))]
    Initialise { exit: Exit, tail: String },
    #[error("Postgres ended while starting ({exit}){}; the end of {log}:\n{tail}", full(tail))]
    Ended { exit: Exit, log: PathBuf, tail: String },
    #[error("Postgres did not answer within {within:?}; its log is {log}")]
    Silent { within: Duration, log: PathBuf, source: sqlx::Error },
    #[error(
        "{path} holds {text:?} instead of a Postgres version; restore the data folder from a backup, or choose another with CFQ_DATA"
    )]
    Version { path: PathBuf, text: String },
    #[error(
        "{path}, the password of the database, is gone; restore it from a backup, or choose another data folder with CFQ_DATA"
    )]
    PasswordLost { path: PathBuf },
    #[error("the socket folder {path} belongs to somebody else or is open to others; remove it and try again")]
    SocketFolder { path: PathBuf },
    #[error("cannot {action} in the private Postgres{}", full_disk(source))]
    Query { action: &'static str, source: sqlx::Error },
}

const FULL: &str = ": no space is left for the data folder; free some, or choose another with CFQ_DATA";

fn full(tail: &str) -> &'static str {
    if tail.contains("No space left on device") { FULL } else { "" }
}

fn full_disk(error: &sqlx::Error) -> &'static str {
    // disk_full
    let full = error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "53100");
    if full { FULL } else { "" }
}

/// How to reach the database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostgresFacts {
    /// The folder of the socket.
    pub host: PathBuf,
    pub port: u16,
    pub user: String,
    pub database: String,
    pub password_file: PathBuf,
}

/// The major version that made the data folder, if there is one yet.
pub fn pinned_major(paths: &Paths) -> Result<Option<u32>, PostgresError> {
    let path = paths.postgres().join("PG_VERSION");
    match files::read_if_there(&path)? {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(major) => Ok(Some(major)),
            Err(_) => Err(PostgresError::Version { path, text }),
        },
    }
}

/// Removes a lock file that names a process which is no running Postgres.
///
/// Postgres refuses to start while any process has that id: after a reboot that can be anyone, and in a container whose
/// first process reaps nothing it is the dead postmaster for ever.
fn forget_stale(lock: &Path) -> Result<(), PostgresError> {
    let named = files::read_if_there(lock)?.and_then(|text| text.lines().next()?.trim().parse::<u32>().ok());
    if let Some(pid) = named
        && let Ok(comm) = std::fs::read_to_string(format!("/proc/{pid}/comm"))
        && (comm.trim() != "postgres" || ProcessIdentity::of(pid).is_none())
    {
        tracing::warn!(pid, lock = %lock.display(), "names a process that is no running Postgres; removing it");
        std::fs::remove_file(lock).map_err(files::failed("remove", lock))?;
    }
    Ok(())
}

/// One installation of the engine on one data folder.
#[derive(Debug, Clone)]
pub struct Postgres {
    bin: PathBuf,
    data: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    pidfile: PathBuf,
    keys: PathBuf,
    account: Option<Account>,
    /// In the title of each of its processes, by which those of a killed one are found.
    cluster: String,
}

impl Postgres {
    /// Makes the data folder if there is none yet. The engine must be of the version that made it.
    pub async fn prepare(paths: &Paths, engine: &Engine, account: Option<Account>) -> Result<Self, PostgresError> {
        let data = paths.postgres();
        let this = Self {
            bin: engine.path.clone(),
            socket: socket::folder(paths, account)?,
            log: paths.log("postgres"),
            pidfile: paths.pidfile("postgres"),
            keys: paths.keys(),
            account,
            cluster: format!("cfq-{}", files::short_name(&data)),
            data,
        };
        if pinned_major(paths)?.is_none() {
            this.initialise(paths).await?;
        }
        Ok(this)
    }

    pub fn facts(&self) -> PostgresFacts {
        PostgresFacts {
            host: self.socket.clone(),
            port: PORT,
            user: USER.to_owned(),
            database: DATABASE.to_owned(),
            password_file: self.password_file(),
        }
    }

    /// Where a running one would be reached, without starting or making anything.
    pub fn facts_of(paths: &Paths, account: Option<Account>) -> PostgresFacts {
        PostgresFacts {
            host: socket::place(paths, account),
            port: PORT,
            user: USER.to_owned(),
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

    /// Starts it, waits until it answers, and sees to it that user and database are there.
    pub async fn start(&self) -> Result<Process, PostgresError> {
        self.clear().await?;
        let process = child::spawn(self.spec())?;
        match self.ready(&process).await {
            Ok(()) => Ok(process),
            Err(error) => {
                process.stop(STOP_GRACE).await?;
                Err(error)
            }
        }
    }

    pub async fn stop(process: &Process) -> Result<Exit, PostgresError> {
        Ok(process.stop(STOP_GRACE).await?)
    }

    /// Ends what an earlier run left on this data folder, and forgets a lock file that names somebody else's process.
    async fn clear(&self) -> Result<(), PostgresError> {
        let title = format!("postgres: {}: ", self.cluster).into_bytes();
        let data = self.data.as_os_str().as_encoded_bytes();
        strays::end(&self.data, Signal::Interrupt, |args| {
            args.first().is_some_and(|first| first.starts_with(&title))
                || args.windows(2).any(|pair| pair[0] == b"-D" && pair[1] == data)
        })
        .await?;
        let socket_lock = self.socket.join(format!(".s.PGSQL.{PORT}.lock"));
        for lock in [self.data.join("postmaster.pid"), socket_lock] {
            forget_stale(&lock)?;
        }
        Ok(())
    }

    fn spec(&self) -> Spec {
        let mut spec = self.child("postgres", &self.bin.join("postgres"), &self.log, &self.pidfile);
        spec.args = vec!["-D".into(), self.data.clone().into()];
        let socket = format!("unix_socket_directories={}", quoted(&self.socket));
        let port = format!("port={PORT}");
        let cluster = format!("cluster_name={}", self.cluster);
        let settings = [
            "listen_addresses=",
            &socket,
            &port,
            &cluster,
            "unix_socket_permissions=0700",
            "password_encryption=scram-sha-256",
            // What promise 1 stands on.
            "fsync=on",
            "full_page_writes=on",
            "synchronous_commit=on",
            // Without these a change of the machine's zone would show in the log and in casts.
            "timezone=UTC",
            "log_timezone=UTC",
            "logging_collector=off",
            "log_destination=stderr",
            // Our statements are small; compiling one costs more than running it.
            "jit=off",
            "max_connections=100",
        ];
        for setting in settings {
            spec.args.extend([OsString::from("-c"), setting.into()]);
        }
        spec.stop_signal = Signal::Interrupt;
        spec
    }

    /// A Postgres program, run with nothing of our environment: PGDATA and its kind would change what it does.
    fn child(&self, name: &str, program: &Path, log: &Path, pidfile: &Path) -> Spec {
        let mut spec = Spec::new(name, program, log, pidfile);
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

/// The setting is a list of names; quotes keep a comma or a space in a folder's name from dividing it.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('"', "\"\""))
}
