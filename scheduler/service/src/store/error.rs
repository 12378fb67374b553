//! Errors of the store, classified by whether a retry can help.

use std::path::PathBuf;

use sqlx::migrate::MigrateError;

/// SQLSTATE of Postgres for a lock that was not free within the time limit.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// Error of a database operation; `doing` names the operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot read the database password in {path}")]
    Password {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Postgres is down, restarting, overloaded or out of disk space, or a lock was not free: a retry may succeed.
    #[error("Postgres is not available ({doing})")]
    Unavailable {
        doing: &'static str,
        #[source]
        source: sqlx::Error,
    },
    /// The caller's time limit passed; a retry may be fast enough.
    #[error("Postgres took too long ({doing})")]
    TooSlow { doing: &'static str },
    /// Postgres refused the statement: a bug, or a row that violates a constraint.
    #[error("Postgres refused a statement ({doing})")]
    Refused {
        doing: &'static str,
        #[source]
        source: sqlx::Error,
    },
    /// A stored value that this build cannot read. No default is substituted.
    #[error("the database contains a {what} that this build cannot read: {text:?}")]
    Unreadable { what: &'static str, text: String },
    /// The schema is newer than this build.
    #[error(
        "the database's schema is at version {version}, which this build does not know: it was written by a newer cfq. \
         Run that version, or restore a backup made before the upgrade"
    )]
    Newer { version: i64 },
    /// The checksum of an applied migration differs from this build's.
    #[error(
        "migration {version} was changed after it had been applied: this build does not match the database. \
         Run the version of cfq that created it, or restore a backup"
    )]
    Altered { version: i64 },
    #[error("cannot migrate the database's schema")]
    Migration {
        #[source]
        source: MigrateError,
    },
    /// This scheduler is no longer the leader, so its plan must not be applied.
    #[error("this scheduler is no longer the leader (term {term})")]
    NotLeader { term: i64 },
}

impl StoreError {
    /// Whether the same request may succeed later.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::TooSlow { .. } => true,
            Self::Migration { source: MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) } => {
                is_transient(source)
            }
            Self::Password { .. }
            | Self::Refused { .. }
            | Self::Unreadable { .. }
            | Self::Newer { .. }
            | Self::Altered { .. }
            | Self::Migration { .. }
            | Self::NotLeader { .. } => false,
        }
    }

    /// Whether another transaction holds a lock that this one needs.
    pub fn is_lock_timeout(&self) -> bool {
        match self {
            Self::Unavailable { source: sqlx::Error::Database(error), .. } => {
                error.code().as_deref() == Some(LOCK_NOT_AVAILABLE)
            }
            _ => false,
        }
    }

    /// Whether Postgres was unreachable or could not serve any client, so that no heartbeat could be written meanwhile.
    /// A lock that was not free, or a statement that took too long, is no outage.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unavailable { source, .. } => is_outage(source),
            Self::Password { .. }
            | Self::TooSlow { .. }
            | Self::Refused { .. }
            | Self::Unreadable { .. }
            | Self::Newer { .. }
            | Self::Altered { .. }
            | Self::Migration { .. }
            | Self::NotLeader { .. } => false,
        }
    }

    /// Whether the error concerns only one row, or the lock on it, so that other rows can still be processed.
    pub fn is_row_local(&self) -> bool {
        match self {
            Self::Unavailable { source, .. } => !is_outage(source),
            Self::TooSlow { .. } | Self::Refused { .. } | Self::Unreadable { .. } => true,
            Self::Password { .. }
            | Self::Newer { .. }
            | Self::Altered { .. }
            | Self::Migration { .. }
            | Self::NotLeader { .. } => false,
        }
    }

    pub(super) fn from_migration(error: MigrateError) -> Self {
        match error {
            MigrateError::VersionMissing(version) => Self::Newer { version },
            MigrateError::VersionMismatch(version) => Self::Altered { version },
            source => Self::Migration { source },
        }
    }
}

fn classify(doing: &'static str, source: sqlx::Error) -> StoreError {
    if is_transient(&source) {
        StoreError::Unavailable { doing, source }
    } else {
        StoreError::Refused { doing, source }
    }
}

fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        // A connection cut in the middle of a message.
        sqlx::Error::Protocol(_) => true,
        // SQLSTATE classes and codes after which a retry can help: 08 connection, 40 serialisation and deadlock, 53
        // resources (disk full, too many connections), 55P03 lock not free, 57 operator intervention (shutdown,
        // starting up, statement timeout), 58 I/O error, 25006 read only, 25P03 and 25P04 the transaction was idle or
        // open for too long.
        sqlx::Error::Database(database) => database.code().is_some_and(|code| {
            ["08", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
                || code == LOCK_NOT_AVAILABLE
                || ["25006", "25P03", "25P04"].contains(&&*code)
        }),
        _ => false,
    }
}

/// Whether a transient error affects the connection or the whole server (SQLSTATE 08 connection, 53 resources, 57P
/// shutting down or starting, 58 I/O, 25006 read only) and not only one statement (40 deadlock, 55P03 lock not free,
/// 57014 statement timeout).
fn is_outage(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(database) => database.code().is_some_and(|code| {
            ["08", "53", "57P", "58"].iter().any(|class| code.starts_with(class)) || code == "25006"
        }),
        _ => false,
    }
}

/// Adds the name of the failed operation to an error of sqlx.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| classify(doing, source))
    }
}
