//! Dumps of the scheduler's database. pg_dump and pg_restore of the server's own version make and restore them.

use std::collections::BTreeMap;
use std::fs::File;
use std::process::Stdio;

use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use tokio::process::Command;

use super::connect::close;
use super::{DATABASE, Postgres, PostgresError, SCHEDULER_ROLE, SOCKET_PORT};

/// Number of rows of each table, by its name.
pub type RowCounts = BTreeMap<String, i64>;

impl Postgres {
    /// Writes a snapshot of the scheduler's database in pg_dump's custom format, while the server runs. Returns the number
    /// of rows in the dump.
    pub async fn dump(&self, to: &File) -> Result<RowCounts, PostgresError> {
        let failed = |source| PostgresError::Query { action: "read the database", source };
        let mut connection = self.connect_as_scheduler().await?;
        // pg_dump reads the snapshot of this transaction, so that the numbers are those of the dump.
        let begin = "SET idle_in_transaction_session_timeout = 0; SET statement_timeout = 0; \
                     BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
        sqlx::raw_sql(begin).execute(&mut connection).await.map_err(failed)?;
        let snapshot: String =
            sqlx::query_scalar("SELECT pg_export_snapshot()").fetch_one(&mut connection).await.map_err(failed)?;
        let rows = count_rows(&mut connection).await.map_err(failed)?;
        let to = to.try_clone().map_err(|source| PostgresError::Client { program: "pg_dump", source })?;
        self.run_client("pg_dump", &["--format=custom", "--snapshot", &snapshot], Stdio::null(), to.into()).await?;
        close(connection).await;
        Ok(rows)
    }

    /// Restores a dump into the empty database of a new server, in one transaction. Returns the number of rows in the
    /// database.
    pub async fn restore(&self, from: File) -> Result<RowCounts, PostgresError> {
        let args = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges"];
        self.run_client("pg_restore", &args, from.into(), Stdio::null()).await?;
        let failed = |source| PostgresError::Query { action: "read the restored database", source };
        let mut connection = self.connect_as_scheduler().await?;
        let rows = count_rows(&mut connection).await.map_err(failed)?;
        // Without statistics, the first queries would read whole tables.
        let analyze: String = rows.keys().map(|table| format!("ANALYZE {};", quoted_name(table))).collect();
        sqlx::raw_sql(AssertSqlSafe(analyze)).execute(&mut connection).await.map_err(failed)?;
        close(connection).await;
        Ok(rows)
    }

    async fn connect_as_scheduler(&self) -> Result<PgConnection, PostgresError> {
        let failed = |source| PostgresError::Query { action: "log in as the scheduler", source };
        self.options(SCHEDULER_ROLE, DATABASE, &self.read_secret(&self.password_file())?)
            .connect()
            .await
            .map_err(failed)
    }

    /// Runs a client program of Postgres on the scheduler's database. It ends if this call is cancelled.
    async fn run_client(
        &self,
        program: &'static str,
        args: &[&str],
        stdin: Stdio,
        stdout: Stdio,
    ) -> Result<(), PostgresError> {
        let path = self.bin.join(program);
        if !path.exists() {
            return Err(PostgresError::NoClient { program, folder: self.bin.clone() });
        }
        let mut command = Command::new(path);
        command.arg("--host").arg(&self.socket).arg("--port").arg(SOCKET_PORT.to_string());
        command.args(["--username", SCHEDULER_ROLE, "--no-password", "--dbname", DATABASE]).args(args);
        command.env_clear().envs([("LC_ALL", "C"), ("TZ", "UTC"), ("PATH", "/usr/bin:/bin")]);
        command.env("PGPASSWORD", self.read_secret(&self.password_file())?);
        command.current_dir("/").stdin(stdin).stdout(stdout).stderr(Stdio::piped()).kill_on_drop(true);
        if let Some(account) = self.account {
            command.uid(account.uid).gid(account.gid);
        }
        let failed = |source| PostgresError::Client { program, source };
        let output = command.spawn().map_err(failed)?.wait_with_output().await.map_err(failed)?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(PostgresError::ClientFailed { program, message });
        }
        Ok(())
    }
}

fn quoted_name(table: &str) -> String {
    format!("\"{}\"", table.replace('"', "\"\""))
}

async fn count_rows(connection: &mut PgConnection) -> sqlx::Result<RowCounts> {
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT tablename::text FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
    )
    .fetch_all(&mut *connection)
    .await?;
    let mut rows = RowCounts::new();
    for table in tables {
        let count = format!("SELECT count(*) FROM {}", quoted_name(&table));
        rows.insert(table, sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(&mut *connection).await?);
    }
    Ok(rows)
}
