//! Checks of a merge: whether two results, each of which passes alone, also pass together.
//!
//! A merge is compared with both of its sides. A test that fails on one of them too is not a problem of the merge, so a
//! failure that a human has accepted, or that the user's own commits brought, does not stop all later merges.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cfq_proto::review::{CheckRun, Finding};

use super::DeclaredChecks;
use super::check_findings::{FindingBudget, merge_findings};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::project::{CheckRunner, MAX_RUNS, RunContext, check_run};
use super::verdict::{Baseline, CheckOutcome, Verdict, is_repeatable, judge, judge_merge};
use crate::workstream::GitError;

/// Maximum number of runs of one check to judge one merge: two on the merge, three on each other commit.
pub(crate) const MAX_MERGE_RUNS: u32 = MAX_RUNS + 6;

/// The commits of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MergeCommits {
    pub merge: String,
    /// Its two sides: `main` before, and the result.
    pub sides: [String; 2],
    /// The commit from which both sides come, if there is exactly one.
    pub ancestor: Option<String>,
}

impl CheckRunner {
    /// Runs the checks of `declared` on a merge. Preparations run on `prepare_on` if they did not run yet; `None` if
    /// they must not run. Returns how each check ended, and the findings of those that failed. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if a check was not run to its end.
    pub(crate) fn run_on_merge(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        prepare_on: Option<&str>,
        commits: &MergeCommits,
        check_out: impl Fn(&Path, &str) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let context = self.prepare_context(name, declared, prepare_on, check_out, cancelled)?;
        let (mut ran, mut all) = (Vec::new(), Vec::new());
        let mut budget = FindingBudget::default();
        for check in &declared.checks {
            let (run, found) = self.run_check_on_merge(&context, check, commits)?;
            tracing::info!(check = check.name, ?run, "check has run on a merge");
            ran.push(run);
            all.extend(found.into_iter().map(|finding| budget.limit(finding)));
        }
        Ok((ran, all))
    }

    fn run_check_on_merge<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commits: &MergeCommits,
    ) -> Result<(CheckRun, Vec<Finding>), CheckRunError> {
        let (first, mut wall) = self.run_once(context, check, &commits.merge, "the merge")?;
        let mut runs = vec![first];
        let mut verdict = self.verdict_on_merge(context, check, commits, &runs)?;
        if !verdict.problems.is_empty() && is_repeatable(runs[0].end) {
            let (second, time) = self.run_once(context, check, &commits.merge, "the merge again")?;
            wall += time;
            runs.push(second);
            verdict = self.verdict_on_merge(context, check, commits, &runs)?;
        }
        // The name of a test may differ from run to run. Then two runs on each side show it.
        if verdict.problems.has_missing_tests() && self.repeat_baselines(context, check, commits)? {
            verdict = self.verdict_on_merge(context, check, commits, &runs)?;
        }
        self.keep_as_baseline(context, check, &commits.merge, &verdict, &runs);
        let found = merge_findings(check, &verdict, &runs);
        Ok((check_run(check, &verdict, &runs, context.level, wall), found))
    }

    fn verdict_on_merge<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commits: &MergeCommits,
        runs: &[CheckOutcome],
    ) -> Result<Verdict, CheckRunError> {
        let (first, second) = match runs {
            [] => return Ok(Verdict::default()),
            [first, rest @ ..] => (first, rest.first()),
        };
        if check.report.is_none() {
            let mut verdict = judge(None, first, second);
            if !verdict.problems.is_empty() && self.fails_on_a_side(context, check, commits)? {
                verdict = Verdict { known_failures: vec![check.name.clone()], ..Verdict::default() };
            }
            return Ok(verdict);
        }
        let sides = self.baselines_of_sides(context, check, commits)?;
        if sides.is_empty() {
            return Ok(Verdict { known_failures: vec![check.name.clone()], ..Verdict::default() });
        }
        let ancestor = || match &commits.ancestor {
            Some(ancestor) => self.baseline_if_it_runs(context, check, ancestor),
            None => Ok(None),
        };
        judge_merge(&sides, ancestor, first, second)
    }

    /// The outcomes on the sides on which the check writes a usable report. A result that no human accepted is one.
    fn baselines_of_sides<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commits: &MergeCommits,
    ) -> Result<Vec<Arc<Baseline>>, CheckRunError> {
        let mut baselines = Vec::new();
        for side in &commits.sides {
            match self.baseline(context, check, side) {
                Ok(baseline) => baselines.push(baseline),
                Err(CheckRunError::NoBaselineReport { problem, .. }) => {
                    tracing::info!(check = check.name, side, problem, "a side of a merge has no usable report");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(baselines)
    }

    /// Whether a check without a report fails on one of the sides, so that its failure says nothing about the merge.
    fn fails_on_a_side<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commits: &MergeCommits,
    ) -> Result<bool, CheckRunError> {
        for side in &commits.sides {
            if self.baseline(context, check, side)?.failed_with.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs a check once more on the commits with which a merge is compared. Returns whether one had run only once.
    fn repeat_baselines<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commits: &MergeCommits,
    ) -> Result<bool, CheckRunError> {
        let mut has_repeated = false;
        for commit in commits.sides.iter().chain(&commits.ancestor) {
            let known = self.baseline_if_it_runs(context, check, commit)?;
            if known.is_some_and(|baseline| !baseline.is_repeated()) {
                match self.run_on_base(context, check, commit, true) {
                    Ok(_) => has_repeated = true,
                    Err(CheckRunError::NoBaselineReport { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(has_repeated)
    }
}
