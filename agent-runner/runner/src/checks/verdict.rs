//! The verdict on a check: what is wrong in a result, compared with the base commit, and what only seemed so.
//!
//! With a report, tests are compared one by one. A test that fails in the result but did not on the base is a problem. One
//! that failed on the base too is a known failure. A test that the base ran must be in the result's report, and not be
//! skipped: otherwise a change could pass by removing it. Without a report, only the end of the command is compared.
//!
//! A check with problems is run a second time. Only problems of both runs count; the others are named as flaky.

use std::collections::{BTreeMap, BTreeSet};

use cfq_sandbox::CommandEnd;

use super::test_report::{ReportError, TestEnd, TestReport, TestResult};

/// One run of a check on a commit.
#[derive(Debug, Clone)]
pub(super) struct RunOutcome {
    pub end: CommandEnd,
    /// `None` if the check declares no report.
    pub report: Option<Result<TestReport, ReportError>>,
    /// Standard output and standard error.
    pub output: [Vec<u8>; 2],
}

/// What the base commit's report says, if the check declares one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BaseTests {
    /// How each test ended. A test that failed in one of two runs has passed.
    pub tests: BTreeMap<String, TestEnd>,
    /// The exit code, if the check failed in every run; with a report, only if a test did.
    pub failed_with: Option<i32>,
}

/// What is wrong in a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Problem {
    /// The command failed for another reason than the tests in its report.
    Command,
    /// There is no readable report.
    Report(ReportError),
    /// The test fails, and did not on the base commit.
    Failed(TestResult),
    /// The base commit has the test; the result does not run it.
    Missing,
    /// The test is skipped, and was not on the base commit.
    Skipped,
}

/// The problems of a run, by test; the empty name stands for the run as a whole.
type Problems = BTreeMap<String, Problem>;

/// The verdict on one check of a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Problems of every run.
    pub problems: Problems,
    /// Names of the tests that failed in the first run and on the base commit.
    pub known: Vec<String>,
    /// Names with a problem in only one of two runs.
    pub flaky: Vec<String>,
}

impl BaseTests {
    /// From the runs on the base commit: a second one was made if tests failed in the first.
    pub fn of(first: &RunOutcome, second: Option<&RunOutcome>) -> Result<Self, ReportError> {
        let report = |run: &RunOutcome| run.report.clone().unwrap_or(Err(ReportError::Missing));
        let first_report = report(first)?;
        let second_report = second.map(report).transpose()?;
        let tests = first_report.tests.iter().map(|(name, test)| {
            let is_flaky = second_report.as_ref().is_some_and(|second| second.end_of(name) != Some(TestEnd::Failed));
            let end = if test.end == TestEnd::Failed && is_flaky { TestEnd::Passed } else { test.end };
            (name.clone(), end)
        });
        let tests: BTreeMap<_, _> = tests.collect();
        let has_failed = tests.values().any(|end| *end == TestEnd::Failed);
        Ok(Self { tests, failed_with: failed_with(first, second).filter(|_| has_failed) })
    }

    /// From the runs on the base commit of a check that declares no report.
    pub fn without_report(first: &RunOutcome, second: Option<&RunOutcome>) -> Self {
        Self { tests: BTreeMap::new(), failed_with: failed_with(first, second) }
    }
}

/// The exit code, if every run failed and exited.
fn failed_with(first: &RunOutcome, second: Option<&RunOutcome>) -> Option<i32> {
    match (first.end, second.map_or(first.end, |second| second.end)) {
        (CommandEnd::Exited(code @ ..=-1 | code @ 1..), CommandEnd::Exited(..=-1 | 1..)) => Some(code),
        _ => None,
    }
}

/// True if a second run may tell a flaky test from a broken one. A run that exceeded a limit is not repeated: it would
/// take as long again.
pub(super) fn may_be_flaky(base: Option<&BaseTests>, run: &RunOutcome) -> bool {
    !matches!(run.end, CommandEnd::LimitExceeded(_) | CommandEnd::Cancelled) && !problems(base, run).is_empty()
}

/// Judges a result by its runs. `base` is absent if the check declares no report.
pub(super) fn judge(base: Option<&BaseTests>, first: &RunOutcome, second: Option<&RunOutcome>) -> Verdict {
    let known = known_failures(base, first);
    let of_first = problems(base, first);
    let Some(second) = second else { return Verdict { problems: of_first, known, flaky: Vec::new() } };
    let of_second = problems(base, second);
    let mut verdict = Verdict { known, ..Verdict::default() };
    let names: BTreeSet<&String> = of_first.keys().chain(of_second.keys()).collect();
    for name in names {
        let is_flaky = is_good(&of_first, first, name) || is_good(&of_second, second, name);
        match of_second.get(name).or_else(|| of_first.get(name)) {
            Some(problem) if !is_flaky => drop(verdict.problems.insert(name.clone(), problem.clone())),
            _ => verdict.flaky.push(name.clone()),
        }
    }
    verdict
}

