//! Creates the delivery branch: the only write of cfq into the user's repository.
//!
//! A runner first writes the commits' objects, then records the delivery in its data folder ([`DeliveryRecordFile`]),
//! then creates the branch under git's lock; each of the three is on disk before the next begins. After a crash, the
//! record shows which lock or branch is cfq's own, even if the user has moved the branch since. The process that opens
//! the repository may be a child of the runner, which then writes the record for it ([`DeliveryRecorder`]).

use std::path::{Path, PathBuf};

use cfq_link::child::ProcessIdentity;
use cfq_link::failpoint;
use cfq_proto::loop_step::Artifact;
use git2::{ErrorCode, Repository, Signature};
use serde::{Deserialize, Serialize};

use super::commit::{AUTHOR_EMAIL, AUTHOR_NAME, rebuild};
use super::delivery_record::{DeliveryRecord, DeliveryRecordFile, EarlierDelivery};
use super::durable::sync_ref;
use super::error::{GitError, git_context, parse_oid};
use super::git_links::{check_branch_paths, check_object_paths};
use super::ref_lock::remove_own_lock;
use super::size_limits::{SizeLimits, StopCondition};
use super::source::open_source_within;

/// Number of names tried if the branch name is taken: the name itself, then with the suffixes `-2`, `-3`, ...
const MAX_BRANCH_NAMES: u32 = 50;
/// Failpoint that is reached while the branch is locked and not yet created.
pub(super) const BRANCH_LOCKED: &str = "runner.branch_locked";

/// A branch to create in the user's repository.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeliveryRequest {
    pub repository: PathBuf,
    /// Short branch name, without `refs/heads/`.
    pub branch: String,
    /// Id of the commit that the first artifact is based on.
    pub base: String,
    /// Oldest first.
    pub artifacts: Vec<Artifact>,
}

/// Durable record of a delivery that may have been begun by an earlier process.
pub(super) trait DeliveryRecorder {
    /// The recorded delivery; `None` if there is none.
    fn earlier(&self) -> Result<Option<EarlierDelivery>, GitError>;
    /// Records a delivery of this process; it is on disk when this returns.
    fn record(&self, git_dir: String, branch: String, commit: String, created: bool) -> Result<(), GitError>;
    /// Called while the branch is locked and not yet created.
    fn locked(&self) -> Result<(), GitError>;
}

impl DeliveryRecorder for DeliveryRecordFile {
    fn earlier(&self) -> Result<Option<EarlierDelivery>, GitError> {
        self.read()
    }

    fn record(&self, git_dir: String, branch: String, commit: String, created: bool) -> Result<(), GitError> {
        let process = ProcessIdentity::of(std::process::id());
        self.write(&DeliveryRecord { git_dir, branch, commit, process, created })
    }

    fn locked(&self) -> Result<(), GitError> {
        failpoint::hit(BRANCH_LOCKED);
        Ok(())
    }
}

/// A branch that was created in the user's repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveredBranch {
    /// Short branch name, without `refs/heads/`.
    pub branch: String,
    /// Id of the delivered commit. The user may have moved the branch since.
    pub commit: String,
}

/// Creates the branch `branch` with the commits of `artifacts` (oldest first). HEAD, the index and the working tree are
/// not changed. Idempotent: if the branch already points at the recorded commit, it is returned, and no write access is
/// needed. If it points at another commit, a numeric suffix is added to the name.
///
/// # Errors
/// A [`GitError`] if the repository cannot be opened or written, if the commits cannot be rebuilt
/// (see [`rebuild`]), if no branch name is free, if another program holds the branch's lock, or if a link would
/// redirect a write.
pub fn deliver(
    repository: &Path,
    branch: &str,
    base: &str,
    artifacts: &[Artifact],
) -> Result<DeliveredBranch, GitError> {
    deliver_within(&request(repository, branch, base, artifacts), None, &StopCondition::default())
}

/// Like [`deliver`], for a runner that may have delivered the same result before it was killed: a branch that it
/// created is found again after the user moved it, and a lock that it left is removed.
///
/// # Errors
/// As [`deliver`].
pub fn deliver_recorded(
    record: &DeliveryRecordFile,
    repository: &Path,
    branch: &str,
    base: &str,
    artifacts: &[Artifact],
) -> Result<DeliveredBranch, GitError> {
    deliver_within(&request(repository, branch, base, artifacts), Some(record), &StopCondition::default())
}

fn request(repository: &Path, branch: &str, base: &str, artifacts: &[Artifact]) -> DeliveryRequest {
    let (repository, branch, base) = (repository.to_owned(), branch.to_owned(), base.to_owned());
    DeliveryRequest { repository, branch, base, artifacts: artifacts.to_vec() }
}

