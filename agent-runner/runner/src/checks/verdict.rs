//! The verdict on a check: what is wrong in a result, compared with the base commit, and which failures are flaky.
//!
//! With a report, tests are compared one by one. A test that fails in the result but did not on the base commit is a
//! problem. One that failed there too is a known failure. A test that ran on the base commit must run in the result:
//! otherwise a change could pass by removing it. Without a report, only the exit code counts.
//!
//! A check with problems is run a second time. It passes if one of the two runs has no problem.
//!
//! A merge is compared with its two sides and the merge base, test by test, as files are merged: what one side changed
//! in comparison with the merge base is expected of the merge.

use std::collections::{BTreeMap, BTreeSet};

use cfq_sandbox::CommandEnd;

use super::coverage_report::{CoverageReport, LineCount};
use super::test_report::{ReportError, TestReport, TestResult};

/// One run of a check on a commit.
#[derive(Debug, Clone)]
pub(super) struct CheckOutcome {
    pub end: CommandEnd,
    /// `None` if the check declares no report.
    pub report: Option<Result<TestReport, ReportError>>,
    /// `None` if the check declares no coverage report.
    pub coverage: Option<Result<CoverageReport, ReportError>>,
    /// Standard output and standard error.
    pub output: [Vec<u8>; 2],
}

/// Outcome of a check on a commit with which another one is compared: the base commit of a task, a side of a merge, or
/// a merge base.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Baseline {
    /// The tests; none if the check declares no report.
    tests: BTreeMap<String, BaselineTest>,
    /// The exit code, if it was not 0 in any run.
    pub failed_with: Option<i32>,
    /// Whether no run succeeded, for whatever reason.
    pub has_failed: bool,
    /// Whether the exit code was the number of failed tests.
    exits_with_failures: bool,
    /// The exit code on the other side of a merge, if it was not 0 in any run.
    other_failed_with: Option<i32>,
    /// Whether this is expected of a merge, and no outcome on a commit.
    is_expected: bool,
    /// Whether two runs are compared.
    is_repeated: bool,
}

/// Tests of one name on the base commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct BaselineTest {
    /// Number of those that ran in every run.
    ran: u32,
    /// Number of those that failed in every run.
    failed: u32,
}

/// What is wrong with a run as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RunProblem {
    /// The command failed for another reason than the failed tests in its report.
    CommandFailed,
    /// There is no readable report.
    Report(ReportError),
    /// There is no readable coverage report.
    CoverageReport(ReportError),
    /// Too few lines are covered.
    TooFewCovered(LineCount),
}

/// What is wrong with a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TestProblem {
    /// It fails, and did not on the base commit.
    Failed(TestResult),
    /// It is skipped, and ran on the base commit.
    Skipped,
    /// It does not run, and ran on the base commit.
    Missing,
}

/// The problems of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Problems {
    pub run: Option<RunProblem>,
    pub tests: BTreeMap<String, TestProblem>,
}

/// The verdict on one check of a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Why the check fails; none if it passes.
    pub problems: Problems,
    /// Names of the tests that fail, and failed on the base commit too.
    pub known_failures: Vec<String>,
    /// Names of the tests with a problem in only one of two runs.
    pub flaky: Vec<String>,
    /// Whether the command as a whole had a problem in only one of two runs.
    pub is_command_flaky: bool,
}

impl CheckOutcome {
    /// Whether the command succeeded and, with a report, there are tests of which none failed.
    pub fn is_clean(&self) -> bool {
        let has_tests = match &self.report {
            None => true,
            Some(report) => report.as_ref().is_ok_and(|report| report.count() > 0),
        };
        self.end.is_success() && has_tests && !self.has_failed_tests()
    }

    pub fn has_failed_tests(&self) -> bool {
        matches!(&self.report, Some(Ok(report)) if report.failed() > 0)
    }
}

impl Problems {
    pub fn is_empty(&self) -> bool {
        self.run.is_none() && self.tests.is_empty()
    }

    /// Whether a test is missing, which an unstable name on the base commit would explain.
    pub fn has_missing_tests(&self) -> bool {
        self.tests.values().any(|problem| *problem == TestProblem::Missing)
    }
}

