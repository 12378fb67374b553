//! `cfq backup` and `cfq restore`: the database and the keys of this machine's server, in one file.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_deploy::backup::{self, BackupError, Manifest};
use cfq_deploy::{Paths, StatusOutput};
use cfq_link::stop::{self, Signals, Stop};
use schemars::JsonSchema;
use serde::Serialize;

use crate::config::Config;
use crate::connect;
use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Output};

/// A backup that was written.
#[derive(Serialize, JsonSchema)]
pub struct Written {
    /// Path of the file.
    file: PathBuf,
    /// Size of the file in bytes.
    bytes: u64,
    #[serde(flatten)]
    content: Content,
}

/// A backup that was restored or checked.
#[derive(Serialize, JsonSchema)]
pub struct Restored {
    /// The data folder into which it was restored; absent with --check.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<PathBuf>,
    #[serde(flatten)]
    content: Content,
}

/// What a backup contains.
#[derive(Serialize, JsonSchema)]
struct Content {
    /// Number of tasks, with the model calls of clients.
    tasks: i64,
    /// Number of events.
    events: i64,
    /// Time of the backup, in seconds since 1970.
    created_at: f64,
    /// Version of cfq that made the backup.
    cfq_version: String,
    /// Major version of Postgres.
    postgres: u32,
}

impl From<Manifest> for Content {
    fn from(manifest: Manifest) -> Self {
        let rows = |table| manifest.rows.get(table).copied().unwrap_or(0);
        Self {
            tasks: rows("tasks"),
            events: rows("events"),
            created_at: manifest.created_at,
            cfq_version: manifest.cfq_version,
            postgres: manifest.postgres,
        }
    }
}

impl Content {
    fn describe(&self) -> String {
        let (tasks, events) =
            (output::count(self.tasks as usize, "task"), output::count(self.events as usize, "event"));
        format!("{tasks} and {events}, as of {}", local_time::describe(self.created_at as i64))
    }
}

pub async fn backup(out: Output, paths: &Paths, config: &Config, file: &Path) -> anyhow::Result<Code> {
    if let Some(url) = connect::foreign_url(&paths.data) {
        return Err(exit::usage(format!(
            "CFQ_URL is {url}, not the local server of {}: run this on the machine of that server, or unset CFQ_URL to back \
             up the local server",
            paths.data.display()
        )));
    }
    let services = config.services.clone().overridden_by_environment()?;
    let create = |stop| backup::create(paths, &services, status(out), file, stop);
    let Some(created) = until_interrupted(create).await? else {
        out.status("interrupted: no backup was written");
        return Ok(Code::Interrupted);
    };
    let written = Written { file: file.to_owned(), bytes: created.bytes, content: created.manifest.into() };
    out.print(&written, |written| {
        format!(
            "{} ({:.1} MB) contains {}",
            written.file.display(),
            written.bytes as f64 / 1e6,
            written.content.describe()
        )
    })?;
    out.status("it also contains the keys of this server: whoever has it can use the server and read its tasks");
    out.status("it does not contain cfq.toml, models and your repositories");
    Ok(Code::Done)
}

pub async fn restore(out: Output, paths: &Paths, config: &Config, file: &Path, check: bool) -> anyhow::Result<Code> {
    let services = config.services.clone().overridden_by_environment()?;
    let restored = match check {
        true => until_interrupted(|stop| backup::check(paths, &services, status(out), file, stop)).await?,
        false => until_interrupted(|stop| backup::restore(paths, &services, status(out), file, stop)).await?,
    };
    let Some(manifest) = restored else {
        out.status(if check { "interrupted: the backup was not checked" } else { "interrupted: nothing was restored" });
        return Ok(Code::Interrupted);
    };
    let restored = Restored { data: (!check).then(|| paths.data.clone()), content: manifest.into() };
    out.print(&restored, |restored| match &restored.data {
        None => format!("the backup can be restored: it contains {}", restored.content.describe()),
        Some(data) => format!("restored {} to {}", restored.content.describe(), data.display()),
    })?;
    if !check {
        out.status(
            "before you start the restored server with `cfq up`, make sure that the server of the backup does not run:",
        );
        out.status("both would continue the same tasks");
        out.status("if you revoked machines or rotated the API token after the backup, do it again");
    }
    Ok(Code::Done)
}

fn status(out: Output) -> StatusOutput {
    if out.json { StatusOutput::Silent } else { StatusOutput::Stderr }
}

/// The result of `work`; `None` if a signal stopped it. What it began is removed then.
async fn until_interrupted<T, W>(work: impl FnOnce(Stop) -> W) -> anyhow::Result<Option<T>>
where
    W: Future<Output = Result<T, BackupError>>,
{
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let (stopper, stop) = stop::channel();
    let work = work(stop);
    tokio::pin!(work);
    let done = tokio::select! {
        biased;
        done = &mut work => done,
        _ = signals.next() => { stopper.stop(); work.await }
        _ = hangup.recv() => { stopper.stop(); work.await }
    };
    match done {
        Err(BackupError::Interrupted) => Ok(None),
        done => done.map(Some).map_err(coded),
    }
}

/// Wrong input has the exit code of a usage error.
fn coded(error: BackupError) -> anyhow::Error {
    match error {
        BackupError::NoDatabase { .. }
        | BackupError::Exists { .. }
        | BackupError::NotEmpty { .. }
        | BackupError::MountPoint { .. }
        | BackupError::OpenParent { .. }
        | BackupError::Format { .. } => exit::usage(error.to_string()),
        error => error.into(),
    }
}
