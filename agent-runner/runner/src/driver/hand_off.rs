//! From converged to handed off: internal pull request, merge into the mirror's main, a branch in the user's repository.

use std::path::PathBuf;

use cfq_convergence::{Iteration, MergeIntent};
use cfq_link::failpoint;
use cfq_proto::looping::Step;
use cfq_proto::pr::PrState;

use super::drive::{Drive, Problem};
use super::generate::chain;
use super::port::{Stopped, TaskPort};
use crate::workstream::{MergeOutcome, MergeState, branch_name, deliver};

impl<P: TaskPort> Drive<P> {
    fn result(&self) -> Result<(Iteration, String), Stopped> {
        let none = || Stopped::Refused { reason: "there is no artifact that may be handed off".to_owned() };
        let result = self.history.result().ok_or_else(none)?.clone();
        let commit = result.artifact.commit.clone().ok_or_else(none)?;
        Ok((result, commit))
    }

    pub(super) async fn open_pr(&mut self) -> Result<(), Problem> {
        let base = self.base()?;
        let (_, head) = self.result()?;
        Ok(self.commit(Step::PrOpened { head, base: base.commit, branch: base.branch }, 0).await?)
    }

    /// What merging `head` would do now; `time` is the merge commit's, if one is needed.
    async fn look_at_merge(&mut self, head: String, time: i64) -> Result<MergeOutcome, Problem> {
        let mirror = self.mirror().await?;
        let base = self.base()?.commit;
        let message = format!("Merge {}: {}\n", self.number, self.title());
        let plan = tokio::task::spawn_blocking(move || mirror.plan_merge(&base, &head, &message, time));
        Ok(plan.await??)
    }

    pub(super) async fn plan_merge(&mut self) -> Result<(), Problem> {
        let (_, head) = self.result()?;
        let commit_time = self.history.last_at;
        let step = match self.look_at_merge(head, commit_time).await? {
            MergeOutcome::Planned(plan) => Step::MergeIntent { old: plan.old, new: plan.new, commit_time },
            // The mirror's main follows cfq's merges only: the user may have discarded the other branch, or has yet to see
            // both. So it is no question to stop for; the result is delivered as its own branch.
            MergeOutcome::Conflict { paths } => {
                let why = format!(
                    "an earlier cfq task changed the same lines of {}; delivered as a branch of its own, unmerged",
                    paths.join(", ")
                );
                Step::PrMoved { to: PrState::Closed, why }
            }
        };
        Ok(self.commit(step, 0).await?)
    }

    pub(super) async fn merge(&mut self, intent: &MergeIntent) -> Result<(), Problem> {
        let (_, head) = self.result()?;
        // Writes the merge commit's objects again where they are missing: the mirror may be a new one.
        let outcome = self.look_at_merge(head, intent.commit_time).await?;
        let mirror = self.mirror().await?;
        let known = {
            let (mirror, new) = (mirror.clone(), intent.new.clone());
            tokio::task::spawn_blocking(move || mirror.has_commit(&new)).await??
        };
        if !known {
            tracing::info!(task = %self.number, ?outcome, "the intended merge cannot be made again, planning anew");
            return self.plan_merge().await;
        }
        self.port.live().await?;
        failpoint::hit("runner.before_merge_ref");
        let merged = {
            let intent = intent.clone();
            tokio::task::spawn_blocking(move || mirror.merge(&intent.old, &intent.new)).await??
        };
        failpoint::hit("runner.after_merge_ref");
        match merged {
            MergeState::Merged => Ok(self.commit(Step::Merged { commit: intent.new.clone() }, 0).await?),
            MergeState::Overtaken => self.plan_merge().await,
        }
    }

    /// A repository that cannot take the branch (gone, read-only) does not keep the task from ending: the result is in the
    /// records, and `cfq pull` brings it anywhere.
    pub(super) async fn deliver(&mut self) -> Result<(), Problem> {
        let (result, _) = self.result()?;
        let base = self.base()?.commit;
        let artifacts = chain(&self.history, result.artifact.iteration);
        let branch = branch_name(self.number, &self.spec.description);
        let repository = PathBuf::from(&self.spec.repo);
        let ceiling = self.timing.retry_ceiling();
        let mut waited = std::time::Duration::ZERO;
        for tries in 1.. {
            let (repository, branch, base, artifacts) =
                (repository.clone(), branch.clone(), base.clone(), artifacts.clone());
            self.port.live().await?;
            failpoint::hit("runner.before_deliver");
            let delivered =
                tokio::task::spawn_blocking(move || deliver(&repository, &branch, &base, &artifacts)).await?;
            failpoint::hit("runner.after_deliver");
            match delivered {
                Ok(delivery) => {
                    let step = Step::Delivered { branch: delivery.branch, commit: delivery.commit };
                    return Ok(self.commit(step, 0).await?);
                }
                Err(error) if error.may_pass() && waited < ceiling => {
                    tracing::warn!(task = %self.number, tries, error = error.in_words(), "cannot deliver yet");
                    let wait = self.backoff(tries);
                    waited += wait;
                    self.port.progressed();
                    tokio::time::sleep(wait).await;
                }
                Err(error) => {
                    let why = error.in_words();
                    tracing::error!(task = %self.number, why, "cannot deliver; `cfq pull` fetches the result");
                    return Ok(self.commit(Step::HandedOff, 0).await?);
                }
            }
        }
        Ok(())
    }
}