impl Baseline {
    /// From the runs on the base commit of a check that declares a report. Runs that did not exit do not count, because
    /// their reports may be incomplete.
    ///
    /// # Errors
    /// Why the last run has no usable report, if none has.
    pub fn from_reports(runs: &[CheckOutcome]) -> Result<Self, ReportError> {
        let mut problem = ReportError::Missing;
        let mut usable = Vec::new();
        for run in runs {
            match (&run.report, run.end) {
                (Some(Ok(report)), CommandEnd::Exited(_)) if report.count() == 0 => problem = ReportError::NoTests,
                (Some(Ok(report)), CommandEnd::Exited(code)) => usable.push((report, code)),
                (Some(Ok(_)), _) => problem = ReportError::Incomplete,
                (Some(Err(error)), _) => problem = error.clone(),
                (None, _) => {}
            }
        }
        let tests = match usable.as_slice() {
            [] => return Err(problem),
            [(only, _)] => only.tests.iter().map(|(name, test)| (name.clone(), BaselineTest::of(test))).collect(),
            [(first, _), (second, _), ..] => combined(first, second),
        };
        let exits_with_failures =
            usable.iter().all(|(report, code)| report.failed() > 0 && u32::try_from(*code) == Ok(report.failed()));
        let codes: Vec<i32> = usable.iter().map(|(_, code)| *code).collect();
        let has_failed = runs.iter().all(|run| !run.end.is_success());
        let (failed_with, is_repeated) = (failed_with(&codes), usable.len() > 1);
        Ok(Self { tests, failed_with, has_failed, exits_with_failures, is_repeated, ..Self::default() })
    }

    /// From the runs on the base commit of a check that declares no report.
    pub fn from_exit_codes(runs: &[CheckOutcome]) -> Self {
        let code = |run: &CheckOutcome| match run.end {
            CommandEnd::Exited(code) => code,
            CommandEnd::Signalled(_) | CommandEnd::LimitExceeded(_) | CommandEnd::Cancelled => 0,
        };
        let codes: Vec<i32> = runs.iter().map(code).collect();
        let has_failed = runs.iter().all(|run| !run.end.is_success());
        Self { failed_with: failed_with(&codes), has_failed, is_repeated: runs.len() > 1, ..Self::default() }
    }

    /// Whether no test passes although there are some. Then the cause may be the machine, for example a missing package.
    pub fn passes_nothing(&self) -> bool {
        !self.tests.is_empty() && self.tests.values().all(|test| test.ran <= test.failed)
    }

    pub fn is_repeated(&self) -> bool {
        self.is_repeated
    }

    /// What is expected of a merge with these sides. Without a merge base, each side explains a failure and the absence
    /// of a test. `has_passed` is whether the result passed its own checks: then only what fails on the merge base too may
    /// fail on its side.
    pub fn of_merge(main: &Self, result: &Self, merge_base: Option<&Self>, has_passed: bool) -> Self {
        let names: BTreeSet<&String> = main.tests.keys().chain(result.tests.keys()).collect();
        let of = |side: &Self, name: &String| side.tests.get(name).copied().unwrap_or_default();
        let expected = |name: &String| {
            let (main, mut result) = (of(main, name), of(result, name));
            let base = merge_base.map(|base| of(base, name));
            if has_passed {
                result.failed = result.failed.min(base.map_or(0, |base| base.failed));
            }
            let Some(base) = base else {
                return BaselineTest { ran: main.ran.min(result.ran), failed: main.failed.max(result.failed) };
            };
            let [ran, failed] = [(main.ran, result.ran, base.ran), (main.failed, result.failed, base.failed)]
                .map(|(main, result, base)| changed_by_one_side(main, result, base));
            BaselineTest {
                ran: ran.unwrap_or(main.ran.min(result.ran)),
                failed: failed.unwrap_or(main.failed.max(result.failed)),
            }
        };
        Self {
            tests: names.into_iter().map(|name| (name.clone(), expected(name))).collect(),
            failed_with: main.failed_with,
            other_failed_with: result.failed_with,
            has_failed: false,
            exits_with_failures: main.exits_with_failures || result.exits_with_failures,
            is_expected: true,
            is_repeated: main.is_repeated && result.is_repeated,
        }
    }

