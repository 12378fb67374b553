//! Checks of a merge: whether two results, each of which passes alone, also pass together.
//!
//! A merge is compared with its two sides and the merge base. What one side broke, and a human accepted, does not stop
//! later merges. What one side repaired must work in the merge.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cfq_proto::review::{CheckRun, Finding};

use super::DeclaredChecks;
use super::check_findings::{Comparison, findings};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::project::{CheckRunner, RunContext, check_run, run_each};
use super::verdict::{Baseline, CheckOutcome, Verdict, changed_by_one_side, judge};
use crate::workstream::Mirror;

/// Maximum number of runs of one check to judge one merge: two on the merge, three on each side and on the merge base,
/// and up to four on the result to tell problems of the machine.
pub(crate) const MAX_MERGE_RUNS: u32 = 2 + 3 * 3 + 4;

/// A merge to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MergeToCheck {
    /// The merge commit.
    pub merge: String,
    /// One side: `main` before.
    pub main: String,
    /// The other side: the task's result.
    pub result: String,
    /// The merge base, or one of several.
    pub merge_base: Option<String>,
    /// How the checks ended on the result, which passed; `None` if a human accepted a result that did not pass.
    pub passed: Option<Vec<CheckRun>>,
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
        mirror: &Mirror,
        cancelled: &AtomicBool,
    ) -> Result<(Vec<CheckRun>, Vec<Finding>), CheckRunError> {
        let context = self.prepare_context(name, declared, merge.prepare_on.as_deref(), mirror, cancelled)?;
        run_each(&declared.checks, |check| self.run_check_on_merge(&context, check, merge))
    }

    fn run_check_on_merge(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        merge: &MergeToCheck,
    ) -> Result<(CheckRun, Vec<Finding>), CheckRunError> {
        let (first, mut wall) = self.run_once(context, check, &merge.merge, "the merge")?;
        let mut runs = vec![first];
        let is_clean = runs[0].is_clean();
        if !is_clean {
            self.confirm_machine(context, check, merge)?;
        }
        let mut verdict = Verdict::default();
        // Without a report, a success needs no comparison.
        if check.report.is_some() || !runs[0].end.is_success() {
            let mut expected = self.expected(context, check, merge, false)?;
            verdict = expected.verdict(check, &runs);
            if !verdict.problems.is_empty() {
                if is_clean {
                    self.confirm_machine(context, check, merge)?;
                }
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
        self.keep_as_baseline(context, check, &merge.merge, &verdict, &runs);
        let found = findings(check, &verdict, &runs, Comparison::Sides);
        Ok((check_run(check, &verdict, &runs, context.level, wall), found))
    }

    /// What is expected of a check on a merge, from its outcomes on both sides and on the merge base. With `repeat`,
    /// each of them is compared in two runs.
    fn expected(
        &self,
        context: &RunContext<'_>,
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
        let has_passed = merge.passed.is_some();
        if has_passed && merge.has_same_checks && has_failed(&result) {
            return Err(CheckRunError::NoLongerPasses { check: check.name.clone() });
        }
        let main = usable(&merge.main)?;
        let merge_base = merge.merge_base.as_deref().map(usable).transpose()?;
        let of_sides = (has_failed(&main), has_failed(&result) && !has_passed);
        let is_failure_known = match &merge_base {
            Some(merge_base) => changed_by_one_side(of_sides.0, of_sides.1, has_failed(merge_base)) == Some(true),
            None => of_sides.0 || of_sides.1,
        };
        let merge_base = merge_base.flatten();
        let tests = match (&main, &result) {
            _ if check.report.is_none() => None,
            (Some(main), Some(result)) => Some(Baseline::of_merge(main, result, merge_base.as_deref(), has_passed)),
            (Some(one), None) | (None, Some(one)) => Some(Baseline::clone(one)),
            (None, None) => None,
        };
        // The sides were judged by other checks or with other packages, so no failure of theirs is known.
        Ok(match merge.has_same_checks {
            true => Expected { tests, is_failure_known },
            false => Expected { tests: tests.map(Baseline::without_failures), is_failure_known: false },
        })
    }

    /// Runs a check that is not clean on a merge on the result, which passed before. If it does not pass there any more,
    /// the machine is the cause, and neither the merge nor the other commits can be judged.
    ///
    /// # Errors
    /// [`CheckRunError::NoLongerPasses`] then.
    fn confirm_machine(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        merge: &MergeToCheck,
    ) -> Result<(), CheckRunError> {
        let passed = merge.passed.as_ref().filter(|_| merge.has_same_checks);
        let Some(passed) = passed.and_then(|ran| ran.iter().find(|run| run.name == check.name)) else {
            return Ok(());
        };
        for on in ["the result", "the result again"] {
            let (outcome, _) = self.run_once(context, check, &merge.result, on)?;
            if is_as_good(&outcome, passed) {
                return Ok(());
            }
        }
        Err(CheckRunError::NoLongerPasses { check: check.name.clone() })
    }

    /// The outcome on a commit, or `None` if the check cannot run there or writes no usable report.
    ///
    /// # Errors
    /// If something else than the commit is the cause.
    fn usable_baseline(
        &self,
        context: &RunContext<'_>,
        check: &ProjectCheck,
        commit: &str,
        repeat: bool,
    ) -> Result<Option<Arc<Baseline>>, CheckRunError> {
        let known = self.baselines.get(commit, check, &context.environment.id());
        let known = match known {
            // A failure that was kept may have been one of the machine.
            Some(known) if check.report.is_some() || !known.has_failed => Ok(known),
            Some(_) | None => self.run_baseline(context, check, commit, repeat),
        };
        let known = match known {
            Ok(once) if repeat && !once.is_repeated() => self.run_baseline(context, check, commit, true),
            known => known,
        };
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

/// Whether a run on the result is as good as it was recorded when the result passed.
fn is_as_good(outcome: &CheckOutcome, passed: &CheckRun) -> bool {
    match &outcome.report {
        None => outcome.end.is_success(),
        Some(Err(_)) => false,
        Some(Ok(report)) => {
            let failed = report.tests.values().filter(|test| test.failed > 0).count();
            failed <= passed.known_failures.count as usize
                && report.count() >= passed.tests.unwrap_or(1)
                && (outcome.end.is_success() || failed > 0)
        }
    }
}