/// Like [`deliver`], or with a recorder like [`deliver_recorded`], with a stop condition for the check of the
/// repository.
///
/// # Errors
/// As [`deliver`], and the errors of `stop` and of the recorder.
pub(super) fn deliver_within(
    request: &DeliveryRequest,
    recorder: Option<&dyn DeliveryRecorder>,
    stop: &StopCondition,
) -> Result<DeliveredBranch, GitError> {
    Delivery::open(request, recorder, stop)?.run(&request.branch)
}

/// State of a branch name in the user's repository.
enum NameState {
    Free,
    /// The branch was created by this delivery, now or before.
    Delivered,
    Taken,
}

struct Delivery<'a> {
    path: &'a Path,
    repository: Repository,
    base: &'a str,
    artifacts: &'a [Artifact],
    /// Recorded id of the commit to deliver.
    recorded: Option<String>,
    recorder: Option<&'a dyn DeliveryRecorder>,
    /// Delivery of the same commit to the same repository that an earlier call began.
    earlier: Option<EarlierDelivery>,
}

impl<'a> Delivery<'a> {
    fn open(
        request: &'a DeliveryRequest,
        recorder: Option<&'a dyn DeliveryRecorder>,
        stop: &StopCondition,
    ) -> Result<Self, GitError> {
        let DeliveryRequest { repository: path, base, artifacts, .. } = request;
        let repository = open_source_within(path, &SizeLimits::default(), stop)?;
        let recorded = artifacts.last().and_then(|a| a.commit.clone());
        let mut delivery = Self { path, repository, base, artifacts, recorded, recorder, earlier: None };
        if let Some(found) = recorder.map(DeliveryRecorder::earlier).transpose()?.flatten() {
            let is_same =
                found.record.git_dir == delivery.git_dir() && Some(&found.record.commit) == delivery.recorded.as_ref();
            delivery.earlier = Some(found).filter(|_| is_same);
        }
        Ok(delivery)
    }

    fn git_dir(&self) -> String {
        self.repository.commondir().to_string_lossy().into_owned()
    }

    /// File that git creates to lock the branch.
    fn lock_path(&self, branch: &str) -> PathBuf {
        self.repository.commondir().join(format!("{}.lock", branch_ref(branch)))
    }

    fn run(&self, branch: &str) -> Result<DeliveredBranch, GitError> {
        let numbered = (1..=MAX_BRANCH_NAMES).map(|n| if n == 1 { branch.to_owned() } else { format!("{branch}-{n}") });
        // The recorded name comes first: an earlier name may have become free since.
        let names = self.earlier.iter().map(|earlier| earlier.record.branch.clone()).chain(numbered);
        let mut rebuilt = None;
        for branch in names {
            if let Some(earlier) = self.earlier.as_ref().filter(|earlier| earlier.record.branch == branch) {
                remove_own_lock(&self.lock_path(&branch), earlier)?;
            }
            check_branch_paths(&self.repository, &branch)?;
            match self.name_state(&branch)? {
                NameState::Taken => continue,
                NameState::Delivered => {
                    sync_ref(&self.repository, &branch_ref(&branch))?;
                    let commit = self.recorded.clone().unwrap_or_default();
                    return Ok(DeliveredBranch { branch, commit });
                }
                NameState::Free => {}
            }
            let commit = match &rebuilt {
                Some(commit) => String::clone(commit),
                None => {
                    check_object_paths(&self.repository)?;
                    rebuilt.insert(rebuild(&self.repository, self.base, self.artifacts)?).clone()
                }
            };
            if self.create_branch(&branch, &commit)? {
                return Ok(DeliveredBranch { branch, commit });
            }
        }
        Err(GitError::BranchNamesTaken { path: self.path.to_owned(), branch: branch.to_owned() })
    }

    fn name_state(&self, branch: &str) -> Result<NameState, GitError> {
        let Some(tip) = branch_tip(&self.repository, branch)? else {
            // Creating the branch that HEAD names would change what is checked out.
            let is_head = is_head(&self.repository, branch);
            return Ok(if is_head { NameState::Taken } else { NameState::Free });
        };
        let Some(recorded) = &self.recorded else { return Ok(NameState::Taken) };
        let is_delivered =
            tip == *recorded || (self.recorder.is_some() && self.was_delivered(branch, &tip, recorded)?);
        Ok(if is_delivered { NameState::Delivered } else { NameState::Taken })
    }

