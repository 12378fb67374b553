//! Checks of a merge: whether two results, each of which passes alone, also pass together.
//!
//! A merge is compared with its two sides and the merge base. What one side broke, and a human accepted, does not stop
//! later merges. What one side repaired must work in the merge.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cfq_proto::review::{CheckRun, Finding};

use super::DeclaredChecks;
use super::check_findings::{Comparison, findings};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::project::{CheckRunner, RunContext, check_run, run_each};
use super::verdict::{Baseline, CheckOutcome, Verdict, changed_by_one_side, is_repeatable, judge};
use crate::workstream::GitError;

/// Maximum number of runs of one check to judge one merge: two on the merge, three on each side and on the merge base,
/// and two on the result to confirm a problem.
pub(crate) const MAX_MERGE_RUNS: u32 = 2 + 3 * 3 + 2;

/// A merge to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MergeToCheck {
    /// The merge commit.
    pub merge: String,
    /// One side: `main` before.
    pub main: String,
    /// The other side: the task's result.
    pub result: String,
    /// The merge base, if there is exactly one.
    pub merge_base: Option<String>,
    /// Whether the result passed its own checks. Otherwise, a human accepted it.
    pub has_passed: bool,
    /// Whether the merge declares the checks and preparations by which the result was judged.
    pub has_same_checks: bool,
    /// The commit on which preparations may run; `None` if they must not run.
    pub prepare_on: Option<String>,
}

/// What is expected of a check on a merge.
struct Expected {
    /// Of its tests; `None` without a report, or if no side has a usable one.
    tests: Option<Baseline>,
    /// Whether the failure of the command as a whole, or of its report, is known.
    is_failure_known: bool,
}

impl Expected {
    fn verdict(&self, check: &ProjectCheck, runs: &[CheckOutcome]) -> Verdict {
        let [first, rest @ ..] = runs else { return Verdict::default() };
        let mut verdict = judge(self.tests.as_ref(), first, rest.first());
        if self.is_failure_known && verdict.problems.run.take().is_some() {
            verdict.known_failures.push(check.name.clone());
        }
        verdict
    }
}

impl CheckRunner {
    /// Runs the checks of `declared` on a merge. Returns how each check ended, and the findings of those that failed.
    /// Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if a check was not run to its end.
    pub(crate) fn run_on_merge(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        merge: &MergeToCheck,
        check_out: impl Fn(&Path, &str) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let context = self.prepare_context(name, declared, merge.prepare_on.as_deref(), check_out, cancelled)?;
        run_each(&declared.checks, |check| self.run_check_on_merge(&context, check, merge))
    }

