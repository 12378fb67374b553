//! From converged to handed off: internal pull request, merge into the mirror's main, a branch in the user's repository.
//!
//! A task is called merged only if all three were done. What keeps it from that (another task's change of the same lines, a
//! repository that refuses the branch) is told to a human: the hand-off is held with the result kept, and ends when they say
//! that it will do.

use std::path::PathBuf;
use std::time::Duration;

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
            // both. So the result is delivered as its own branch before anybody is asked.
            MergeOutcome::Conflict { paths } => {
                let why = format!("an earlier cfq task changed the same lines of {}", paths.join(", "));
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

    /// Where a repository cannot take the branch (gone, read-only) nothing is lost: the result is in the records, and `cfq pull`
    /// brings it anywhere.
    pub(super) async fn deliver(&mut self) -> Result<(), Problem> {
        let (result, _) = self.result()?;
        let base = self.base()?.commit;
        let artifacts = chain(&self.history, result.artifact.iteration);
        let branch = branch_name(self.number, &self.spec.description);
        let repository = PathBuf::from(&self.spec.repo);
        // Somebody who let it end as it is waits for one more try, not for ten minutes of them.
        let ceiling = if self.history.facts.released { Duration::ZERO } else { self.timing.retry_ceiling() };
        let mut waited = Duration::ZERO;
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
                    let why = format!("no branch could be made in {}: {}", self.spec.repo, error.in_words());
                    return Ok(self.cannot_hand_off(why).await?);
                }
            }
        }
        Ok(())
    }

    /// A human is asked, unless one has said already that it will do as it is.
    pub(super) async fn cannot_hand_off(&mut self, why: String) -> Result<(), Stopped> {
        tracing::warn!(task = %self.number, why, "cannot hand off");
        if !self.history.facts.released {
            return self.held(why).await;
        }
        let why = format!("accepted as it is: {why}; `cfq pull {}` brings the result into a clone", self.number);
        self.commit(Step::HandedOff { why }, 0).await
    }

    pub(super) async fn held(&mut self, why: String) -> Result<(), Stopped> {
        let available_actions = self.history.facts.held_actions();
        self.commit(Step::HandOffHeld { why, available_actions }, 0).await
    }

    pub(super) async fn hand_off(&mut self) -> Result<(), Stopped> {
        let hand_off = &self.history.hand_off;
        let why = match (&hand_off.delivered, &hand_off.closed) {
            (Some((branch, _)), None) => format!("delivered as branch {branch}"),
            (Some((branch, _)), Some(closed)) => format!("delivered as branch {branch}, not merged: {closed}"),
            (None, _) => String::new(),
        };
        self.commit(Step::HandedOff { why }, 0).await
    }
}