/// True if the run shows that nothing is wrong with this test. A run that ended before the test shows nothing.
fn is_good(problems: &Problems, run: &RunOutcome, name: &str) -> bool {
    let has_run = match &run.report {
        _ if name.is_empty() => true,
        Some(Ok(report)) => report.end_of(name).is_some(),
        Some(Err(_)) | None => false,
    };
    has_run && !problems.contains_key(name)
}

fn known_failures(base: Option<&BaseTests>, run: &RunOutcome) -> Vec<String> {
    let (Some(base), Some(Ok(report))) = (base, &run.report) else { return Vec::new() };
    let failed_before = |name: &&str| base.tests.get(*name) == Some(&TestEnd::Failed);
    report.names(TestEnd::Failed).filter(failed_before).map(str::to_owned).collect()
}

fn problems(base: Option<&BaseTests>, run: &RunOutcome) -> Problems {
    let whole = |problem| Problems::from([(String::new(), problem)]);
    let (report, base) = match (&run.report, base) {
        (None, _) | (_, None) if run.end.is_success() => return Problems::new(),
        (None, _) | (_, None) => return whole(Problem::Command),
        (Some(Err(error)), _) => return whole(Problem::Report(error.clone())),
        (Some(Ok(report)), Some(base)) => (report, base),
    };
    let mut problems = Problems::new();
    for (name, test) in report.tests.iter().filter(|(_, test)| test.end == TestEnd::Failed) {
        if base.tests.get(name) != Some(&TestEnd::Failed) {
            problems.insert(name.clone(), Problem::Failed(test.clone()));
        }
    }
    for (name, _) in base.tests.iter().filter(|(_, end)| **end != TestEnd::Skipped) {
        match report.end_of(name) {
            None => drop(problems.insert(name.clone(), Problem::Missing)),
            Some(TestEnd::Skipped) => drop(problems.insert(name.clone(), Problem::Skipped)),
            Some(TestEnd::Passed | TestEnd::Failed) => {}
        }
    }
    let has_failed = problems.values().any(|problem| matches!(problem, Problem::Failed(_)));
    let is_explained = match run.end {
        CommandEnd::Exited(0) => true,
        CommandEnd::Exited(code) => {
            has_failed || (base.failed_with == Some(code) && report.names(TestEnd::Failed).next().is_some())
        }
        CommandEnd::Signalled(_) | CommandEnd::LimitExceeded(_) | CommandEnd::Cancelled => false,
    };
    if !is_explained {
        problems.insert(String::new(), Problem::Command);
    }
    problems
}

#[cfg(test)]
mod tests {
    use cfq_sandbox::ExceededLimit;

    use super::*;

    /// A run with these tests: `+` passed, `-` failed, `~` skipped.
    fn run(code: i32, tests: &str) -> RunOutcome {
        let mut report = TestReport::default();
        for test in tests.split_whitespace() {
            let (sign, name) = test.split_at(1);
            let end = match sign {
                "+" => TestEnd::Passed,
                "-" => TestEnd::Failed,
                _ => TestEnd::Skipped,
            };
            let result = TestResult { end, file: String::new(), line: 0, text: String::new() };
            report.tests.insert(name.to_owned(), result);
        }
        RunOutcome { end: CommandEnd::Exited(code), report: Some(Ok(report)), output: Default::default() }
    }

    fn with_end(end: CommandEnd, tests: &str) -> RunOutcome {
        RunOutcome { end, ..run(0, tests) }
    }

    fn without_report(code: i32) -> RunOutcome {
        RunOutcome { report: None, ..run(code, "") }
    }

    fn base(code: i32, tests: &str) -> BaseTests {
        BaseTests::of(&run(code, tests), (code != 0).then(|| run(code, tests)).as_ref()).unwrap()
    }