    /// From the last run on a commit that passed: if there was an earlier one, it had a problem. `None` if it cannot be
    /// compared with.
    pub fn of_passed(has_report: bool, runs: &[CheckOutcome]) -> Option<Self> {
        let last = &runs[runs.len().saturating_sub(1)..];
        match has_report {
            true => Self::from_reports(last).ok().filter(|baseline| !baseline.passes_nothing()),
            false => Some(Self::from_exit_codes(last)),
        }
    }

    /// Without any failure that is permitted.
    pub fn without_failures(mut self) -> Self {
        self.tests.values_mut().for_each(|test| test.failed = 0);
        (self.failed_with, self.other_failed_with, self.exits_with_failures) = (None, None, false);
        self
    }

    /// With this number of tests, which passed.
    #[cfg(test)]
    pub fn with_tests(count: usize) -> Self {
        let tests = (0..count).map(|n| (format!("t{n}"), BaselineTest { ran: 1, failed: 0 }));
        Self { tests: tests.collect(), ..Self::default() }
    }

    /// Number of names of tests.
    pub fn count(&self) -> usize {
        self.tests.len()
    }

    /// Number of tests of this name that may fail. 0 if no test passes on the base commit at all.
    pub fn allowed_failures(&self, name: &str) -> u32 {
        match self.tests.get(name) {
            Some(test) if self.is_expected || !self.passes_nothing() => test.failed,
            _ => 0,
        }
    }
}

impl BaselineTest {
    fn of(test: &TestResult) -> Self {
        Self { ran: test.ran(), failed: test.failed }
    }
}

/// The value on the side that changed it, or on both; `None` if the sides changed it in different ways.
pub(super) fn changed_by_one_side<T: PartialEq>(main: T, result: T, merge_base: T) -> Option<T> {
    if main == result || result == merge_base {
        Some(main)
    } else if main == merge_base {
        Some(result)
    } else {
        None
    }
}

/// What two runs have in common. A test that only one of them ran has an unstable name, and is not required in a result;
/// if it failed, it may still fail.
fn combined(first: &TestReport, second: &TestReport) -> BTreeMap<String, BaselineTest> {
    let names: BTreeSet<&String> = first.tests.keys().chain(second.tests.keys()).collect();
    let combine = |name: &String| match (first.tests.get(name), second.tests.get(name)) {
        (Some(a), Some(b)) if a.ran() == 0 || b.ran() == 0 => BaselineTest { ran: 0, failed: a.failed.max(b.failed) },
        (Some(a), Some(b)) => BaselineTest { ran: a.ran().min(b.ran()), failed: a.failed.min(b.failed) },
        (Some(one), None) | (None, Some(one)) => BaselineTest { ran: 0, failed: one.failed },
        (None, None) => BaselineTest::default(),
    };
    names.into_iter().map(|name| (name.clone(), combine(name))).collect()
}

/// The last exit code, if none is 0.
fn failed_with(codes: &[i32]) -> Option<i32> {
    codes.last().copied().filter(|_| codes.iter().all(|code| *code != 0))
}

/// What is wrong with the coverage of a run that has no other problem. It must cover `percent` of the lines.
pub(super) fn coverage_problem(run: &CheckOutcome, percent: u8) -> Option<RunProblem> {
    match run.coverage.as_ref()? {
        Err(error) => Some(RunProblem::CoverageReport(error.clone())),
        Ok(report) => Some(report.total()).filter(|count| !count.reaches(percent)).map(RunProblem::TooFewCovered),
    }
}

/// Whether a second run may tell a flaky failure from a real one. A run that exceeded a limit is not repeated: it would
/// take as long again.
pub(super) fn is_repeatable(end: CommandEnd) -> bool {
    match end {
        CommandEnd::Exited(_) | CommandEnd::Signalled(_) => true,
        CommandEnd::LimitExceeded(_) | CommandEnd::Cancelled => false,
    }
}

