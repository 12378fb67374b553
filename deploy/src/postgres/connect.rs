//! Talking to the server: waiting until it answers, the services' user and database, and the settings the doctor reads.

use std::time::Duration;

use cfq_link::child::{Process, log_tail};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::time::{Instant, sleep, timeout};

use super::initialise::ADMIN;
use super::{DATABASE, PORT, Postgres, PostgresError, PostgresFacts, TAIL, USER};
use crate::files;

const POLL: Duration = Duration::from_millis(10);
/// Replaying the log after a crash can take this long on a slow disk.
const READY: Duration = Duration::from_secs(180);
/// One try; a server that accepts and then says nothing is not ready.
const TRY: Duration = Duration::from_secs(5);

/// One setting of the running server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, sqlx::FromRow)]
pub struct Setting {
    pub name: String,
    pub setting: String,
}

enum State {
    Ready,
    /// It answers, but our user or database is not there.
    Bare,
    NotYet(sqlx::Error),
}

impl Postgres {
    pub(super) async fn ready(&self, process: &Process) -> Result<(), PostgresError> {
        let deadline = Instant::now() + READY;
        loop {
            match self.state().await? {
                State::Ready => return Ok(()),
                State::Bare => return self.provision().await,
                State::NotYet(source) => {
                    if let Some(exit) = process.exit() {
                        let tail = log_tail(&self.log, TAIL);
                        return Err(PostgresError::Ended { exit, log: self.log.clone(), tail });
                    }
                    if Instant::now() > deadline {
                        return Err(PostgresError::Silent { within: READY, log: self.log.clone(), source });
                    }
                    sleep(POLL).await;
                }
            }
        }
    }

    async fn state(&self) -> Result<State, PostgresError> {
        let options = self.options(USER, DATABASE, &self.secret(&self.password_file())?);
        let error = match timeout(TRY, options.connect()).await {
            Ok(Ok(connection)) => {
                close(connection).await;
                return Ok(State::Ready);
            }
            Ok(Err(error)) => error,
            Err(_) => return Ok(State::NotYet(sqlx::Error::PoolTimedOut)),
        };
        let code = error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned());
        Ok(match code.as_deref() {
            // invalid_password (also said of an unknown user), invalid_authorization_specification, invalid_catalog_name
            Some("28P01" | "28000" | "3D000") => State::Bare,
            _ => State::NotYet(error),
        })
    }

    /// Can be interrupted anywhere and run again.
    async fn provision(&self) -> Result<(), PostgresError> {
        let failed = |action| move |source| PostgresError::Query { action, source };
        let admin = self.options(ADMIN, "postgres", &self.secret(&self.admin_password_file())?);
        let mut connection = admin.connect().await.map_err(failed("log in as administrator"))?;
        let password = self.secret(&self.password_file())?;
        let there: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_roles WHERE rolname = $1")
            .bind(USER)
            .fetch_optional(&mut connection)
            .await
            .map_err(failed("look for the user"))?;
        let verb = if there.is_some() { "ALTER" } else { "CREATE" };
        // A role's password cannot be a parameter; ours is hexadecimal. The server gets it over its private socket.
        sqlx::raw_sql(AssertSqlSafe(format!("{verb} ROLE {USER} LOGIN CREATEDB PASSWORD '{password}'")))
            .execute(&mut connection)
            .await
            .map_err(failed("make the user"))?;
        let there: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_database WHERE datname = $1")
            .bind(DATABASE)
            .fetch_optional(&mut connection)
            .await
            .map_err(failed("look for the database"))?;
        if there.is_none() {
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {DATABASE} OWNER {USER}")))
                .execute(&mut connection)
                .await
                .map_err(failed("make the database"))?;
        }
        close(connection).await;
        Ok(())
    }

    fn options(&self, user: &str, database: &str, password: &str) -> PgConnectOptions {
        options(&self.socket, PORT, user, database, password)
    }
}

fn options(socket: &std::path::Path, port: u16, user: &str, database: &str, password: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(socket)
        .port(port)
        .username(user)
        .database(database)
        .password(password)
        // A private socket has nobody to listen in.
        .ssl_mode(PgSslMode::Disable)
        .disable_statement_logging()
}

async fn close(connection: PgConnection) {
    if let Err(error) = connection.close().await {
        tracing::debug!(%error, "closing a connection");
    }
}

impl PostgresFacts {
    /// The settings durability rests on, as the running server has them.
    pub async fn durability(&self) -> Result<Vec<Setting>, PostgresError> {
        let path = &self.password_file;
        let password =
            files::read_if_there(path)?.ok_or_else(|| PostgresError::PasswordLost { path: path.to_owned() })?;
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
