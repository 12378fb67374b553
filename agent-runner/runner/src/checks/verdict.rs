//! The verdict on a check: what is wrong in a result, compared with the base commit, and which failures are flaky.
//!
//! With a report, tests are compared one by one. A test that fails in the result but did not on the base commit is a
//! problem. One that failed there too is a known failure. A test that ran on the base commit must run in the result:
//! otherwise a change could pass by removing it. Without a report, only the exit code counts.
//!
//! A check with problems is run a second time. It passes if one of the two runs has no problem.
//!
//! A merge is compared with each of its two sides. A problem counts only if neither side explains it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cfq_sandbox::CommandEnd;

use super::test_report::{ReportError, TestReport, TestResult};

/// One run of a check on a commit.
#[derive(Debug, Clone)]
pub(super) struct CheckOutcome {
    pub end: CommandEnd,
    /// `None` if the check declares no report.
    pub report: Option<Result<TestReport, ReportError>>,
    /// Standard output and standard error.
    pub output: [Vec<u8>; 2],
}

/// Outcome of a check on the base commit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Baseline {
    /// The tests; none if the check declares no report.
    tests: BTreeMap<String, BaselineTest>,
    /// The exit code, if it was not 0 in any run.
    pub failed_with: Option<i32>,
    /// Whether the exit code was the number of failed tests.
    exits_with_failures: bool,
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
    pub fn has_failed_tests(&self) -> bool {
        matches!(&self.report, Some(Ok(report)) if report.failed() > 0)
    }
}

impl Verdict {
    /// What is wrong in comparison with both baselines of two verdicts on the same runs.
    fn common_with(self, other: Self) -> Self {
        let run = self.problems.run.filter(|_| other.problems.run.is_some());
        let mut tests = self.problems.tests;
        tests.retain(|name, _| other.problems.tests.contains_key(name));
        let merged = |a: Vec<String>, b: Vec<String>| {
            let names: BTreeSet<String> = a.into_iter().chain(b).filter(|name| !tests.contains_key(name)).collect();
            names.into_iter().collect()
        };
        let known_failures: Vec<String> = merged(self.known_failures, other.known_failures);
        let mut flaky: Vec<String> = merged(self.flaky, other.flaky);
        flaky.retain(|name| known_failures.binary_search(name).is_err());
        let is_command_flaky = run.is_none() && (self.is_command_flaky || other.is_command_flaky);
        Self { problems: Problems { run, tests }, known_failures, flaky, is_command_flaky }
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
        Ok(Self { tests, failed_with: failed_with(&codes), exits_with_failures, is_repeated: usable.len() > 1 })
    }

    /// From the runs on the base commit of a check that declares no report.
    pub fn from_exit_codes(runs: &[CheckOutcome]) -> Self {
        let code = |run: &CheckOutcome| match run.end {
            CommandEnd::Exited(code) => code,
            CommandEnd::Signalled(_) | CommandEnd::LimitExceeded(_) | CommandEnd::Cancelled => 0,
        };
        let codes: Vec<i32> = runs.iter().map(code).collect();
        Self { failed_with: failed_with(&codes), is_repeated: runs.len() > 1, ..Self::default() }
    }

    /// Whether no test passes although there are some. Then the cause may be the machine, for example a missing package.
    pub fn passes_nothing(&self) -> bool {
        !self.tests.is_empty() && self.tests.values().all(|test| test.ran <= test.failed)
    }

    pub fn is_repeated(&self) -> bool {
        self.is_repeated
    }

    /// From the runs of a result that passed. `None` if they cannot be one.
    pub fn of_passed(has_report: bool, runs: &[CheckOutcome]) -> Option<Self> {
        match has_report {
            true => Self::from_reports(runs).ok().filter(|baseline| !baseline.passes_nothing()),
            false => Some(Self::from_exit_codes(runs)),
        }
    }

    /// Number of names of tests.
    pub fn count(&self) -> usize {
        self.tests.len()
    }

    /// Number of tests of this name that may fail. 0 if no test passes on the base commit at all.
    pub fn allowed_failures(&self, name: &str) -> u32 {
        match self.tests.get(name) {
            Some(test) if !self.passes_nothing() => test.failed,
            _ => 0,
        }
    }
}

impl BaselineTest {
    fn of(test: &TestResult) -> Self {
        Self { ran: test.ran(), failed: test.failed }
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

/// Judges a merge by its runs, in comparison with each side. If one side has a test that does not run in the merge and
/// that the other side does not have, then `ancestor` says who has changed this: the outcome on the commit from which
/// both come, if that is known.
///
/// # Errors
/// Those of `ancestor`.
pub(super) fn judge_merge<E>(
    sides: &[Arc<Baseline>],
    ancestor: impl FnOnce() -> Result<Option<Arc<Baseline>>, E>,
    first: &CheckOutcome,
    second: Option<&CheckOutcome>,
) -> Result<Verdict, E> {
    let verdicts: Vec<Verdict> = sides.iter().map(|side| judge(Some(side), first, second)).collect();
    let of_sides = verdicts.iter().flat_map(|verdict| &verdict.problems.tests);
    let mut not_run: BTreeMap<String, TestProblem> = of_sides
        .filter(|(_, problem)| matches!(problem, TestProblem::Missing | TestProblem::Skipped))
        .map(|(name, problem)| (name.clone(), problem.clone()))
        .collect();
    let mut common = verdicts.into_iter().reduce(Verdict::common_with).unwrap_or_else(|| judge(None, first, second));
    not_run.retain(|name, _| !common.problems.tests.contains_key(name));
    if !not_run.is_empty()
        && let Some(ancestor) = ancestor()?
    {
        // A test that the ancestor has too was removed by the other side.
        not_run.retain(|name, _| !ancestor.tests.contains_key(name));
        common.flaky.retain(|name| !not_run.contains_key(name));
        common.problems.tests.append(&mut not_run);
    }
    Ok(common)
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
        || (baseline.exits_with_failures && u32::try_from(code) == Ok(report.failed()));
    code == 0 || has_new_failure || (report.failed() > 0 && is_usual)
}

#[cfg(test)]
mod tests;
