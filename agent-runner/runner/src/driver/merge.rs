//! Merge queue: merges a result into the repository's main branch. The scheduler has the record of the branch; the
//! mirror follows the record before a merge is planned, and a merge counts only once the record has it.

use std::time::Duration;

use cfq_convergence::MergeIntent;
use cfq_link::failpoint;
use cfq_proto::loop_step::Step;
use cfq_proto::pr::PrState;

use super::merge_check::MergeCheck;
use super::port::{MainQuery, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::workstream::{GitError, MainBranch, MergeOutcome, MergeRequest, Mirror, StopCondition};

/// Maximum number of unrecorded commits on the mirror's `main` that are followed back to a recorded one. Without a
/// crash there is none, and a crash during a merge leaves one merge.
const MAX_UNRECORDED_COMMITS: usize = 8;
/// Maximum number of planned merges of a task that are not carried out because another runner merged first. Each may have
/// run the project's checks.
const MAX_LOST_MERGES: u32 = 30;
/// Interval at which a task that waits for its turn to merge reports progress.
const MERGE_TURN_REPORT_INTERVAL: Duration = Duration::from_secs(3);

impl<P: TaskPort> TaskDriver<P> {
    /// Brings the mirror's `main` to the recorded commit. Returns `main`, and whether it contains the task's base
    /// according to the records.
    async fn follow_main(&mut self, mirror: &Mirror) -> Result<(MainBranch, bool), ActionError> {
        let base = self.base()?.commit;
        let blocking = mirror.clone();
        let mut main = tokio::task::spawn_blocking(move || blocking.main()).await??;
        let mut unrecorded = 0;
        loop {
            let after = main.as_ref().map(|main| main.recorded.clone());
            let query = MainQuery { repository: mirror.repository_id(), base: base.clone(), after };
            let Some(state) = self.port.main_branch(query).await? else {
                // The first recorded merge, onto the `main` of an older version or onto the base.
                return Ok((main.unwrap_or_else(|| MainBranch::at(&base)), false));
            };
            let (blocking, base) = (mirror.clone(), base.clone());
            match main.take() {
                Some(main) if main.recorded == state.commit => {
                    // A stand-in for `main` may lack the merge that contains the base.
                    let has_base = state.has_base && main.recorded == main.commit;
                    return Ok((main, has_base));
                }
                Some(last) if !state.knows_after => {
                    unrecorded += 1;
                    if unrecorded <= MAX_UNRECORDED_COMMITS {
                        main = tokio::task::spawn_blocking(move || blocking.main_before(&last)).await??;
                    }
                }
                last if state.merges.is_empty() => {
                    // The records of the remaining merges are incomplete.
                    let commit = last.map_or(base, |last| last.commit);
                    let stand_in = MainBranch { recorded: state.commit, commit };
                    let set = stand_in.clone();
                    tokio::task::spawn_blocking(move || blocking.set_main(&set)).await??;
                    return Ok((stand_in, false));
                }
                last => {
                    let (stop, _cancel) = StopCondition::after(self.repository_time_limit());
                    let (repositories, data_dir) = (self.repositories.clone(), self.data_dir.clone());
                    let replay = move || {
                        let fetch = |commit: &str| repositories.fetch(&blocking, &data_dir, commit, &stop);
                        blocking.replay(last, &state.merges, &base, &fetch)
                    };
                    let replayed = tokio::task::spawn_blocking(replay).await??;
                    main = Some(replayed);
                    self.port.record_progress();
                }
            }
        }
    }

    /// Records the merge intent, or closes the pull request if the merge has a conflict or fails the project's checks.
    pub(super) async fn plan_merge(&mut self) -> Result<(), ActionError> {
        let (_, head) = self.result()?;
        let commit_time = self.history.last_at;
        let mirror = self.prepare_mirror().await?;
        self.take_merge_turn(&mirror).await;
        let (main, has_base) = self.follow_main(&mirror).await?;
        let base = self.base()?.commit;
        let message = format!("Merge {}: {}\n", self.number, self.title());
        let repository = mirror.repository_id();
        let planned = {
            let (mirror, message) = (mirror.clone(), message.clone());
            tokio::task::spawn_blocking(move || {
                let (main, base, head, message) = (&main, base.as_str(), head.as_str(), message.as_str());
                mirror.plan_merge(&MergeRequest { main, base, head, has_base, message, time: commit_time })
            })
        };
        let step = match planned.await?? {
            MergeOutcome::Planned(plan) => match self.check_merge(&mirror, &plan).await? {
                MergeCheck::Passed(ran) => {
                    Step::MergeIntent { old: plan.old, new: plan.new, commit_time, repository, message, ran }
                }
                MergeCheck::Refused { reason } => Step::PrMoved { to: PrState::Closed, reason },
            },
            // The conflict may not matter to the user: `main` contains only cfq's merges, and the user may have
            // discarded the other task's branch, or may have seen neither branch. So the result is delivered as a
            // separate branch before the hand-off is held for a human.
            MergeOutcome::Conflict { paths, earlier } => {
                let mut reason = format!("an earlier cfq task changed the same lines of {}", paths.join(", "));
                if !earlier.is_empty() {
                    reason.push_str(&format!(" ({earlier})"));
                }
                Step::PrMoved { to: PrState::Closed, reason }
            }
        };
        Ok(self.commit_step(step, 0).await?)
    }

    /// Carries out a recorded merge intent, or plans the merge again if it was planned on an earlier commit.
    pub(super) async fn merge(&mut self, intent: &MergeIntent) -> Result<(), ActionError> {
        if intent.repository.is_empty() {
            // Recorded by an older version, which kept `main` in the mirror only.
            return self.plan_merge().await;
        }
        let mirror = self.prepare_mirror().await?;
        self.take_merge_turn(&mirror).await;
        let is_planned = {
            let (mirror, intent) = (mirror.clone(), intent.clone());
            tokio::task::spawn_blocking(move || {
                let main = mirror.main()?.map(|main| main.recorded);
                // Without a `main`, the merge is the first one onto the base.
                let is_current = main.is_none_or(|main| main == intent.old || main == intent.new);
                Ok::<_, GitError>(is_current && mirror.has_commit(&intent.new)?)
            })
        };
        if !is_planned.await?? {
            tracing::info!(task = %self.number, "the mirror has changed since the merge was planned, planning it again");
            return self.plan_merge().await;
        }
        self.port.wait_for_lease().await?;
        failpoint::hit("runner.before_merge_ref");
        let main = MainBranch::at(&intent.new);
        tokio::task::spawn_blocking(move || mirror.set_main(&main)).await??;
        failpoint::hit("runner.after_merge_ref");
        if self.commit_merge(intent.new.clone()).await? {
            return Ok(());
        }
        self.lost_merges += 1;
        if self.lost_merges > MAX_LOST_MERGES {
            let reason = format!("other runners merged into the repository first, {} times in a row", self.lost_merges);
            return Ok(self.hold_or_end_hand_off(reason).await?);
        }
        tracing::info!(task = %self.number, "another task merged first, planning the merge again");
        self.plan_merge().await
    }

    /// Waits until no other task of this process merges into the same mirror. Without this, of several tasks that merge
    /// at the same time, only one would be merged, and the others would plan and check again.
    async fn take_merge_turn(&mut self, mirror: &Mirror) {
        if self.merge_turn.is_some() {
            return;
        }
        // Tasks get their turns in the order in which they began to wait.
        let mut turn = std::pin::pin!(mirror.merge_turn().lock_owned());
        let mut has_reported = false;
        loop {
            match tokio::time::timeout(MERGE_TURN_REPORT_INTERVAL, &mut turn).await {
                Ok(turn) => {
                    self.merge_turn = Some(turn);
                    return;
                }
                // Another task's merge may take long: its checks run, or its mirror lacks many recorded merges.
                Err(_) => self.port.record_progress(),
            }
            if !has_reported {
                let activity = "waiting for its turn to merge: another task of this repository is being merged";
                self.port.report_activity(self.history.next_seq, activity.to_owned()).await;
                has_reported = true;
            }
        }
    }
}
