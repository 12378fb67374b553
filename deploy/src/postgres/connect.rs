//! Connections to the server: waiting until it responds, creating the role and database of the scheduler, and reading
//! the settings that `cfq doctor` checks.

use std::time::Duration;

use cfq_link::child::{Process, log_tail};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::time::{Instant, sleep, timeout};

use super::initdb::ADMIN_ROLE;
use super::{DATABASE, LOG_TAIL_BYTES, Postgres, PostgresAddress, PostgresError, SCHEDULER_ROLE, SOCKET_PORT};
use crate::files;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait until a started server responds. It is long because the server replays the write-ahead log after a
/// crash, which is slow on a slow disk.
const READY_TIMEOUT: Duration = Duration::from_secs(180);
/// Timeout of one connection attempt: a server that accepts and then sends nothing is not ready.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A setting of the running server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, sqlx::FromRow)]
pub struct Setting {
    pub name: String,
    pub setting: String,
}

/// Result of one connection attempt to a started server.
enum Readiness {
    Ready,
    /// The server responds, but the scheduler's role or database is missing.
    NotProvisioned,
    NotReady(sqlx::Error),
}

impl Postgres {
    pub(super) async fn wait_until_ready(&self, process: &Process) -> Result<(), PostgresError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            match self.readiness().await? {
                Readiness::Ready => return Ok(()),
                Readiness::NotProvisioned => return self.provision().await,
                Readiness::NotReady(source) => {
                    if let Some(exit) = process.exit() {
                        let tail = log_tail(&self.log, LOG_TAIL_BYTES);
                        return Err(PostgresError::Exited { exit, log: self.log.clone(), tail });
                    }
                    if Instant::now() > deadline {
                        let log = self.log.clone();
                        return Err(PostgresError::Unresponsive { within: READY_TIMEOUT, log, source });
                    }
                    sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    async fn readiness(&self) -> Result<Readiness, PostgresError> {
        let options = self.options(SCHEDULER_ROLE, DATABASE, &self.read_secret(&self.password_file())?);
        let error = match timeout(CONNECT_TIMEOUT, options.connect()).await {
            Ok(Ok(connection)) => {
                close(connection).await;
                return Ok(Readiness::Ready);
            }
            Ok(Err(error)) => error,
            Err(_) => return Ok(Readiness::NotReady(sqlx::Error::PoolTimedOut)),
        };
        let code = error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned());
        Ok(match code.as_deref() {
            // SQLSTATEs invalid_password (also returned for an unknown user), invalid_authorization_specification and
            // invalid_catalog_name.
            Some("28P01" | "28000" | "3D000") => Readiness::NotProvisioned,
            _ => Readiness::NotReady(error),
        })
    }

    /// Creates the scheduler's role and database. Idempotent: an interrupted run can be repeated.
    async fn provision(&self) -> Result<(), PostgresError> {
        let failed = |action| move |source| PostgresError::Query { action, source };
        let admin = self.options(ADMIN_ROLE, "postgres", &self.read_secret(&self.admin_password_file())?);
        let mut connection = admin.connect().await.map_err(failed("log in as administrator"))?;
        let password = self.read_secret(&self.password_file())?;
        let exists: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_roles WHERE rolname = $1")
            .bind(SCHEDULER_ROLE)
            .fetch_optional(&mut connection)
            .await
            .map_err(failed("query the roles"))?;
        let verb = if exists.is_some() { "ALTER" } else { "CREATE" };
        // A role's password cannot be a parameter; this one is hexadecimal and is sent over the private socket.
        sqlx::raw_sql(AssertSqlSafe(format!("{verb} ROLE {SCHEDULER_ROLE} LOGIN CREATEDB PASSWORD '{password}'")))
            .execute(&mut connection)
            .await
            .map_err(failed("create the role"))?;
        let exists: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_database WHERE datname = $1")
            .bind(DATABASE)
            .fetch_optional(&mut connection)
            .await
            .map_err(failed("query the databases"))?;
        if exists.is_none() {
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {DATABASE} OWNER {SCHEDULER_ROLE}")))
                .execute(&mut connection)
                .await
                .map_err(failed("create the database"))?;
        }
        close(connection).await;
        Ok(())
    }

    pub(super) fn options(&self, user: &str, database: &str, password: &str) -> PgConnectOptions {
        options(&self.socket, SOCKET_PORT, user, database, password)
    }
}

fn options(socket: &std::path::Path, port: u16, user: &str, database: &str, password: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(socket)
        .port(port)
        .username(user)
        .database(database)
        .password(password)
        // No TLS is needed: a private socket cannot be eavesdropped on.
        .ssl_mode(PgSslMode::Disable)
        .disable_statement_logging()
}

pub(super) async fn close(connection: PgConnection) {
    if let Err(error) = connection.close().await {
        tracing::debug!(%error, "cannot close a connection");
    }
}

impl PostgresAddress {
    /// Returns those settings of the running server that durability depends on.
    pub async fn durability_settings(&self) -> Result<Vec<Setting>, PostgresError> {
        tokio::time::timeout(CONNECT_TIMEOUT, self.query_durability_settings()).await.unwrap_or_else(|_| {
            let source = sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer within 5 s"));
            Err(PostgresError::Query { action: "read the settings", source })
        })
    }

    async fn query_durability_settings(&self) -> Result<Vec<Setting>, PostgresError> {
        let path = &self.password_file;
        let password =
            files::read_if_exists(path)?.ok_or_else(|| PostgresError::PasswordLost { path: path.to_owned() })?;
        let failed = |source| PostgresError::Query { action: "read the settings", source };
        let options = options(&self.host, self.port, &self.user, &self.database, &password);
        let mut connection = options.connect().await.map_err(failed)?;
        let settings = sqlx::query_as(
            "SELECT name, setting FROM pg_settings
             WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'data_checksums') ORDER BY name",
        )
        .fetch_all(&mut connection)
        .await
        .map_err(failed)?;
        close(connection).await;
        Ok(settings)
    }
}
