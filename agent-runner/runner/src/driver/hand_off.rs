//! Hand-off of a result in three parts: an internal pull request, the merge into the repository's main branch
//! (in `merge.rs`), and a branch in the user's repository.
//!
//! A task ends as merged only if all three parts are done. If a part is impossible (another task changed the same
//! lines, the checks fail on the merge, the repository refuses the branch), the hand-off is held with the reason, and
//! the result is kept until a human accepts it without that part.

use std::path::PathBuf;
use std::time::Duration;

use cfq_convergence::Iteration;
use cfq_link::failpoint;
use cfq_proto::loop_step::Step;

use super::artifact::artifact_chain;
use super::port::{DriveError, Stopped, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::workstream::{
    DeliveredBranch, DeliveryRecordFile, DeliveryRequest, FailureKind, GitError, StopCondition, branch_name,
};

/// Maximum number of tries to create a branch whose lock another program holds. The waits between the tries add up to 7
/// seconds; a git command holds the lock of a ref for milliseconds, so a lock that stays longer was left by a crash.
const MAX_LOCKED_BRANCH_TRIES: u32 = 4;

impl<P: TaskPort> TaskDriver<P> {
    /// Returns the iteration to hand off, and its commit.
    pub(super) fn result(&self) -> Result<(Iteration, String), Stopped> {
        let none = || Stopped::CannotDrive(DriveError::NothingToHandOff);
        let result = self.history.result().ok_or_else(none)?.clone();
        let commit = result.artifact.commit.clone().ok_or_else(none)?;
        Ok((result, commit))
    }

    /// Opens the internal pull request.
    pub(super) async fn open_pr(&mut self) -> Result<(), ActionError> {
        let base = self.base()?;
        let (_, head) = self.result()?;
        Ok(self.commit_step(Step::PrOpened { head, base: base.commit, branch: base.branch }, 0).await?)
    }

    /// Delivers the result as a branch of the user's repository. If the repository cannot take the branch (moved,
    /// read-only), the result is still in the records, and `cfq pull` brings it into any clone.
    pub(super) async fn deliver(&mut self) -> Result<(), ActionError> {
        let (result, _) = self.result()?;
        let base = self.base()?.commit;
        let artifacts = artifact_chain(&self.history, result.artifact.iteration);
        let branch = branch_name(self.number, &self.spec.description);
        let request = DeliveryRequest { repository: PathBuf::from(&self.spec.repo), branch, base, artifacts };
        // If a human has accepted the result as it is, delivery is tried once more, without retries.
        let ceiling = if self.history.facts.accepted_as_is { Duration::ZERO } else { self.timing.retry_ceiling() };
        let record = DeliveryRecordFile::new(&self.data_dir, self.task);
        let mut waited = Duration::ZERO;
        for tries in 1.. {
            let (repositories, request, recorded) = (self.repositories.clone(), request.clone(), record.clone());
            self.port.wait_for_lease().await?;
            failpoint::hit("runner.before_deliver");
            let (stop, _cancel) = StopCondition::after(self.repository_time_limit());
            let deliver = move || repositories.deliver(request, Some(&recorded), &stop);
            let delivered = tokio::task::spawn_blocking(deliver).await?;
            failpoint::hit("runner.after_deliver");
            match delivered {
                Ok(DeliveredBranch { branch, commit }) => {
                    let step = Step::Delivered { branch, commit };
                    self.commit_step(step, 0).await?;
                    record.remove();
                    return Ok(());
                }
                Err(error) if may_deliver_later(&error, tries, waited < ceiling) => {
                    let error = error.with_causes();
                    tracing::warn!(task = %self.number, tries, error, "cannot deliver yet, retrying");
                    let wait = self.backoff(tries);
                    waited += wait;
                    self.port.record_progress();
                    tokio::time::sleep(wait).await;
                }
                Err(error) => {
                    let reason = format!("cannot create the branch in {}: {}", self.spec.repo, error.with_causes());
                    return Ok(self.hold_or_end_hand_off(reason).await?);
                }
            }
        }
        Ok(())
    }

    /// Holds the hand-off for a human, or ends it if a human has already accepted the result as it is.
    pub(super) async fn hold_or_end_hand_off(&mut self, reason: String) -> Result<(), Stopped> {
        tracing::warn!(task = %self.number, reason, "cannot hand off the result");
        if !self.history.facts.accepted_as_is {
            return self.hold_hand_off(reason).await;
        }
        let reason = format!(
            "accepted without delivery ({reason}); to get the result into a clone, run `cfq pull {} --repo .` there",
            self.number
        );
        self.commit_step(Step::HandedOff { reason }, 0).await?;
        DeliveryRecordFile::new(&self.data_dir, self.task).remove();
        Ok(())
    }

    /// Holds the hand-off until a human answers.
    pub(super) async fn hold_hand_off(&mut self, reason: String) -> Result<(), Stopped> {
        let available_actions = self.history.facts.held_actions();
        self.commit_step(Step::HandOffHeld { reason, available_actions }, 0).await
    }

    /// Ends the hand-off of a delivered result.
    pub(super) async fn finish_hand_off(&mut self) -> Result<(), Stopped> {
        let hand_off = &self.history.hand_off;
        let reason = match (&hand_off.delivered, &hand_off.closed) {
            (Some((branch, _)), None) => format!("delivered as branch {branch}"),
            (Some((branch, _)), Some(closed)) => format!("delivered as branch {branch}, not merged: {closed}"),
            (None, _) => String::new(),
        };
        self.commit_step(Step::HandedOff { reason }, 0).await
    }
}

/// Whether a failed delivery is tried again. `below_ceiling` is whether the retry ceiling is not reached.
fn may_deliver_later(error: &GitError, tries: u32, below_ceiling: bool) -> bool {
    match error {
        GitError::BranchLocked { .. } | GitError::AccessFailed { kind: FailureKind::BranchLocked, .. } => {
            tries < MAX_LOCKED_BRANCH_TRIES
        }
        _ => error.is_transient() && below_ceiling,
    }
}