/// Judges a result by its runs. `baseline` is absent if the check declares no report.
pub(super) fn judge(baseline: Option<&Baseline>, first: &CheckOutcome, second: Option<&CheckOutcome>) -> Verdict {
    let mut known_failures = known_failures(baseline, first);
    let first_problems = find_problems(baseline, first);
    let Some(second) = second else {
        return Verdict { problems: first_problems, known_failures, ..Verdict::default() };
    };
    known_failures.extend(self::known_failures(baseline, second));
    known_failures.sort();
    known_failures.dedup();
    let second_problems = find_problems(baseline, second);
    let mut problems = Problems::default();
    if !first_problems.is_empty() && !second_problems.is_empty() {
        problems = confirmed(&first_problems, first, &second_problems, second);
        // Each run failed, for another reason.
        if problems.is_empty() {
            problems = second_problems.clone();
        }
    }
    let names = first_problems.tests.keys().chain(second_problems.tests.keys());
    let mut flaky: Vec<String> = names.filter(|name| !problems.tests.contains_key(*name)).cloned().collect();
    flaky.sort();
    flaky.dedup();
    let is_command_flaky = problems.run.is_none() && (first_problems.run.is_some() || second_problems.run.is_some());
    Verdict { problems, known_failures, flaky, is_command_flaky }
}

/// The problems of both runs. A test that a run does not contain, because it ended early, is confirmed by the other run.
fn confirmed(first: &Problems, of_first: &CheckOutcome, second: &Problems, of_second: &CheckOutcome) -> Problems {
    let has_test = |run: &CheckOutcome, name: &str| match &run.report {
        Some(Ok(report)) => report.tests.contains_key(name),
        Some(Err(_)) | None => false,
    };
    let run = second.run.clone().filter(|_| first.run.is_some());
    let in_second =
        second.tests.iter().filter(|(name, _)| first.tests.contains_key(*name) || !has_test(of_first, name));
    let in_first =
        first.tests.iter().filter(|(name, _)| !second.tests.contains_key(*name) && !has_test(of_second, name));
    let tests = in_second.chain(in_first).map(|(name, problem)| (name.clone(), problem.clone())).collect();
    Problems { run, tests }
}

fn known_failures(baseline: Option<&Baseline>, run: &CheckOutcome) -> Vec<String> {
    let (Some(baseline), Some(Ok(report))) = (baseline, &run.report) else { return Vec::new() };
    let is_known =
        |(name, test): &(&String, &TestResult)| test.failed > 0 && test.failed <= baseline.allowed_failures(name);
    report.tests.iter().filter(is_known).map(|(name, _)| name.clone()).collect()
}

fn find_problems(baseline: Option<&Baseline>, run: &CheckOutcome) -> Problems {
    let whole = |problem| Problems { run: Some(problem), tests: BTreeMap::new() };
    let (report, baseline) = match (&run.report, baseline) {
        (None, _) | (_, None) if run.end.is_success() => return Problems::default(),
        (None, _) | (_, None) => return whole(RunProblem::CommandFailed),
        (Some(Err(error)), _) => return whole(RunProblem::Report(error.clone())),
        (Some(Ok(report)), Some(baseline)) => (report, baseline),
    };
    let mut problems = Problems::default();
    for (name, test) in &report.tests {
        if test.failed > baseline.allowed_failures(name) {
            problems.tests.insert(name.clone(), TestProblem::Failed(test.clone()));
        }
    }
    for (name, before) in &baseline.tests {
        let problem = match report.tests.get(name) {
            Some(now) if now.ran() >= before.ran => None,
            Some(now) if now.skipped > 0 => Some(TestProblem::Skipped),
            None if before.ran == 0 => None,
            Some(_) | None => Some(TestProblem::Missing),
        };
        if let Some(problem) = problem {
            problems.tests.entry(name.clone()).or_insert(problem);
        }
    }
    if !is_explained(baseline, report, run.end, &problems) {
        problems.run = Some(RunProblem::CommandFailed);
    }
    problems
}

/// Whether failed tests explain how the command ended.
fn is_explained(baseline: &Baseline, report: &TestReport, end: CommandEnd, problems: &Problems) -> bool {
    let CommandEnd::Exited(code) = end else { return false };
    let has_new_failure = problems.tests.values().any(|problem| matches!(problem, TestProblem::Failed(_)));
    // Some test runners exit with the number of failed tests.
    let is_usual = baseline.failed_with == Some(code)
        || baseline.other_failed_with == Some(code)
        || (baseline.exits_with_failures && u32::try_from(code) == Ok(report.failed()));
    code == 0 || has_new_failure || (report.failed() > 0 && is_usual)
}

#[cfg(test)]
mod tests;
