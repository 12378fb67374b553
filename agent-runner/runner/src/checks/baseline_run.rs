//! Runs checks on the commits with which others are compared: the base commit of a task, the sides of a merge, and the
//! merge base.

use std::sync::Arc;

use super::check_findings::quoted_output;
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::project::{CheckRunner, RunContext};
use super::verdict::{Baseline, CheckOutcome, Verdict, is_repeatable};

/// What a check runs on, for users.
const BASELINE: &str = "a commit to compare with";

impl CheckRunner {
    /// Keeps the outcome on a commit that passed: later commits are compared with it.
    pub(super) fn keep_as_baseline(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
        verdict: &Verdict,
        runs: &[CheckOutcome],
    ) {
        if verdict.problems.is_empty()
            && let Some(baseline) = Baseline::of_passed(check.report.is_some(), runs)
        {
            self.baselines.insert(commit, check, &context.environment.id(), Arc::new(baseline));
        }
    }

    /// As [`CheckRunner::baseline`]; `None` if the check does not run there.
    ///
    /// # Errors
    /// Only [`CheckRunError::Cancelled`].
    pub(super) fn baseline_if_it_runs(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
    ) -> Result<Option<Arc<Baseline>>, CheckRunError> {
        match self.baseline(context, check, commit) {
            Ok(baseline) => Ok(Some(baseline)),
            Err(CheckRunError::Cancelled) => Err(CheckRunError::Cancelled),
            Err(error) => {
                tracing::info!(check = check.name, commit, %error, "no usable outcome on a commit to compare with");
                Ok(None)
            }
        }
    }

    /// The outcome of a check on a commit with which another one is compared.
    pub(super) fn baseline(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
    ) -> Result<Arc<Baseline>, CheckRunError> {
        match self.baselines.get(commit, check, &context.environment.id()) {
            Some(known) => Ok(known),
            None => self.run_baseline(context, check, commit, false),
        }
    }

    /// Runs a check on a commit with which another one is compared: twice if `repeat` is set or something failed.
    pub(super) fn run_baseline(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
        repeat: bool,
    ) -> Result<Arc<Baseline>, CheckRunError> {
        let (first, _) = self.run_once(context, check, commit, BASELINE)?;
        let has_failed = !first.end.is_success() || first.has_failed_tests();
        let mut runs = vec![first];
        if (repeat || has_failed) && is_repeatable(runs[0].end) {
            runs.push(self.run_once(context, check, commit, BASELINE)?.0);
        }
        let baseline = match &check.report {
            Some(report) => Baseline::from_reports(&runs).map_err(|problem| CheckRunError::NoBaselineReport {
                check: check.name.clone(),
                report: report.clone(),
                problem: problem.to_string(),
                end: runs.last().map(|run| run.end.to_string()).unwrap_or_default(),
                output: runs.last().map(quoted_output).unwrap_or_default(),
            })?,
            None => Baseline::from_exit_codes(&runs),
        };
        let baseline = Arc::new(baseline);
        // If no test passes, the next attempt may find what is missing on this machine now.
        if !baseline.passes_nothing() {
            self.baselines.insert(commit, check, &context.environment.id(), baseline.clone());
        }
        Ok(baseline)
    }
}
