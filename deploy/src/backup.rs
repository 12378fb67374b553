//! Backups of a server: its database and its keys in one file. Everything else in the data folder can be recomputed from
//! these two and from the users' repositories: mirrors, checkouts, and the messages in NATS.
//!
//! `archive` describes the file.

mod archive;

use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cfq_link::child::Account;
use cfq_link::clock;
use cfq_link::stop::Stop;
use serde::{Deserialize, Serialize};

use crate::account::{self, AccountError};
use crate::files::{self, FileError, FolderError};
use crate::lock::{DataLock, LockError};
use crate::paths::{Paths, PathsError};
use crate::postgres::{self, Postgres, PostgresError, RowCounts};
use crate::services::{Finder, ServiceKind, ServiceOptions, ServiceProgram, ServicesError};
use crate::stack::{self, StackError};
use crate::status_output::StatusOutput;

/// How long a dump is tried again while the server starts or stops.
const RETRY_LIMIT: Duration = Duration::from_secs(60);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Services(#[from] ServicesError),
    #[error(transparent)]
    Stack(#[from] StackError),
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    #[error(
        "{data} has no database, so there is nothing to back up: `cfq up` creates one. A machine that joined keeps its \
         work on the server; run `cfq backup` there"
    )]
    NoDatabase { data: PathBuf },
    #[error("cannot write the backup {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path} exists already: choose another name, or move it away")]
    Exists { path: PathBuf },
    #[error(
        "{data} is not empty, and a backup is restored only into a new data folder: move it away, or choose another \
         folder with CFQ_DATA or --data"
    )]
    NotEmpty { data: PathBuf },
    #[error("{data} is a mount point, which a restore cannot replace: restore into {data}/cfq, with --data")]
    MountPoint { data: PathBuf },
    #[error(
        "{parent} belongs to another user or can be changed by others, so root restores nothing there: choose another \
         folder with --data (with --check: CFQ_CACHE), or restore as that user"
    )]
    OpenParent { parent: PathBuf },
    #[error("{path} has more than {} bytes, so it is no key of cfq: move it away", archive::MAX_SMALL_BYTES)]
    LargeKey { path: PathBuf },
    #[error("{path} is not a complete backup of cfq")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path} was made by cfq {version}, whose backups have another form: restore it with that version")]
    Format { path: PathBuf, version: String },
    #[error(
        "the backup is of Postgres {of}, and Postgres {found} cannot read it: install that version, or set \
         CFQ_SERVICES=fetched"
    )]
    OlderPostgres { of: u32, found: u32 },
    #[error("the restored database is not complete: the table {table} has {found} of {expected} rows")]
    Incomplete { table: String, expected: i64, found: i64 },
    #[error("interrupted")]
    Interrupted,
}

/// What a backup contains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the archive's layout.
    pub format: u32,
    /// Version of cfq that made the backup.
    pub cfq_version: String,
    /// Time of the backup, in seconds since 1970.
    pub created_at: f64,
    /// Major version of Postgres.
    pub postgres: u32,
    /// Number of rows of each table.
    pub rows: RowCounts,
}

/// A backup that was written.
#[derive(Debug)]
pub struct Created {
    pub manifest: Manifest,
    /// Size of the file.
    pub bytes: u64,
}

/// Writes a backup of the server on these folders to the new file `to`, which only its owner can read. The server may be
/// running. If `stop` is raised, unfinished files are removed.
pub async fn create(
    paths: &Paths,
    services: &ServiceOptions,
    status: StatusOutput,
    to: &Path,
    stop: Stop,
) -> Result<Created, BackupError> {
    let Some(major) = postgres::pinned_major(paths)? else {
        return Err(BackupError::NoDatabase { data: paths.data.clone() });
    };
    // Also a link whose target is missing.
    if fs::symlink_metadata(to).is_ok() {
        return Err(BackupError::Exists { path: to.to_owned() });
    }
    let folder = match to.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let unwritable = |source| BackupError::Write { path: to.to_owned(), source };
    let mut dump = tempfile::tempfile_in(folder).map_err(unwritable)?;
    let account = owner(&paths.postgres())?;
    // Refuses a folder of another user, to which root must not write.
    paths.prepare(account)?;
    let program = stoppable(&stop, find_postgres(paths, services, account, Some(major), status)).await?;
    let mut first_failure = None;
    let (created_at, rows) = loop {
        let created_at = clock::unix_seconds() as f64;
        let error = match dump_once(paths, &program, account, &dump, &stop).await {
            Ok(rows) => break (created_at, rows),
            Err(error) => error,
        };
        let failing = first_failure.get_or_insert_with(Instant::now).elapsed();
        if !may_pass(&error) || failing > RETRY_LIMIT {
            return Err(error);
        }
        stoppable(&stop, async {
            tokio::time::sleep(RETRY_INTERVAL).await;
            Ok::<_, BackupError>(())
        })
        .await?;
        dump.set_len(0).and_then(|()| dump.rewind()).map_err(unwritable)?;
    };
    let cfq_version = env!("CARGO_PKG_VERSION").to_owned();
    let manifest = Manifest { format: archive::FORMAT, cfq_version, created_at, postgres: major, rows };
    let (keys, folder, to) = (paths.keys(), folder.to_owned(), to.to_owned());
    let bytes = blocking(&stop, {
        let manifest = manifest.clone();
        move |stop| archive::write(&manifest, &keys, dump, &folder, &to, stop)
    })
    .await?;
    Ok(Created { manifest, bytes })
}