    fn run_check_on_merge<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        merge: &MergeToCheck,
    ) -> Result<(CheckRun, Vec<Finding>), CheckRunError> {
        let (first, mut wall) = self.run_once(context, check, &merge.merge, "the merge")?;
        let mut runs = vec![first];
        let mut verdict = Verdict::default();
        // Without a report, a success needs no comparison.
        if check.report.is_some() || !runs[0].end.is_success() {
            let mut expected = self.expected(context, check, merge, false)?;
            verdict = expected.verdict(check, &runs);
            if !verdict.problems.is_empty() && is_repeatable(runs[0].end) {
                let (second, time) = self.run_once(context, check, &merge.merge, "the merge again")?;
                wall += time;
                runs.push(second);
                verdict = expected.verdict(check, &runs);
            }
            // The name of a test may differ from run to run. Then two runs on each commit show it.
            let is_repeated = expected.tests.as_ref().is_none_or(Baseline::is_repeated);
            if verdict.problems.has_missing_tests() && !is_repeated {
                expected = self.expected(context, check, merge, true)?;
                verdict = expected.verdict(check, &runs);
            }
        }
        if !verdict.problems.is_empty() {
            self.confirm(context, check, merge, &verdict)?;
        }
        self.keep_as_baseline(context, check, &merge.merge, &verdict, &runs);
        let found = findings(check, &verdict, &runs, Comparison::Sides);
        Ok((check_run(check, &verdict, &runs, context.level, wall), found))
    }

    /// What is expected of a check on a merge, from its outcomes on both sides and on the merge base. With `repeat`,
    /// each of them is compared in two runs.
    fn expected<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        merge: &MergeToCheck,
        repeat: bool,
    ) -> Result<Expected, CheckRunError> {
        let usable = |commit: &str| self.usable_baseline(context, check, commit, repeat);
        let has_failed = |baseline: &Option<Arc<Baseline>>| match check.report {
            Some(_) => baseline.is_none(),
            None => baseline.as_ref().is_none_or(|baseline| baseline.has_failed),
        };
        let result = usable(&merge.result)?;
        if merge.has_passed && merge.has_same_checks && has_failed(&result) {
            return Err(CheckRunError::NoLongerPasses { check: check.name.clone() });
        }
        let main = usable(&merge.main)?;
        let merge_base = merge.merge_base.as_deref().map(usable).transpose()?;
        // A result that passed explains no failure, not even if the merge's checks do not run on it.
        let of_sides = (has_failed(&main), has_failed(&result) && !merge.has_passed);
        let is_failure_known = match &merge_base {
            Some(merge_base) => changed_by_one_side(of_sides.0, of_sides.1, has_failed(merge_base)) == Some(true),
            None => of_sides.0 || of_sides.1,
        };
        let merge_base = merge_base.flatten();
        let tests = match (&main, &result) {
            _ if check.report.is_none() => None,
            (Some(main), Some(result)) => {
                Some(Baseline::of_merge(main, result, merge_base.as_deref(), merge.has_passed))
            }
            (Some(one), None) | (None, Some(one)) => Some(Baseline::clone(one)),
            (None, None) => None,
        };
        Ok(Expected { tests, is_failure_known })
    }

    /// Runs a check that fails on a merge on the result again. If it fails there in the same way, although it passed
    /// before, the machine is the cause and not the merge.
    ///
    /// # Errors
    /// [`CheckRunError::NoLongerPasses`] then.
    fn confirm<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        merge: &MergeToCheck,
        verdict: &Verdict,
    ) -> Result<(), CheckRunError> {
        if !merge.has_passed || !merge.has_same_checks {
            return Ok(());
        }
        let before = self.usable_baseline(context, check, &merge.result, false)?;
        let now = match self.run_baseline(context, check, &merge.result, false) {
            Err(CheckRunError::NoBaselineReport { .. }) => None,
            now => Some(now?),
        };
        let is_worse = match (before, now) {
            (Some(before), Some(now)) => {
                now.has_failed && !before.has_failed
                    || verdict.problems.tests.keys().any(|name| now.failures(name) > before.failures(name))
            }
            (_, None) => true,
            (None, Some(_)) => false,
        };
        match is_worse {
            true => Err(CheckRunError::NoLongerPasses { check: check.name.clone() }),
            false => Ok(()),
        }
    }

    /// The outcome on a commit, or `None` if the check cannot run there or writes no usable report.
    ///
    /// # Errors
    /// If something else than the commit is the cause.
    fn usable_baseline<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        check: &ProjectCheck,
        commit: &str,
        repeat: bool,
    ) -> Result<Option<Arc<Baseline>>, CheckRunError> {
        let known = self.baseline(context, check, commit).and_then(|known| {
            // A failure that was kept may have been one of the machine.
            let is_doubtful = check.report.is_none() && known.has_failed;
            match is_doubtful || repeat && !known.is_repeated() {
                true => self.run_baseline(context, check, commit, repeat),
                false => Ok(known),
            }
        });
        match known {
            Ok(baseline) => Ok(Some(baseline)),
            Err(
                error @ (CheckRunError::NoBaselineReport { .. }
                | CheckRunError::Program { .. }
                | CheckRunError::KeptFolderInCommit { .. }),
            ) => {
                tracing::info!(check = check.name, commit, %error, "no usable outcome on a commit to compare with");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
