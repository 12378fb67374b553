//! Driver loop: performs the [`next_action`] of a task until the task ends or waits for a human.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cfq_convergence::{Base, History, LoopLimits, escalate, fail};
use cfq_link::failpoint;
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::{Artifact, Decided, EscalationReason, Step, StepRecord};
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;
use cfq_repo_map::RepoMap;
use tokio::sync::OwnedMutexGuard;

use super::artifact::commit_title;
use super::next_action::{NextAction, next_action};
use super::port::{DriveError, Stopped, TaskPort};
use crate::checks::{CheckRunError, CheckRunner};
use crate::pipeline::PromptError;
use crate::policy_files::ServerPolicies;
use crate::workstream::{GitError, Mirror, RepositoryAccess, StopCondition, Worktrees};

/// Maximum number of tries of an action in the review loop before the task escalates.
const MAX_ACTION_TRIES: u32 = 3;
/// Maximum number of tries of an action in the hand-off before the hand-off is held for a human. The waits between the
/// tries add up to about nine minutes, as long as the wait for an unavailable endpoint. The number is higher than in
/// the loop, because the result already exists and only a disk or a repository has to become available again.
const MAX_HAND_OFF_TRIES: u32 = 10;

/// Error of an action that the driver performed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ActionError {
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error(transparent)]
    Git(#[from] GitError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Checks(#[from] CheckRunError),
    #[error("a worker thread of the runner panicked or was aborted")]
    Thread(#[from] tokio::task::JoinError),
}

impl ActionError {
    /// Whether a retry may succeed.
    fn is_transient(&self) -> bool {
        match self {
            Self::Git(error) => error.is_transient(),
            Self::Checks(error) => error.is_transient(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => false,
        }
    }

    /// Whether the error is caused by the task's repository or base commit, so that no retry of this task can succeed.
    fn is_invalid_request(&self) -> bool {
        match self {
            Self::Git(error) => error.is_invalid_request(),
            Self::Checks(error) => error.is_invalid_request(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => false,
        }
    }

    /// Returns the error message followed by the messages of all causes.
    fn with_causes(&self) -> String {
        match self {
            Self::Git(error) => error.with_causes(),
            Self::Checks(error) => error.with_causes(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => self.to_string(),
        }
    }
}

/// A task granted to this runner, with the history computed from its committed steps.
#[derive(Debug, Clone)]
pub struct Assignment {
    pub task: TaskId,
    pub number: TaskNumber,
    pub attempt: i32,
    pub spec: Arc<TaskSpec>,
    pub limits: LoopLimits,
    pub history: History,
    /// Number of the runner's slot, from 1. It is part of the branch name `worker-N/task-42`.
    pub worker: usize,
    /// The artifact that the task reviews, after those on which it is based.
    pub reviewed: Vec<Artifact>,
}

/// Driver of one task.
pub struct TaskDriver<P> {
    pub(super) port: P,
    pub(super) task: TaskId,
    pub(super) number: TaskNumber,
    pub(super) attempt: i32,
    pub(super) spec: Arc<TaskSpec>,
    pub(super) limits: LoopLimits,
    pub(super) history: History,
    worker: usize,
    pub(super) reviewed: Vec<Artifact>,
    pub(super) data_dir: PathBuf,
    pub(super) worktrees: Worktrees,
    pub(super) repositories: RepositoryAccess,
    pub(super) checks: CheckRunner,
    pub(super) timing: Timing,
    /// The mirror; `None` until it contains all commits that the history refers to.
    pub(super) prepared: Option<Mirror>,
    pub(super) server_policies: Arc<ServerPolicies>,
    /// The map that the prompts show; the outer `None` until it is made.
    pub(super) map: Option<Option<Arc<RepoMap>>>,
    /// Number of planned merges that were not carried out, because another runner merged first.
    pub(super) lost_merges: u32,
    /// Held while the task plans and carries out its merge.
    pub(super) merge_turn: Option<OwnedMutexGuard<()>>,
}

impl<P> std::fmt::Debug for TaskDriver<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskDriver").field("task", &self.number).field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

impl<P: TaskPort> TaskDriver<P> {
    /// Prepares a driver. `data_dir` holds the mirrors and worktrees.
    pub fn new(
        port: P,
        assignment: Assignment,
        data_dir: PathBuf,
        repositories: RepositoryAccess,
        checks: CheckRunner,
        server_policies: Arc<ServerPolicies>,
        timing: Timing,
    ) -> Self {
        let Assignment { task, number, attempt, spec, limits, history, worker, reviewed } = assignment;
        let worktrees = Worktrees::new(&data_dir);
        let (prepared, map, lost_merges, merge_turn) = (None, None, 0, None);
        Self {
            port,
            task,
            number,
            attempt,
            spec,
            limits,
            history,
            worker,
            reviewed,
            data_dir,
            worktrees,
            repositories,
            checks,
            timing,
            prepared,
            server_policies,
            map,
            lost_merges,
            merge_turn,
        }
    }

    /// Performs actions until the task ends or waits for a human. Returns the history at that point.
    ///
    /// # Errors
    /// [`Stopped`] if the driver has to stop before that.
    pub async fn run(mut self) -> Result<History, Stopped> {
        let mut tries = 0;
        loop {
            let action = next_action(&self.history, &self.limits);
            tracing::debug!(task = %self.number, seq = self.history.next_seq, ?action, "next action");
            if action == NextAction::NothingToDo {
                return Ok(self.history);
            }
            if !matches!(action, NextAction::PlanMerge | NextAction::Merge(_)) {
                self.merge_turn = None;
            }
            match self.perform(action).await {
                Ok(()) => tries = 0,
                Err(ActionError::Stopped(stopped)) => return Err(stopped),
                Err(error) => {
                    tries += 1;
                    self.merge_turn = None;
                    self.recover(error, tries).await?;
                }
            }
        }
    }

    async fn perform(&mut self, action: NextAction) -> Result<(), ActionError> {
        match action {
            NextAction::Start => self.start().await,
            NextAction::FailStart => self.fail_start().await,
            NextAction::Create => self.create().await,
            NextAction::ReadChange => self.read_change().await,
            NextAction::Check => self.check().await,
            NextAction::Review => self.review().await,
            NextAction::Decide => self.decide().await,
            NextAction::EscalateTimeout => {
                let explanation = format!("the working time limit of {} s is reached", self.limits.timeout_ms / 1000);
                Ok(self.commit_escalation(EscalationReason::TimeoutExceeded, explanation, 0).await?)
            }
            NextAction::OpenPr => self.open_pr().await,
            NextAction::MovePr { to, reason } => Ok(self.commit_step(Step::PrMoved { to, reason }, 0).await?),
            NextAction::PlanMerge => self.plan_merge().await,
            NextAction::Merge(intent) => self.merge(&intent).await,
            NextAction::Deliver => self.deliver().await,
            NextAction::HoldHandOff { reason } => Ok(self.hold_hand_off(reason).await?),
            NextAction::FinishHandOff => Ok(self.finish_hand_off().await?),
            NextAction::NothingToDo => Ok(()),
        }
    }

    /// Handles a failed action: waits before the next try, or, after the last try, escalates, holds the hand-off or
    /// ends the task.
    async fn recover(&mut self, error: ActionError, tries: u32) -> Result<(), Stopped> {
        use cfq_proto::loop_step::LoopState;
        let reason = error.with_causes();
        tracing::warn!(task = %self.number, tries, reason, "action failed");
        let in_hand_off = self.history.state == LoopState::Converged;
        // A human who accepted the result as it is should not wait long for the end of the task.
        let max_tries =
            if in_hand_off && !self.history.facts.accepted_as_is { MAX_HAND_OFF_TRIES } else { MAX_ACTION_TRIES };
        if error.is_transient() && tries < max_tries {
            self.prepared = None;
            self.port.record_progress();
            tokio::time::sleep(self.backoff(tries)).await;
            return Ok(());
        }
        if in_hand_off {
            return self.hold_or_end_hand_off(format!("the hand-off cannot continue: {reason}")).await;
        }
        // The task fails instead of escalating: a human has no result to accept, and no action can change the task's
        // repository or base commit.
        if self.history.iterations.is_empty() && error.is_invalid_request() {
            return self.commit_failure(reason, 0).await;
        }
        self.commit_escalation(EscalationReason::WorkflowError, reason, 0).await
    }

    /// Returns the wait after `tries` failed tries: it doubles with each try, up to a maximum.
    pub(super) fn backoff(&self, tries: u32) -> Duration {
        let factor = 1u32 << tries.saturating_sub(1).min(8);
        (self.timing.backoff_base() * factor).min(self.timing.backoff_cap())
    }

    /// Commits a step and then adds it to the history. `spent_ms` is the working time since the previous step.
    pub(super) async fn commit_step(&mut self, step: Step, spent_ms: u64) -> Result<(), Stopped> {
        self.commit_step_as(step.clone(), step, spent_ms).await
    }

    /// Commits `sent` and adds `kept` to the history. The two differ only in whether a large artifact is inline or a
    /// blob.
    pub(super) async fn commit_step_as(&mut self, sent: Step, kept: Step, spent_ms: u64) -> Result<(), Stopped> {
        let seq = self.history.next_seq;
        let kind = kept.kind();
        let active_ms = self.history.active_ms + spent_ms;
        failpoint::hit(&format!("runner.before_step.{kind}"));
        let at = self.port.commit_step(seq, sent, active_ms).await?;
        failpoint::hit(&format!("runner.after_step.{kind}"));
        self.push_step(StepRecord { seq, step: kept, active_ms, at })
    }

    /// Commits the merge onto the commit in the last merge intent. Returns false if another task was merged since.
    pub(super) async fn commit_merge(&mut self, commit: String) -> Result<bool, Stopped> {
        let (seq, active_ms) = (self.history.next_seq, self.history.active_ms);
        let step = Step::Merged { commit };
        failpoint::hit("runner.before_step.merged");
        let Some(at) = self.port.commit_merge(seq, step.clone(), active_ms).await? else { return Ok(false) };
        failpoint::hit("runner.after_step.merged");
        self.push_step(StepRecord { seq, step, active_ms, at }).map(|()| true)
    }

    fn push_step(&mut self, record: StepRecord) -> Result<(), Stopped> {
        self.port.record_progress();
        self.history.push(&record).map_err(|error| Stopped::CannotDrive(error.into()))
    }

    /// Commits an escalation.
    pub(super) async fn commit_escalation(
        &mut self,
        reason: EscalationReason,
        explanation: String,
        spent_ms: u64,
    ) -> Result<(), Stopped> {
        let explanation = match self.history.facts.review_depth {
            // A review fails instead, and nothing else can be done about it.
            Some(_) => format!("{explanation}; `cfq retry {}` repeats the review", self.number),
            None => explanation,
        };
        let decided = escalate(&self.history, reason, explanation);
        self.commit_decision(decided, spent_ms).await
    }

    /// Commits the failure of the task.
    pub(super) async fn commit_failure(&mut self, reason: String, spent_ms: u64) -> Result<(), Stopped> {
        let decided = fail(&self.history, reason);
        self.commit_decision(decided, spent_ms).await
    }

    /// Commits a decision about the current iteration.
    pub(super) async fn commit_decision(&mut self, decided: Decided, spent_ms: u64) -> Result<(), Stopped> {
        let iteration = self.history.current_iteration();
        self.commit_step(Step::Decided { iteration, decided }, spent_ms).await
    }

    async fn start(&mut self) -> Result<(), ActionError> {
        let branch = format!("worker-{}/task-{}", self.worker, self.number.0);
        match self.find_base().await? {
            Ok(base) => {
                let review_depth = self.spec.review.as_ref().map(|review| review.depth);
                Ok(self.commit_step(Step::Started { base, branch, review_depth }, 0).await?)
            }
            // HEAD of the user's repository cannot be resolved to a base commit, so the task fails without a retry.
            Err(error) => {
                tracing::warn!(task = %self.number, error = error.with_causes(), "the task has no base commit");
                self.commit_step(Step::Started { base: String::new(), branch, review_depth: None }, 0).await?;
                Ok(self.commit_failure(error.with_causes(), 0).await?)
            }
        }
    }

    /// Ends a task whose start failed. The reason is not in the history, so it is found again.
    async fn fail_start(&mut self) -> Result<(), ActionError> {
        let reason = match self.find_base().await? {
            Err(error) => error.with_causes(),
            Ok(_) => format!(
                "HEAD of {} could not be resolved when the task started; now it can: run `cfq retry {}`",
                self.spec.repo, self.number
            ),
        };
        Ok(self.commit_failure(reason, 0).await?)
    }

    /// Base commit from the specification, or else HEAD of the user's repository.
    async fn find_base(&self) -> Result<Result<String, GitError>, ActionError> {
        if let Some(base) = &self.spec.base {
            return Ok(Ok(base.clone()));
        }
        let (repo, repositories) = (PathBuf::from(&self.spec.repo), self.repositories.clone());
        let (stop, _cancel) = StopCondition::after(self.repository_time_limit());
        Ok(tokio::task::spawn_blocking(move || repositories.head(&repo, &stop)).await?)
    }

    /// Base commit and branch of the task.
    pub(super) fn base(&self) -> Result<Base, Stopped> {
        self.history.base.clone().ok_or(Stopped::CannotDrive(DriveError::NotStarted))
    }

    /// Maximum time of one operation on the user's repository: an operation that takes longer loses the lease before its
    /// task has a reason.
    pub(super) fn repository_time_limit(&self) -> Duration {
        self.timing.task_step_timeout() * 4 / 5
    }

    /// Title of the task's commits.
    pub(super) fn title(&self) -> String {
        commit_title(&self.spec.description)
    }
}
