//! What can go wrong with Postgres, told apart by whether asking again can help.

use std::path::PathBuf;

use sqlx::migrate::MigrateError;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot read the database password in {path}")]
    Password {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Away, restarting, overloaded, out of disk, or a lock was not free: the same request may work later.
    #[error("Postgres is not available ({doing})")]
    Unavailable {
        doing: &'static str,
        #[source]
        source: sqlx::Error,
    },
    /// Nobody waits for it any more; asked again it may be in time.
    #[error("Postgres took too long ({doing})")]
    TooSlow { doing: &'static str },
    /// Postgres refused the statement: a bug, or a row that breaks a rule.
    #[error("Postgres refused a statement ({doing})")]
    Refused {
        doing: &'static str,
        #[source]
        source: sqlx::Error,
    },
    /// A stored value that this build cannot read; nothing is guessed.
    #[error("the database holds a {what} that this build cannot read: {text:?}")]
    Unreadable { what: &'static str, text: String },
    #[error(
        "the database's schema is at version {version}, which this build does not know: it was written by a newer cfq. \
         Run that version, or restore a backup made before the upgrade"
    )]
    Newer { version: i64 },
    #[error(
        "migration {version} was changed after it had been applied: this build and the database do not belong together"
    )]
    Altered { version: i64 },
    #[error("cannot bring the database's schema up to date")]
    Migration {
        #[source]
        source: MigrateError,
    },
    /// Another scheduler leads now, or nobody does: what this one planned is void.
    #[error("not the leader any more (generation {generation})")]
    NotLeader { generation: i64 },
}

impl StoreError {
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

    /// Postgres was away, or could not serve anybody: nobody could beat meanwhile. A lock that was not free, or a
    /// statement that took too long, says nothing of the kind.
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

    /// One row, or the wait for one, is at fault: the others can be worked on.
    pub fn spares_others(&self) -> bool {
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

pub(super) fn unavailable(doing: &'static str, source: sqlx::Error) -> StoreError {
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
        // 08 connection, 40 serialisation and deadlock, 53 resources (disk full, too many connections), 55P03 lock not
        // free, 57 operator intervention (shutdown, starting up, statement timeout), 58 I/O error, 25006 read only.
        sqlx::Error::Database(database) => database.code().is_some_and(|code| {
            ["08", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
                || code == "55P03"
                || code == "25006"
        }),
        _ => false,
    }
}

/// Of what is transient: the connection, or the whole server (class 53 resources, 57P shutting down or starting, 58 I/O,
/// 25006 read only), and not one statement (40 deadlock, 55P03 lock not free, 57014 statement timeout).
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

/// Says what was being done when a statement failed.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| unavailable(doing, source))
    }
}

/// A stored word as its type.
pub(super) fn read<T: std::str::FromStr>(what: &'static str, text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| StoreError::Unreadable { what, text: text.to_owned() })
}

/// Text for a `text` column: Postgres cannot hold U+0000 there.
pub(super) fn plain(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
