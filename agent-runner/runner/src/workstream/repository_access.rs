//! Opens a user's repository in a process of its own. The files are checked before libgit2 opens them, but a file can be
//! replaced by a FIFO after the check, a compressed object can need more memory than its header states, and a damaged
//! pack can crash libgit2. Then only this process ends or is killed, and the other tasks of the runner continue.
//!
//! The runner writes a [`Request`] to the process's standard input, which stays open until the runner has the reply or
//! no longer wants it. A process that delivers a branch waits for the runner at two points: until the delivery is
//! recorded in the runner's data folder, and once it has locked the branch.

use std::path::{Path, PathBuf};

use cfq_link::child::ProcessIdentity;
use cfq_link::failpoint;

use self::client::run;
use self::messages::{Message, Request};
use super::deliver::{BRANCH_LOCKED, DeliveredBranch, DeliveryRequest, deliver_within};
use super::delivery_record::{DeliveryRecord, DeliveryRecordFile};
use super::error::{GitError, io_context};
use super::folder_files::{FolderFiles, FolderRequest};
use super::map_of_commit::{Parsers, RepoMapReply, RepoMapRequest};
use super::mirror::Mirror;
use super::review_range::{ReviewRange, ReviewRangeRequest};
use super::size_limits::{SizeLimits, StopCondition};
use super::source::head_commit;
use super::start_point::{StartPoint, StartPointRequest};
use super::uncommitted::UncommittedRequest;

mod client;
mod messages;
mod sandbox;
mod serve;

pub use serve::serve_repository_access;

/// Program that answers one request with [`serve_repository_access`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepositoryProgram {
    pub path: PathBuf,
    pub args: Vec<String>,
}

/// Access to users' repositories; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct RepositoryAccess(Option<RepositoryProgram>);

impl RepositoryAccess {
    /// Access through a process of `program` for each operation.
    pub fn new(program: RepositoryProgram) -> Self {
        Self(Some(program))
    }

    /// Access in this process, for programs that cannot start themselves as a child.
    pub fn in_process() -> Self {
        Self(None)
    }

    /// Returns the commit id of HEAD, as [`head_commit`] does.
    ///
    /// # Errors
    /// As [`head_commit`], the errors of `stop`, [`GitError::AccessFailed`] and [`GitError::AccessEnded`].
    pub fn head(&self, repository: &Path, stop: &StopCondition) -> Result<String, GitError> {
        let Some(program) = &self.0 else { return head_commit(repository) };
        match run(program, &Request::Head { repository: repository.to_owned() }, stop, no_steps)? {
            Message::Done { commit } => Ok(commit),
            other => Err(other.unexpected(repository)),
        }
    }

    /// Copies `commit` into the mirror, unless the mirror has it.
    ///
    /// # Errors
    /// As [`Mirror::lock_for_fetch`] and [`Self::copy`].
    pub fn fetch(&self, mirror: &Mirror, data_dir: &Path, commit: &str, stop: &StopCondition) -> Result<(), GitError> {
        match mirror.lock_for_fetch(commit, stop)? {
            Some(_lock) => self.copy(mirror, data_dir, commit, stop),
            None => Ok(()),
        }
    }

    /// Copies `commit` into the mirror, whose lock the caller holds (see [`Mirror::lock_for_fetch`]).
    ///
    /// # Errors
    /// As [`Mirror::fetch_base_within`], [`GitError::AccessFailed`] and [`GitError::AccessEnded`].
    pub fn copy(&self, mirror: &Mirror, data_dir: &Path, commit: &str, stop: &StopCondition) -> Result<(), GitError> {
        let Some(program) = &self.0 else { return mirror.copy_base(commit, &SizeLimits::default(), stop) };
        let (repository, data_dir) = (mirror.source().to_owned(), data_dir.to_owned());
        let request = Request::Copy { repository, data_dir, commit: commit.to_owned() };
        match run(program, &request, stop, no_steps)? {
            Message::Done { .. } => Ok(()),
            other => Err(other.unexpected(mirror.source())),
        }
    }