    /// The problems as text: `name:kind`, in order.
    fn text(verdict: &Verdict) -> String {
        let problems = verdict.problems.iter().map(|(name, problem)| {
            let kind = match problem {
                Problem::Command => "command",
                Problem::Report(_) => "report",
                Problem::Failed(_) => "failed",
                Problem::Missing => "missing",
                Problem::Skipped => "skipped",
            };
            format!("{name}:{kind}")
        });
        problems.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn tests_are_compared_with_those_of_the_base() {
        // Code and tests of the base, those of the result, the problems.
        for (before, after, expected) in [
            ((0, "+a +b"), (0, "+a +b +c"), ""),
            ((0, "+a"), (1, "-a"), "a:failed"),
            ((0, "+a"), (1, "+a -new"), "new:failed"),
            ((0, "+a +b"), (0, "+a"), "b:missing"),
            ((0, "+a +b"), (0, "+a ~b"), "b:skipped"),
            ((0, "+a +b"), (0, ""), "a:missing b:missing"),
            ((0, "+a ~b"), (0, "+a"), ""),
            ((0, "~a"), (1, "-a"), "a:failed"),
            ((1, "+a -b"), (1, "+a -b"), ""),
            ((1, "+a -b"), (0, "+a +b"), ""),
            ((1, "+a -b"), (0, "+a"), "b:missing"),
            ((1, "+a -b"), (0, "+a ~b"), "b:skipped"),
            ((1, "+a -b"), (1, "-a -b"), "a:failed"),
            // The exit code says more than the report.
            ((0, "+a"), (1, "+a"), ":command"),
            ((1, "+a -b"), (2, "+a -b"), ":command"),
            ((1, "+a -b"), (1, "+a +b"), ":command"),
            ((0, "+a"), (0, "-a"), "a:failed"),
        ] {
            let verdict = judge(Some(&base(before.0, before.1)), &run(after.0, after.1), None);
            assert_eq!(text(&verdict), expected, "{before:?} {after:?}");
        }
        let verdict = judge(Some(&base(1, "+a -b")), &run(1, "+a -b"), None);
        assert_eq!(verdict.known, ["b"]);
    }

    #[test]
    fn run_that_was_killed_does_not_pass() {
        let base = base(0, "+a");
        for end in [CommandEnd::Signalled(9), CommandEnd::LimitExceeded(ExceededLimit::Wall)] {
            assert_eq!(text(&judge(Some(&base), &with_end(end, "+a"), None)), ":command");
        }
        assert!(may_be_flaky(Some(&base), &with_end(CommandEnd::Signalled(9), "+a")));
        assert!(!may_be_flaky(Some(&base), &with_end(CommandEnd::LimitExceeded(ExceededLimit::Wall), "+a")));
    }

    #[test]
    fn missing_report_does_not_pass() {
        let run = RunOutcome { report: Some(Err(ReportError::Missing)), ..run(0, "") };
        assert_eq!(text(&judge(Some(&base(0, "+a")), &run, None)), ":report");
        assert_eq!(BaseTests::of(&run, None), Err(ReportError::Missing));
    }

    #[test]
    fn only_problems_of_both_runs_count() {
        let base = base(0, "+a +b +c");
        let verdict = judge(Some(&base), &run(1, "-a -b +c"), Some(&run(1, "-a +b -c")));
        assert_eq!((text(&verdict).as_str(), verdict.flaky), ("a:failed", vec!["b".to_owned(), "c".to_owned()]));
        let verdict = judge(Some(&base), &run(1, "-a +b +c"), Some(&run(0, "+a +b +c")));
        assert_eq!((text(&verdict).as_str(), verdict.flaky), ("", vec!["a".to_owned()]));
        // A second run that says less proves nothing about what was missing.
        let verdict = judge(Some(&base), &run(0, "+a +b"), Some(&run(0, "+a +b")));
        assert_eq!(text(&verdict), "c:missing");
    }

    #[test]
    fn run_that_ended_before_a_test_does_not_make_the_test_flaky() {
        let base = base(0, "+a +b");
        let crashed = RunOutcome { report: Some(Err(ReportError::Missing)), ..with_end(CommandEnd::Signalled(11), "") };
        let verdict = judge(Some(&base), &crashed, Some(&run(1, "-a +b")));
        assert_eq!((text(&verdict).as_str(), verdict.flaky), ("a:failed", vec![String::new()]));
        let verdict = judge(Some(&base), &run(1, "-a +b"), Some(&crashed));
        assert_eq!((text(&verdict).as_str(), verdict.flaky), ("a:failed", vec![String::new()]));
    }

    #[test]
    fn test_that_fails_on_the_base_only_sometimes_is_no_known_failure() {
        let base = BaseTests::of(&run(1, "-a -b"), Some(&run(1, "+a -b"))).unwrap();
        assert_eq!(base.tests["a"], TestEnd::Passed);
        assert_eq!(text(&judge(Some(&base), &run(1, "-a -b"), None)), "a:failed");
    }

    #[test]
    fn without_a_report_the_exit_code_decides() {
        assert_eq!(text(&judge(None, &without_report(0), None)), "");
        assert_eq!(text(&judge(None, &without_report(1), None)), ":command");
        let verdict = judge(None, &without_report(1), Some(&without_report(0)));
        assert_eq!((text(&verdict).as_str(), verdict.flaky), ("", vec![String::new()]));
    }
}
