//! The shell around [`next_action`]: does what comes next, until the task rests.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cfq_convergence::{Base, History, Limits, escalate, fail};
use cfq_link::failpoint;
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::looping::{Decided, EscalationReason, Step, StepRecord};
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;

use super::generate::title;
use super::next::{NextAction, next_action};
use super::port::{Stopped, TaskPort};
use crate::pipeline::PromptError;
use crate::workstream::{GitError, Mirror, Worktrees, head_commit, rebuild};

/// So often an action is tried in the loop before it escalates.
const TRIES: u32 = 3;
/// In the hand-off a human is asked only after some nine minutes of waits, about as long as an endpoint is waited for: the work
/// is done, and what is left needs nobody but a disk or a repository that comes back.
const HAND_OFF_TRIES: u32 = 10;

/// What kept an action from being done.
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error(transparent)]
    Git(#[from] GitError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error("a worker thread of the runner broke off")]
    Thread(#[from] tokio::task::JoinError),
}

impl Problem {
    fn may_pass(&self) -> bool {
        match self {
            Self::Git(error) => error.may_pass(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => false,
        }
    }

    fn is_in_the_request(&self) -> bool {
        match self {
            Self::Git(error) => error.is_in_the_request(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => false,
        }
    }

    fn in_words(&self) -> String {
        match self {
            Self::Git(error) => error.in_words(),
            Self::Stopped(_) | Self::Prompt(_) | Self::Thread(_) => self.to_string(),
        }
    }
}

/// The task as it was granted.
#[derive(Debug, Clone)]
pub struct Assignment {
    pub task: TaskId,
    pub number: TaskNumber,
    pub attempt: i32,
    pub spec: Arc<TaskSpec>,
    pub limits: Limits,
    pub history: History,
    /// Of this runner's slots, from 1: names the branch `worker-N/task-42`.
    pub worker: usize,
}

pub struct Drive<P> {
    pub(super) port: P,
    pub(super) task: TaskId,
    pub(super) number: TaskNumber,
    attempt: i32,
    pub(super) spec: Arc<TaskSpec>,
    pub(super) limits: Limits,
    pub(super) history: History,
    worker: usize,
    data_dir: PathBuf,
    worktrees: Worktrees,
    pub(super) timing: Timing,
    prepared: Option<Mirror>,
}

impl<P> std::fmt::Debug for Drive<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drive").field("task", &self.number).field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

impl<P: TaskPort> Drive<P> {
    pub fn new(port: P, assignment: Assignment, data_dir: PathBuf, timing: Timing) -> Self {
        let Assignment { task, number, attempt, spec, limits, history, worker } = assignment;
        let worktrees = Worktrees::new(&data_dir);
        Self { port, task, number, attempt, spec, limits, history, worker, data_dir, worktrees, timing, prepared: None }
    }

    /// Returns when nothing is left for a runner to do, with the state the loop rests in.
    pub async fn run(mut self) -> Result<History, Stopped> {
        let mut tries = 0;
        loop {
            let action = next_action(&self.history, &self.limits);
            tracing::debug!(task = %self.number, seq = self.history.next_seq, ?action, "next");
            if action == NextAction::Rest {
                return Ok(self.history);
            }
            match self.act(action).await {
                Ok(()) => tries = 0,
                Err(Problem::Stopped(stopped)) => return Err(stopped),
                Err(problem) => {
                    tries += 1;
                    self.recover(problem, tries).await?;
                }
            }
        }
    }

    async fn act(&mut self, action: NextAction) -> Result<(), Problem> {
        match action {
            NextAction::Start => self.start().await,
            NextAction::Create => self.create().await,
            NextAction::Check => self.check().await,
            NextAction::Review => self.review().await,
            NextAction::Decide => self.decide().await,
            NextAction::TimeIsUp => {
                let why = format!("the working time of {} s is used up", self.limits.timeout_ms / 1000);
                Ok(self.give_up(EscalationReason::TimeoutExceeded, why, 0).await?)
            }
            NextAction::OpenPr => self.open_pr().await,
            NextAction::MovePr { to, why } => Ok(self.commit(Step::PrMoved { to, why }, 0).await?),
            NextAction::PlanMerge => self.plan_merge().await,
            NextAction::Merge(intent) => self.merge(&intent).await,
            NextAction::Deliver => self.deliver().await,
            NextAction::Hold { why } => Ok(self.held(why).await?),
            NextAction::HandOff => Ok(self.hand_off().await?),
            NextAction::Rest => Ok(()),
        }
    }

    /// A problem of this machine: once more after a wait, and if that does not help, a human is asked.
    async fn recover(&mut self, problem: Problem, tries: u32) -> Result<(), Stopped> {
        use cfq_proto::looping::LoopState;
        let why = problem.in_words();
        tracing::warn!(task = %self.number, tries, why, "an action failed");
        let in_hand_off = self.history.state == LoopState::Converged;
        // Who let it end as it is does not wait long for it.
        let enough = if in_hand_off && !self.history.facts.released { HAND_OFF_TRIES } else { TRIES };
        if problem.may_pass() && tries < enough {
            self.prepared = None;
            self.port.progressed();
            tokio::time::sleep(self.backoff(tries)).await;
            return Ok(());
        }
        if in_hand_off {
            return self.cannot_hand_off(format!("the hand-off cannot go on: {why}")).await;
        }
        // Nothing is there yet that an answer could accept, and no answer names another repository or commit.
        if self.history.iterations.is_empty() && problem.is_in_the_request() {
            return self.fail(why, 0).await;
        }
        self.give_up(EscalationReason::WorkflowError, why, 0).await
    }

    pub(super) fn backoff(&self, tries: u32) -> Duration {
        let factor = 1u32 << tries.saturating_sub(1).min(8);
        (self.timing.backoff_base() * factor).min(self.timing.backoff_cap())
    }

    /// Commits a step; only then does the history know it. `spent_ms` is working time since the step before.
    pub(super) async fn commit(&mut self, step: Step, spent_ms: u64) -> Result<(), Stopped> {
        self.commit_as(step.clone(), step, spent_ms).await
    }

    /// `sent` and `kept` differ only in how a large artifact is carried.
    pub(super) async fn commit_as(&mut self, sent: Step, kept: Step, spent_ms: u64) -> Result<(), Stopped> {
        let seq = self.history.next_seq;
        let kind = kept.kind();
        let active_ms = self.history.active_ms + spent_ms;
        failpoint::hit(&format!("runner.before_step.{kind}"));
        let at = self.port.commit(seq, sent, active_ms).await?;
        failpoint::hit(&format!("runner.after_step.{kind}"));
        self.port.progressed();
        let refused = |error: cfq_convergence::HistoryError| Stopped::Refused { reason: error.to_string() };
        self.history.push(&StepRecord { seq, step: kept, active_ms, at }).map_err(refused)
    }

    pub(super) async fn give_up(
        &mut self,
        reason: EscalationReason,
        why: String,
        spent_ms: u64,
    ) -> Result<(), Stopped> {
        let decided = escalate(&self.history, reason, why);
        self.decided(decided, spent_ms).await
    }

    pub(super) async fn fail(&mut self, reason: String, spent_ms: u64) -> Result<(), Stopped> {
        let decided = fail(&self.history, reason);
        self.decided(decided, spent_ms).await
    }

    pub(super) async fn decided(&mut self, decided: Decided, spent_ms: u64) -> Result<(), Stopped> {
        let iteration = self.history.current_iteration();
        self.commit(Step::Decided { iteration, decided }, spent_ms).await
    }

    async fn start(&mut self) -> Result<(), Problem> {
        let branch = format!("worker-{}/task-{}", self.worker, self.number.0);
        let found = match &self.spec.base {
            Some(base) => Ok(base.clone()),
            None => {
                let repo = PathBuf::from(&self.spec.repo);
                tokio::task::spawn_blocking(move || head_commit(&repo)).await?
            }
        };
        match found {
            Ok(base) => Ok(self.commit(Step::Started { base, branch }, 0).await?),
            // Without a base there is nothing to try again from.
            Err(error) => {
                self.commit(Step::Started { base: String::new(), branch }, 0).await?;
                Ok(self.fail(error.in_words(), 0).await?)
            }
        }
    }

    pub(super) fn base(&self) -> Result<Base, Stopped> {
        let missing = || Stopped::Refused { reason: "the task has not started".to_owned() };
        self.history.base.clone().ok_or_else(missing)
    }

    /// The mirror with everything the history refers to, made again where it is missing.
    pub(super) async fn mirror(&mut self) -> Result<Mirror, Problem> {
        if let Some(mirror) = &self.prepared {
            return Ok(mirror.clone());
        }
        let base = self.base()?;
        let (data_dir, source) = (self.data_dir.clone(), PathBuf::from(&self.spec.repo));
        let artifacts: Vec<_> = self.history.iterations.iter().map(|i| i.artifact.clone()).collect();
        let (worktrees, number, attempt) = (self.worktrees.clone(), self.number, self.attempt);
        let mirror = tokio::task::spawn_blocking(move || {
            let mirror = Mirror::open(&data_dir, &source)?;
            mirror.fetch_base(&base.commit)?;
            let head = rebuild(&mirror.repository()?, &base.commit, &artifacts)?;
            mirror.set_branch(&base.branch, &head)?;
            worktrees.remove_others(number, attempt)?;
            worktrees.checkout(&mirror, number, attempt, &head)?;
            Ok::<_, GitError>(mirror)
        });
        let mirror = mirror.await??;
        Ok(self.prepared.insert(mirror).clone())
    }

    /// Branch and worktree follow the last commit. Both are views: what they show stands in the history, so trouble with
    /// them is said and not more.
    pub(super) async fn show(&self, mirror: &Mirror, commit: String) -> Result<(), Problem> {
        let branch = self.base()?.branch;
        let (mirror, worktrees, number, attempt) = (mirror.clone(), self.worktrees.clone(), self.number, self.attempt);
        let shown = tokio::task::spawn_blocking(move || {
            mirror.set_branch(&branch, &commit)?;
            worktrees.checkout(&mirror, number, attempt, &commit)
        });
        if let Err(error) = shown.await? {
            tracing::warn!(task = %self.number, error = error.in_words(), "the worktree does not follow");
        }
        Ok(())
    }

    pub(super) fn title(&self) -> String {
        title(&self.spec.description)
    }
}