    /// Creates a branch in the user's repository: as [`deliver_recorded`](super::deliver_recorded) with a `record`, else
    /// as [`deliver`](super::deliver).
    ///
    /// # Errors
    /// As these two, [`GitError::AccessFailed`], [`GitError::AccessEnded`] and [`GitError::AccessTimeLimit`].
    pub fn deliver(
        &self,
        request: DeliveryRequest,
        record: Option<&DeliveryRecordFile>,
        stop: &StopCondition,
    ) -> Result<DeliveredBranch, GitError> {
        let Some(program) = &self.0 else {
            return deliver_within(&request, record.map(|record| record as _), stop);
        };
        let earlier = record.map(DeliveryRecordFile::read).transpose()?.flatten();
        let repository = request.repository.clone();
        let request = Request::Deliver { request, is_recorded: record.is_some(), earlier };
        let on_step = |pid, message| match (message, record) {
            (Message::Record { git_dir, branch, commit, created }, Some(record)) => {
                let process = ProcessIdentity::of(pid);
                record.write(&DeliveryRecord { git_dir, branch, commit, process, created })
            }
            (Message::Locked, _) => {
                failpoint::hit(BRANCH_LOCKED);
                Ok(())
            }
            (other, _) => Err(other.unexpected(&repository)),
        };
        match run(program, &request, stop, on_step)? {
            Message::Delivered { branch, commit } => Ok(DeliveredBranch { branch, commit }),
            other => Err(other.unexpected(&repository)),
        }
    }

    /// Finds the repository and the base commit of a new task.
    ///
    /// # Errors
    /// As [`StartPointRequest::find`], [`GitError::AccessFailed`], [`GitError::AccessEnded`] and
    /// [`GitError::AccessTimeLimit`].
    pub fn start_point(&self, request: StartPointRequest, stop: &StopCondition) -> Result<StartPoint, GitError> {
        let Some(program) = &self.0 else { return request.find() };
        let dir = request.dir.clone();
        match run(program, &Request::StartPoint(request), stop, no_steps)? {
            Message::StartPoint(found) => Ok(found),
            other => Err(other.unexpected(&dir)),
        }
    }

    /// Counts the changes of the working tree that are not committed, as [`UncommittedRequest`] describes it.
    ///
    /// # Errors
    /// As [`UncommittedRequest::count`], and as [`Self::start_point`].
    pub fn uncommitted(&self, request: UncommittedRequest, stop: &StopCondition) -> Result<u64, GitError> {
        let Some(program) = &self.0 else { return request.count() };
        let dir = request.dir.clone();
        match run(program, &Request::Uncommitted(request), stop, no_steps)? {
            Message::Uncommitted { files } => Ok(files),
            other => Err(other.unexpected(&dir)),
        }
    }

    /// Finds the commits to review.
    ///
    /// # Errors
    /// As [`ReviewRangeRequest::find`], and as [`Self::start_point`].
    pub fn review_range(&self, request: ReviewRangeRequest, stop: &StopCondition) -> Result<ReviewRange, GitError> {
        let Some(program) = &self.0 else { return request.find() };
        let dir = request.start.dir.clone();
        match run(program, &Request::ReviewRange(request), stop, no_steps)? {
            Message::ReviewRange(found) => Ok(found),
            other => Err(other.unexpected(&dir)),
        }
    }

    /// Makes a map of a commit.
    ///
    /// # Errors
    /// As [`Self::start_point`], [`GitError::TooLarge`], and [`GitError::Io`] if the cache cannot be written.
    pub fn repo_map(&self, request: RepoMapRequest, stop: &StopCondition) -> Result<RepoMapReply, GitError> {
        let Some(program) = &self.0 else {
            return request.answer(&io_context("start threads", Parsers::start())?, stop);
        };
        let dir = request.start.dir.clone();
        match run(program, &Request::RepoMap(request), stop, no_steps)? {
            Message::RepoMap(reply) => Ok(reply),
            other => Err(other.unexpected(&dir)),
        }
    }

    /// Reads the text files in a folder of a commit.
    ///
    /// # Errors
    /// As [`Self::start_point`].
    pub fn folder_files(&self, request: FolderRequest, stop: &StopCondition) -> Result<FolderFiles, GitError> {
        let Some(program) = &self.0 else { return request.answer() };
        let dir = request.start.dir.clone();
        match run(program, &Request::Folder(request), stop, no_steps)? {
            Message::Folder(files) => Ok(files),
            other => Err(other.unexpected(&dir)),
        }
    }
}

/// The steps of an operation that has none for which the process waits.
fn no_steps(_pid: u32, message: Message) -> Result<(), GitError> {
    Err(message.unexpected(Path::new("the repository")))
}