    /// True if an earlier call created the branch at `recorded` and the user has moved it to `tip` since.
    fn was_delivered(&self, branch: &str, tip: &str, recorded: &str) -> Result<bool, GitError> {
        let delivered = parse_oid(recorded)?;
        if let Some(earlier) = self.earlier.as_ref().filter(|earlier| earlier.record.branch == branch) {
            // A branch that did not exist before and now contains the commit got it from cfq.
            let contains = |tip| self.repository.graph_descendant_of(tip, delivered).unwrap_or(false);
            if earlier.record.created || parse_oid(tip).is_ok_and(contains) {
                return Ok(true);
            }
        }
        // The record may be lost, or be in the data folder of another runner.
        let operation = || format!("read the reflog of {branch}");
        let reference = branch_ref(branch);
        // libgit2 would create a missing reflog.
        if !git_context(operation(), self.repository.reference_has_log(&reference))? {
            return Ok(false);
        }
        let reflog = git_context(operation(), self.repository.reflog(&reference))?;
        Ok(reflog.iter().any(|entry| entry.id_new() == delivered))
    }

    /// Creates the branch. Returns true if the branch points at `commit`, whether it was created now or before, and
    /// false if it points at another commit.
    fn create_branch(&self, branch: &str, commit: &str) -> Result<bool, GitError> {
        self.check_conflicts(branch)?;
        let reference = branch_ref(branch);
        self.write_record(branch, commit, false)?;
        let operation = || format!("create the branch {branch}");
        let mut transaction = git_context(operation(), self.repository.transaction())?;
        if let Err(source) = transaction.lock_ref(&reference) {
            return Err(match source.code() {
                ErrorCode::Locked => GitError::BranchLocked { lock: self.lock_path(branch), branch: branch.to_owned() },
                _ => GitError::Git { operation: operation(), source },
            });
        }
        self.recorder.map_or(Ok(()), DeliveryRecorder::locked)?;
        if let Some(tip) = branch_tip(&self.repository, branch)? {
            // Another runner may have delivered it since the first look, and the user may have moved it since.
            return Ok(tip == commit || (self.recorder.is_some() && self.was_delivered(branch, &tip, commit)?));
        }
        // The identity is fixed: libgit2 would take it from the repository's configuration, which is not trusted.
        let signature = git_context(operation(), Signature::now(AUTHOR_NAME, AUTHOR_EMAIL))?;
        let target = parse_oid(commit)?;
        git_context(operation(), transaction.set_target(&reference, target, Some(&signature), "cfq: deliver"))?;
        git_context(operation(), transaction.commit())?;
        sync_ref(&self.repository, &reference)?;
        self.write_record(branch, commit, true)?;
        Ok(true)
    }

    fn write_record(&self, branch: &str, commit: &str, created: bool) -> Result<(), GitError> {
        let Some(recorder) = self.recorder else { return Ok(()) };
        recorder.record(self.git_dir(), branch.to_owned(), commit.to_owned(), created)
    }

    /// Git stores a ref as a file, so the branches `a` and `a/b` cannot both exist.
    fn check_conflicts(&self, branch: &str) -> Result<(), GitError> {
        let conflict = |existing: &str| {
            let (path, branch, existing) = (self.path.to_owned(), branch.to_owned(), existing.to_owned());
            Err(GitError::BranchConflict { path, branch, existing })
        };
        for (end, _) in branch.match_indices('/') {
            if branch_tip(&self.repository, &branch[..end])?.is_some() {
                return conflict(&branch[..end]);
            }
        }
        let below = self.repository.references_glob(&format!("{}/*", branch_ref(branch)));
        let mut below = git_context(format!("list the branches below {branch}"), below)?;
        match below.names().flatten().next() {
            Some(existing) => conflict(existing.trim_start_matches("refs/heads/")),
            None => Ok(()),
        }
    }
}

fn branch_ref(branch: &str) -> String {
    format!("refs/heads/{branch}")
}

/// True if HEAD names the branch, whether or not the branch exists.
fn is_head(repository: &Repository, branch: &str) -> bool {
    let head = repository.find_reference("HEAD");
    head.is_ok_and(|head| head.symbolic_target_bytes() == Some(branch_ref(branch).as_bytes()))
}

/// Commit id that a branch points at, empty for a symbolic ref; `None` if the branch does not exist.
fn branch_tip(repository: &Repository, branch: &str) -> Result<Option<String>, GitError> {
    match repository.find_reference(&branch_ref(branch)) {
        Ok(reference) => Ok(Some(reference.target().map(|id| id.to_string()).unwrap_or_default())),
        Err(error) if error.code() == ErrorCode::NotFound => Ok(None),
        Err(source) => Err(GitError::Git { operation: format!("read the branch {branch}"), source }),
    }
}

#[cfg(test)]
mod tests;
