//! The mirror and the worktree of a task: the commits that its steps refer to are copied from the user's repository, or
//! rebuilt from the records.

use std::path::PathBuf;

use cfq_convergence::Base;

use super::port::TaskPort;
use super::task_driver::{ActionError, TaskDriver};
use crate::workstream::{GitError, Mirror, StopCondition, rebuild};

impl<P: TaskPort> TaskDriver<P> {
    /// Returns the mirror with everything that the history refers to. Missing objects are rebuilt from the records.
    pub(super) async fn prepare_mirror(&mut self) -> Result<Mirror, ActionError> {
        if let Some(mirror) = &self.prepared {
            return Ok(mirror.clone());
        }
        let base = self.base()?;
        let (data_dir, source) = (self.data_dir.clone(), PathBuf::from(&self.spec.repo));
        let artifacts: Vec<_> = self.history.iterations.iter().map(|i| i.artifact.clone()).collect();
        let (worktrees, number, attempt) = (self.worktrees.clone(), self.number, self.attempt);
        let opened = tokio::task::spawn_blocking(move || Mirror::open(&data_dir, &source)).await??;
        opened.check_path()?;
        self.fetch_commit(&opened, &base.commit).await?;
        let reviewed = match &self.spec.review {
            Some(review) => Some(self.bring_reviewed_commit(&opened, &base.commit, review.head.clone()).await?),
            None => None,
        };
        let mirror = tokio::task::spawn_blocking(move || {
            let mirror = opened;
            let head = match &reviewed {
                Some(head) => head.clone(),
                None => rebuild(&mirror.repository()?, &base.commit, &artifacts)?,
            };
            mirror.set_branch(&base.branch, &head)?;
            worktrees.remove_other_attempts(number, attempt)?;
            if reviewed.is_none() {
                worktrees.checkout(&mirror, (number, attempt), &base.commit, &head)?;
            }
            Ok::<_, GitError>(mirror)
        });
        let mirror = mirror.await??;
        Ok(self.prepared.insert(mirror).clone())
    }

    /// Brings the commit that the task reviews into the mirror, and returns its id. The commit of an artifact may be in no
    /// repository that this runner can read; then it is rebuilt from the artifact.
    async fn bring_reviewed_commit(&self, mirror: &Mirror, base: &str, head: String) -> Result<String, ActionError> {
        let (of_mirror, wanted) = (mirror.clone(), head.clone());
        if tokio::task::spawn_blocking(move || of_mirror.has_commit(&wanted)).await?? {
            return Ok(head);
        }
        if self.reviewed.last().is_some_and(|artifact| artifact.commit.as_ref() == Some(&head)) {
            let (mirror, base, artifacts) = (mirror.clone(), base.to_owned(), self.reviewed.clone());
            tokio::task::spawn_blocking(move || rebuild(&mirror.repository()?, &base, &artifacts)).await??;
        } else {
            self.fetch_commit(mirror, &head).await?;
        }
        Ok(head)
    }

    /// Copies a commit, the task's base or the change to review, into the mirror. The wait for another task that copies
    /// from the same repository has a time limit of its own.
    async fn fetch_commit(&self, mirror: &Mirror, commit: &str) -> Result<(), ActionError> {
        let (stop, _cancel) = StopCondition::after(self.repository_time_limit());
        let (waiting, wanted) = (mirror.clone(), commit.to_owned());
        let lock = tokio::task::spawn_blocking(move || waiting.lock_for_fetch(&wanted, &stop)).await??;
        let Some(lock) = lock else { return Ok(()) };
        self.port.record_progress();
        let (stop, _cancel) = StopCondition::after(self.repository_time_limit());
        let (repositories, data_dir) = (self.repositories.clone(), self.data_dir.clone());
        let (mirror, commit) = (mirror.clone(), commit.to_owned());
        let copied = tokio::task::spawn_blocking(move || {
            let copied = repositories.copy(&mirror, &data_dir, &commit, &stop);
            drop(lock);
            copied
        });
        copied.await??;
        self.port.record_progress();
        Ok(())
    }

    /// Moves the task's branch and worktree to `commit`, the newest commit of the task. Users only look at both, and no
    /// step depends on them, so an error is logged and otherwise ignored.
    pub(super) async fn update_worktree(&self, mirror: &Mirror, commit: String) -> Result<(), ActionError> {
        let Base { commit: base, branch } = self.base()?;
        let (mirror, worktrees, number, attempt) = (mirror.clone(), self.worktrees.clone(), self.number, self.attempt);
        let updated = tokio::task::spawn_blocking(move || {
            mirror.set_branch(&branch, &commit)?;
            worktrees.checkout(&mirror, (number, attempt), &base, &commit)
        });
        if let Err(error) = updated.await? {
            tracing::warn!(task = %self.number, error = error.with_causes(), "cannot update the worktree");
        }
        Ok(())
    }
}