/// Dumps the database of the running server, or of a server that is started for it if none holds the data folder.
async fn dump_once(
    paths: &Paths,
    program: &ServiceProgram,
    account: Option<Account>,
    dump: &File,
    stop: &Stop,
) -> Result<RowCounts, BackupError> {
    match DataLock::acquire(paths) {
        Ok(_lock) => {
            stack::stop_leftovers(paths).await?;
            let postgres = Postgres::prepare(paths, program, account).await?;
            let process = postgres.start().await?;
            let dumped = stoppable(stop, postgres.dump(dump)).await;
            Postgres::stop(&process).await?;
            dumped
        }
        // `cfq join` runs a node, and no Postgres.
        Err(LockError::Held { holder, .. }) if !holder.as_ref().is_some_and(|holder| holder.runs("join")) => {
            stoppable(stop, Postgres::running(paths, program, account).dump(dump)).await
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the error may be that of a server that starts or stops at this moment.
fn may_pass(error: &BackupError) -> bool {
    match error {
        BackupError::Postgres(PostgresError::ClientFailed { message, .. }) => {
            !["No space left", "Disk quota exceeded"].iter().any(|full| message.contains(full))
        }
        BackupError::Postgres(PostgresError::Query { .. }) => true,
        _ => false,
    }
}

/// The account that owns a folder of Postgres: that of the running server. `None` for an ordinary user.
fn owner(folder: &Path) -> Result<Option<Account>, BackupError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let metadata = fs::metadata(folder).map_err(files::error("read", folder))?;
    if metadata.uid() == 0 {
        // Postgres never runs as root.
        return Err(FolderError::ForeignFolder { path: folder.to_owned(), uid: 0 }.into());
    }
    Ok(Some(Account { uid: metadata.uid(), gid: metadata.gid() }))
}

/// Restores a backup into the data folder, which must not exist or be empty. If it fails, or if `stop` is raised, the
/// folder stays as it was.
pub async fn restore(
    paths: &Paths,
    services: &ServiceOptions,
    status: StatusOutput,
    from: &Path,
    stop: Stop,
) -> Result<Manifest, BackupError> {
    let data = match fs::canonicalize(&paths.data) {
        Ok(data) => data,
        Err(error) if error.kind() == io::ErrorKind::NotFound => paths.data.clone(),
        Err(error) => return Err(files::error("read", &paths.data)(error).into()),
    };
    let parent = data.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(files::error("create", parent))?;
    let failed = || files::error("read", &data);
    if data.exists() {
        if fs::read_dir(&data).map_err(failed())?.next().is_some() {
            return Err(BackupError::NotEmpty { data });
        }
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).map_err(failed());
        if device(&data)? != device(parent)? {
            return Err(BackupError::MountPoint { data });
        }
    }
    let (work, manifest) = restore_below(parent, paths, services, status, from, &stop).await?;
    fs::rename(work.path(), &data).map_err(|error| match error.kind() {
        // A part of the same file system that is mounted a second time.
        io::ErrorKind::ResourceBusy => BackupError::MountPoint { data: data.clone() },
        _ => files::error("create", &data)(error).into(),
    })?;
    // The folder has another name now, so there is nothing to remove.
    drop(work.keep());
    files::sync_folder(parent)?;
    Ok(manifest)
}

/// Restores a backup into a temporary folder, which is removed, so that every byte of the backup is read and counted.
pub async fn check(
    paths: &Paths,
    services: &ServiceOptions,
    status: StatusOutput,
    from: &Path,
    stop: Stop,
) -> Result<Manifest, BackupError> {
    fs::create_dir_all(&paths.cache).map_err(files::error("create", &paths.cache))?;
    let (_work, manifest) = restore_below(&paths.cache, paths, services, status, from, &stop).await?;
    Ok(manifest)
}

/// Restores a backup into a new folder below `parent`, which is a data folder then.
async fn restore_below(
    parent: &Path,
    paths: &Paths,
    services: &ServiceOptions,
    status: StatusOutput,
    from: &Path,
    stop: &Stop,
) -> Result<(tempfile::TempDir, Manifest), BackupError> {
    let file = File::open(from).map_err(files::error("read", from))?;
    if rustix::process::geteuid().is_root() && !files::only_own_user_writes(parent) {
        return Err(BackupError::OpenParent { parent: parent.to_owned() });
    }
    let account = account::for_services(services.account.as_deref(), status)?;
    let work =
        tempfile::Builder::new().prefix(".cfq-restore-").tempdir_in(parent).map_err(files::error("write", parent))?;
    let work_paths = Paths { data: work.path().to_owned(), ..paths.clone() };
    work_paths.prepare(account)?;
    let dump = tempfile::tempfile_in(work.path()).map_err(files::error("write", work.path()))?;
    let (manifest, dump) = blocking(stop, {
        let (keys, from) = (work_paths.keys(), from.to_owned());
        move |stop| archive::read(file, &keys, dump, &from, stop)
    })
    .await?;
    let program = stoppable(stop, find_postgres(&work_paths, services, account, None, status)).await?;
    if program.version.major < manifest.postgres {
        return Err(BackupError::OlderPostgres { of: manifest.postgres, found: program.version.major });
    }
    let postgres = Postgres::prepare(&work_paths, &program, account).await?;
    let process = postgres.start().await?;
    let restored = stoppable(stop, postgres.restore(dump)).await;
    Postgres::stop(&process).await?;
    // For a long path, it is outside the data folder. The next start creates it again.
    if let Err(error) = fs::remove_dir(postgres.address().host) {
        tracing::debug!(%error, "the folder of the socket stays");
    }
    let rows = restored?;
    for (table, expected) in &manifest.rows {
        let found = rows.get(table).copied().unwrap_or(0);
        if found != *expected {
            return Err(BackupError::Incomplete { table: table.clone(), expected: *expected, found });
        }
    }
    Ok((work, manifest))
}

async fn find_postgres(
    paths: &Paths,
    options: &ServiceOptions,
    account: Option<Account>,
    pinned: Option<u32>,
    status: StatusOutput,
) -> Result<ServiceProgram, BackupError> {
    let (paths, options) = (paths.clone(), options.clone());
    let find = move || {
        let finder = Finder { paths: &paths, options: &options, account, pinned, may_fetch: true, status };
        finder.find(ServiceKind::Postgres)
    };
    match tokio::task::spawn_blocking(find).await {
        Ok(found) => Ok(found?),
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// The result of `work`, which is cancelled once `stop` is raised.
async fn stoppable<T, E: Into<BackupError>>(
    stop: &Stop,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, BackupError> {
    let mut stop = stop.clone();
    tokio::select! {
        biased;
        () = stop.raised() => Err(BackupError::Interrupted),
        done = work => done.map_err(Into::into),
    }
}

/// Runs `work` to its end on a thread for blocking work. Once `stop` is raised, `work` sees a raised flag.
async fn blocking<T: Send + 'static>(
    stop: &Stop,
    work: impl FnOnce(&AtomicBool) -> Result<T, BackupError> + Send + 'static,
) -> Result<T, BackupError> {
    let mut stop = stop.clone();
    let flag = Arc::new(AtomicBool::new(stop.is_raised()));
    let mut running = tokio::task::spawn_blocking({
        let flag = flag.clone();
        move || work(&flag)
    });
    let done = tokio::select! {
        biased;
        done = &mut running => done,
        () = stop.raised() => {
            flag.store(true, Ordering::Relaxed);
            running.await
        }
    };
    match done {
        Ok(Err(_)) if stop.is_raised() => Err(BackupError::Interrupted),
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
