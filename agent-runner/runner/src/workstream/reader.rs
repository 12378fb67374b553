//! Reads a user's repository in a process of its own. The files are checked before libgit2 opens them, but a file can be
//! replaced by a FIFO after the check, a compressed object can need more memory than its header states, and a damaged
//! pack can crash libgit2. Then only this process ends or is killed, and the runner's other tasks continue.
//!
//! The runner writes a [`ReadRequest`] to the process's standard input, which stays open until the runner has the
//! [`ReadReply`] or no longer wants it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use self::process::run;
use super::error::GitError;
use super::mirror::Mirror;
use super::size_limits::{SizeLimits, StopCondition};
use super::source::head_commit;

mod process;

/// Maximum memory of the process, in bytes: enough for the object ids of the largest public repositories.
const MAX_MEMORY_BYTES: u64 = 8 << 30;
/// Time in which the process ends by itself after its standard input was closed, before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Task of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ReadRequest {
    /// Return the commit of HEAD.
    Head { repository: PathBuf },
    /// Copy a commit into the mirror, whose lock the runner holds.
    Copy { repository: PathBuf, data_dir: PathBuf, commit: String, within_ms: u64 },
}

/// Reply of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ReadReply {
    Done { commit: String },
    Failed { reason: String, is_invalid_request: bool, is_transient: bool },
}

/// Program that answers a [`ReadRequest`] with [`answer_read_request`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReaderProgram {
    pub path: PathBuf,
    pub args: Vec<String>,
}

/// Reader of users' repositories; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct RepositoryReader(Option<ReaderProgram>);

impl RepositoryReader {
    /// A reader that starts `program` for each request.
    pub fn new(program: ReaderProgram) -> Self {
        Self(Some(program))
    }

    /// A reader in this process, for programs that cannot start themselves as a reader.
    pub fn in_process() -> Self {
        Self(None)
    }

    /// Returns the commit id of HEAD, as [`head_commit`] does.
    ///
    /// # Errors
    /// As [`head_commit`], and the errors of `stop`.
    pub fn head(&self, repository: &Path, stop: &StopCondition) -> Result<String, GitError> {
        match &self.0 {
            None => head_commit(repository),
            Some(program) => run(program, &ReadRequest::Head { repository: repository.to_owned() }, stop),
        }
    }

    /// Copies `commit` into the mirror, whose lock the caller holds (see [`Mirror::lock_for_fetch`]).
    ///
    /// # Errors
    /// As [`Mirror::fetch_base_within`].
    pub fn copy(&self, mirror: &Mirror, data_dir: &Path, commit: &str, stop: &StopCondition) -> Result<(), GitError> {
        match &self.0 {
            None => mirror.copy_base(commit, &SizeLimits::default(), stop),
            Some(program) => {
                let (repository, data_dir) = (mirror.source().to_owned(), data_dir.to_owned());
                let within_ms = stop.limit().as_millis().try_into().unwrap_or(u64::MAX);
                let request = ReadRequest::Copy { repository, data_dir, commit: commit.to_owned(), within_ms };
                run(program, &request, stop).map(drop)
            }
        }
    }
}

/// Answers the request on standard input: the whole work of the process that [`RepositoryReader`] starts.
///
/// # Errors
/// An I/O error if the request cannot be read, the limits cannot be set, or the reply cannot be written.
pub fn answer_read_request() -> std::io::Result<()> {
    for (resource, bytes) in [(Resource::Data, MAX_MEMORY_BYTES), (Resource::Core, 0)] {
        let maximum = getrlimit(resource).maximum;
        let limit = Some(maximum.map_or(bytes, |maximum| maximum.min(bytes)));
        setrlimit(resource, Rlimit { current: limit, maximum: limit })?;
    }
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let request: ReadRequest = serde_json::from_str(&line)?;
    let within = match &request {
        ReadRequest::Head { .. } => Duration::MAX,
        ReadRequest::Copy { within_ms, .. } => Duration::from_millis(*within_ms),
    };
    let (stop, guard) = StopCondition::after(within);
    std::thread::Builder::new().name("stop".into()).spawn(move || {
        // Returns when the runner closes the pipe or dies.
        drop(input.read(&mut [0]));
        drop(guard);
        std::thread::sleep(STOP_GRACE);
        std::process::exit(1);
    })?;
    let reply = match answer(&request, &stop) {
        Ok(commit) => ReadReply::Done { commit },
        Err(error) => ReadReply::Failed {
            reason: error.with_causes(),
            is_invalid_request: error.is_invalid_request(),
            is_transient: error.is_transient(),
        },
    };
    std::io::stdout().write_all(&serde_json::to_vec(&reply)?)
}

fn answer(request: &ReadRequest, stop: &StopCondition) -> Result<String, GitError> {
    match request {
        ReadRequest::Head { repository } => head_commit(repository),
        ReadRequest::Copy { repository, data_dir, commit, .. } => {
            let mirror = Mirror::open(data_dir, repository)?;
            mirror.copy_base(commit, &SizeLimits::default(), stop).map(|()| commit.clone())
        }
    }
}
