//! Actions of the review loop: create, check, review, decide.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cfq_convergence::{Base, Iteration, decide};
use cfq_proto::blob::Payload;
use cfq_proto::job::OutputFormat;
use cfq_proto::loop_step::Step;
use cfq_proto::review::{CheckKind, CheckRun, Finding, Quarantine};
use cfq_proto::task::{Agent, ReviewDepth};

use tokio::time::MissedTickBehavior;

use super::artifact::{CreatorReply, make_artifact, reply_target};
use super::port::{DriveError, Stopped, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::checks::{CheckRunError, CheckRunner, CheckedCommits, DeclaredChecks, MAX_RUNS, check, declared_checks};
use crate::pipeline::{
    Budget, creator_prompt, critic_prompt, early_stopped_review, incomplete_review, parse_review, review_format,
    salvage_review,
};
use crate::workstream::{CancelGuard, Mirror, Snapshot};

/// Interval at which running checks are reported as progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Time for the checkout and the end of a check, in addition to its time limit.
const CHECK_OVERHEAD: Duration = Duration::from_secs(60);

/// Selects the activities that are reported: most end before, and need no event.
#[derive(Debug, Default)]
struct ActivityDebounce {
    text: Option<String>,
    /// Number of times that it was seen.
    seen: u32,
}

impl ActivityDebounce {
    /// Number of times that an activity is seen before it is reported: about two seconds.
    const REPORTED_AT: u32 = 3;
    /// Number of times after which it is reported again, because a report may be lost: about a minute.
    const REPEATED_AFTER: u32 = 60;

    /// Returns the text to report, if any. `now` is the current activity.
    fn next(&mut self, now: Option<String>) -> Option<String> {
        if now != self.text {
            (self.text, self.seen) = (now, 0);
        }
        self.seen = self.seen.saturating_add(1);
        self.text.clone().filter(|_| self.seen % Self::REPEATED_AFTER == Self::REPORTED_AT)
    }
}

/// Maximum time of preparations and checks, apart from waits for other tasks, if each check runs `runs` times.
pub(super) fn checks_time_limit(declared: &DeclaredChecks, runs: u32) -> Duration {
    let of_checks: Duration = declared.checks.iter().map(|check| (check.timeout() + CHECK_OVERHEAD) * runs).sum();
    preparation_time(declared) + of_checks
}

/// The longest time that preparations take, apart from waits for other tasks.
fn preparation_time(declared: &DeclaredChecks) -> Duration {
    declared.preparations.iter().map(|(preparation, _)| preparation.timeout() + CHECK_OVERHEAD).sum()
}

impl<P: TaskPort> TaskDriver<P> {
    /// Asks the creator for an artifact and records the artifact.
    pub(super) async fn create(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        self.ensure_checks_can_run(&mirror, &base).await?;
        let sources = self.shared_sources().await?;
        let prompt = {
            let (mirror, base, spec, history) = (mirror.clone(), base.clone(), self.spec.clone(), self.history.clone());
            move |budget: Budget| {
                let (mirror, base, spec, history) = (mirror.clone(), base.clone(), spec.clone(), history.clone());
                let sources = sources.clone();
                tokio::task::spawn_blocking(move || {
                    let repository = mirror.repository()?;
                    let snapshot = Snapshot::of(&repository, &base.commit)?;
                    let target = reply_target(&spec, &history, &snapshot);
                    Ok(creator_prompt(&spec, &history, &target, &sources.with(snapshot), &budget)?)
                })
            }
        };
        let Some(answer) = self.request_answer(Agent::Alpha, OutputFormat::Text, prompt, |_, _| Ok(())).await? else {
            return Ok(());
        };
        let reply = CreatorReply { completion: answer.completion, job: answer.job, model: answer.model.to_string() };
        let (spec, history, number) = (self.spec.clone(), self.history.clone(), self.number);
        let artifact_mirror = mirror.clone();
        let made = tokio::task::spawn_blocking(move || {
            make_artifact(&artifact_mirror, &spec, &history, &base, number, &reply)
        });
        let artifact = made.await??;
        let commit = artifact.commit.clone();
        let sent = Step::Generated { artifact: self.port.send_artifact(artifact.clone()).await? };
        let kept = Step::Generated { artifact: Payload::Inline(artifact) };
        self.commit_step_as(sent, kept, answer.spent_ms).await?;
        match commit {
            Some(commit) => self.update_worktree(&mirror, commit).await,
            None => Ok(()),
        }
    }

    /// Installs what the checks of the base commit need. Fails if they cannot run, before a model is called for a
    /// result that could not pass.
    async fn ensure_checks_can_run(&self, mirror: &Mirror, base: &Base) -> Result<(), ActionError> {
        let declared = self.declared_checks(mirror, base.commit.clone()).await?;
        if declared.checks.is_empty() {
            return Ok(());
        }
        let (limit, commit) = (preparation_time(&declared), base.commit.clone());
        self.with_check_runner(mirror, limit, move |runner, name, mirror, cancelled| {
            runner.prepare(name, &declared, &commit, mirror, cancelled).map(drop)
        })
        .await
    }

    /// Runs the built-in static checks on the last artifact, then those that the project declares, and records their
    /// findings.
    pub(super) async fn check(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        let artifact = self.last()?.artifact.clone();
        let iteration = artifact.iteration;
        let is_review = self.history.facts.review_depth.is_some();
        let mut ran = Vec::new();
        let (findings, quarantine) = if artifact.commit.is_none() {
            let finding =
                Finding { check: CheckKind::Reply, path: String::new(), line: 0, message: artifact.commit_message };
            (vec![finding], Some(Quarantine::Unparsable))
        } else {
            let commit = artifact.commit.clone().unwrap_or_default();
            let commits = CheckedCommits { result: commit, base: base.commit.clone() };
            let checked_mirror = mirror.clone();
            let files = artifact.files.clone();
            let found = tokio::task::spawn_blocking(move || {
                let repository = checked_mirror.repository()?;
                let snapshot = Snapshot::of(&repository, &base.commit)?;
                Ok::<_, ActionError>(check(&files, |path| snapshot.read_text(path)))
            });
            match found.await?? {
                // Code that is dangerous, or does not even parse, is not run.
                found @ (_, Some(_)) => found,
                found if !self.runs_project_checks() => found,
                _ => match self.run_project_checks(&mirror, commits).await {
                    Ok((checked, findings)) => {
                        ran = checked;
                        let quarantine = (!findings.is_empty()).then_some(Quarantine::FailedChecks);
                        (findings, quarantine)
                    }
                    // The critic can review a change without them.
                    Err(ActionError::Checks(error)) if is_review && !error.is_transient() => {
                        let message = format!("the checks of the project did not run: {}", error.with_causes());
                        let finding = Finding { check: CheckKind::Project, path: String::new(), line: 0, message };
                        (vec![finding], None)
                    }
                    Err(error) => return Err(error),
                },
            }
        };
        // A human made the change that a task reviews, and what the checks find is a part of the review.
        let quarantine = quarantine.filter(|_| !is_review);
        // Checks have time limits of their own and do not count as working time.
        Ok(self.commit_step(Step::Checked { iteration, findings, quarantine, ran }, 0).await?)
    }

    /// The checks that the project declares in the base commit.
    async fn declared_checks(&self, mirror: &Mirror, base: String) -> Result<DeclaredChecks, ActionError> {
        let mirror = mirror.clone();
        let declared = tokio::task::spawn_blocking(move || {
            let repository = mirror.repository()?;
            Ok::<_, ActionError>(declared_checks(&Snapshot::of(&repository, &base)?)?)
        });
        declared.await?
    }

    /// Whether the checks of the project belong to the task.
    fn runs_project_checks(&self) -> bool {
        match self.history.facts.review_depth {
            None | Some(ReviewDepth::Comprehensive) => true,
            Some(ReviewDepth::Quick | ReviewDepth::Standard) => false,
        }
    }

    /// Runs the checks of the project on a result.
    async fn run_project_checks(
        &self,
        mirror: &Mirror,
        commits: CheckedCommits,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), ActionError> {
        let mut declared = self.declared_checks(mirror, commits.base.clone()).await?;
        declared.coverage_target.clone_from(&self.spec.coverage);
        if declared.checks.is_empty() {
            return Ok(Default::default());
        }
        let limit = checks_time_limit(&declared, MAX_RUNS);
        self.with_check_runner(mirror, limit, move |runner, name, mirror, cancelled| {
            runner.run(name, &declared, &commits, mirror, cancelled)
        })
        .await
    }

    /// Runs `work` on a blocking thread, and reports progress meanwhile. Cancels it if this task is no longer driven
    /// here. After `limit`, without waits for other tasks, the runner loses the task as one that makes no progress.
    pub(super) async fn with_check_runner<T: Send + 'static>(
        &self,
        mirror: &Mirror,
        limit: Duration,
        work: impl FnOnce(&CheckRunner, &str, &Mirror, &AtomicBool) -> Result<T, CheckRunError> + Send + 'static,
    ) -> Result<T, ActionError> {
        let mut start = Instant::now();
        let name = format!("{}-a{}", self.number, self.attempt);
        let (runner, mirror, of_work) = (self.checks.clone(), mirror.clone(), name.clone());
        let (_cancel, cancelled) = CancelGuard::new();
        let mut running = tokio::task::spawn_blocking(move || work(&runner, &of_work, &mirror, &cancelled));
        let mut tick = tokio::time::interval(PROGRESS_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut activity = ActivityDebounce::default();
        loop {
            tokio::select! {
                ended = &mut running => return Ok(ended??),
                _ = tick.tick() => {
                    if self.checks.is_waiting(&name) {
                        start = Instant::now();
                    }
                    if start.elapsed() < limit {
                        self.port.record_progress();
                    }
                }
            }
            if let Some(activity) = activity.next(self.checks.activity(&name)) {
                tokio::select! {
                    ended = &mut running => return Ok(ended??),
                    () = self.port.report_activity(self.history.next_seq, activity) => {}
                }
            }
        }
    }

    /// Asks the critic to review the last artifact and records the review.
    pub(super) async fn review(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        let last = self.last()?.clone();
        let iteration = last.artifact.iteration;
        let (last_review, diff_bytes) = (last.review.clone(), last.artifact.diff.len());
        let left_out = Arc::new(AtomicUsize::new(0));
        let last_left_out = left_out.clone();
        let sources = self.shared_sources().await?;
        let prompt = {
            let (spec, history) = (self.spec.clone(), self.history.clone());
            move |budget: Budget| {
                let (mirror, base, last) = (mirror.clone(), base.clone(), last.clone());
                let (spec, history, sources) = (spec.clone(), history.clone(), sources.clone());
                last_left_out.store(diff_bytes.saturating_sub(budget.artifact), Ordering::Relaxed);
                tokio::task::spawn_blocking(move || {
                    let repository = mirror.repository()?;
                    let snapshot = Snapshot::of(&repository, &base.commit)?;
                    Ok(critic_prompt(&spec, &history, &last, &sources.with(snapshot), &budget)?)
                })
            }
        };
        let conditions = self.early_stops();
        let read = |completion: &cfq_proto::job::Completion, last_try: bool| {
            let read = if last_try { salvage_review } else { parse_review };
            read(&completion.text, completion.finish)
                .or_else(|error| early_stopped_review(&completion.text, &conditions).ok_or(error))
        };
        let Some(answer) = self.request_answer(Agent::Beta, review_format(), prompt, read).await? else {
            return Ok(());
        };
        let mut review = match last_review {
            Some(earlier) => earlier.merged_with(answer.value),
            None => answer.value,
        };
        let left_out = left_out.load(Ordering::Relaxed);
        if self.history.facts.review_depth.is_some() && left_out > 0 {
            review = review.merged_with(incomplete_review(left_out, diff_bytes));
        }
        let step = Step::Reviewed { iteration, review, job: answer.job, model: answer.model.to_string() };
        Ok(self.commit_step(step, answer.spent_ms).await?)
    }

    /// Decides whether the last iteration converged, must be revised or is escalated, and records the decision.
    pub(super) async fn decide(&mut self) -> Result<(), ActionError> {
        // The decision depends on the records alone, so that it can be replayed. Whether the result can be merged into
        // the mirror's `main` is determined later, at the merge, and does not change the result.
        let decided = decide(&self.limits, &self.history).map_err(|error| Stopped::CannotDrive(error.into()))?;
        Ok(self.commit_decision(decided, 0).await?)
    }

    fn last(&self) -> Result<&Iteration, Stopped> {
        self.history.last().ok_or(Stopped::CannotDrive(DriveError::NoArtifact))
    }
}
