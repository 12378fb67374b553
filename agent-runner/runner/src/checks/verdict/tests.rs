use cfq_sandbox::ExceededLimit;

use super::*;
use crate::checks::test_report::TestOutcome;

/// A run with these tests: `+` passed, `-` failed, `~` skipped. A name may occur several times.
fn run(code: i32, tests: &str) -> CheckOutcome {
    let mut report = TestReport::default();
    for test in tests.split_whitespace() {
        let (sign, name) = test.split_at(1);
        let outcome = match sign {
            "+" => TestOutcome::Passed,
            "-" => TestOutcome::Failed,
            _ => TestOutcome::Skipped,
        };
        report.insert(name.to_owned(), TestResult::new(outcome));
    }
    CheckOutcome { end: CommandEnd::Exited(code), report: Some(Ok(report)), coverage: None, output: Default::default() }
}

fn with_end(end: CommandEnd, tests: &str) -> CheckOutcome {
    CheckOutcome { end, ..run(0, tests) }
}

fn without_report(code: i32) -> CheckOutcome {
    CheckOutcome { report: None, ..run(code, "") }
}

fn crashed() -> CheckOutcome {
    CheckOutcome { report: Some(Err(ReportError::Missing)), ..with_end(CommandEnd::Signalled(11), "") }
}

fn timed_out(tests: &str) -> CheckOutcome {
    with_end(CommandEnd::LimitExceeded(ExceededLimit::Wall), tests)
}

fn base(code: i32, tests: &str) -> Baseline {
    let runs = if code == 0 { vec![run(code, tests)] } else { vec![run(code, tests), run(code, tests)] };
    Baseline::from_reports(&runs).unwrap()
}

/// The problems as text: `command`, `report`, and `name:kind`, in order.
fn text(verdict: &Verdict) -> String {
    let of_run = verdict.problems.run.iter().map(|problem| match problem {
        RunProblem::CommandFailed => "command".to_owned(),
        RunProblem::Report(_) => "report".to_owned(),
        RunProblem::CoverageReport(_) | RunProblem::TooFewCovered(_) => "coverage".to_owned(),
    });
    let of_tests = verdict.problems.tests.iter().map(|(name, problem)| {
        let kind = match problem {
            TestProblem::Failed(_) => "failed",
            TestProblem::Missing => "missing",
            TestProblem::Skipped => "skipped",
        };
        format!("{name}:{kind}")
    });
    of_run.chain(of_tests).collect::<Vec<_>>().join(" ")
}

#[test]
fn tests_are_compared_with_those_of_the_base() {
    // Exit code and tests of the base, those of the result, the problems.
    for (before, after, expected) in [
        ((0, "+a +b"), (0, "+a +b +c"), ""),
        ((0, "+a"), (1, "-a"), "a:failed"),
        ((0, "+a"), (1, "+a -new"), "new:failed"),
        ((0, "+a +b"), (0, "+a"), "b:missing"),
        ((0, "+a +b"), (0, "+a ~b"), "b:skipped"),
        ((0, "+a +b"), (0, ""), "a:missing b:missing"),
        ((0, "+a ~b"), (0, "+a"), ""),
        ((0, "+a ~b"), (1, "+a -b"), "b:failed"),
        ((1, "+a -b"), (1, "+a -b"), ""),
        ((1, "+a -b"), (0, "+a +b"), ""),
        ((1, "+a -b"), (0, "+a"), "b:missing"),
        ((1, "+a -b"), (0, "+a ~b"), "b:skipped"),
        ((1, "+a -b"), (1, "-a -b"), "a:failed"),
        // Several tests of one name.
        ((0, "+a +a"), (0, "+a"), "a:missing"),
        ((0, "+a +a"), (0, "+a +a +a"), ""),
        ((1, "-a +a +b"), (1, "-a +a +b"), ""),
        ((1, "-a +a +b"), (1, "-a -a +b"), "a:failed"),
        // The exit code says more than the report.
        ((0, "+a"), (1, "+a"), "command"),
        ((1, "+a -b"), (2, "+a -b"), "command"),
        ((1, "+a -b"), (1, "+a +b"), "command"),
        ((0, "+a"), (0, "-a"), "a:failed"),
        // An exit code that is the number of failed tests.
        ((3, "-a -b -c +d"), (2, "+a -b -c +d"), ""),
        ((3, "-a -b -c +d"), (5, "+a -b -c +d"), "command"),
        ((0, "-a +b"), (0, "-a +b"), ""),
        ((0, "-a +b"), (1, "-a +b"), "command"),
        ((1, "-a +b"), (1, "-a +b"), ""),
        // Of two tests of one name, one is skipped.
        ((0, "+a ~a +b"), (0, "+b"), "a:missing"),
        ((0, "+a ~a +b"), (0, "~a ~a +b"), "a:skipped"),
        ((0, "+a ~a +b"), (0, "+a ~a +b"), ""),
    ] {
        let verdict = judge(Some(&base(before.0, before.1)), &run(after.0, after.1), None);
        assert_eq!(text(&verdict), expected, "{before:?} {after:?}");
    }
    let verdict = judge(Some(&base(1, "+a -b")), &run(1, "+a -b"), None);
    assert_eq!(verdict.known_failures, ["b"]);
}

#[test]
fn failures_are_no_known_ones_if_no_test_passes_on_the_base() {
    // As when a package is missing: the only test in the report is that the tests cannot be imported.
    let base = base(2, "-import");
    assert!(base.passes_nothing());
    assert_eq!(text(&judge(Some(&base), &run(2, "-import"), None)), "import:failed");
    assert_eq!(text(&judge(Some(&base), &run(0, "+import"), None)), "");
    // The same with names that differ from run to run.
    let base = Baseline::from_reports(&[run(2, "-import1"), run(2, "-import2")]).unwrap();
    assert!(base.passes_nothing());
    assert_eq!(text(&judge(Some(&base), &run(2, "-import1"), None)), "import1:failed");
}

#[test]
fn run_that_was_killed_does_not_pass() {
    let base = base(0, "+a");
    for end in [CommandEnd::Signalled(9), CommandEnd::LimitExceeded(ExceededLimit::Wall)] {
        assert_eq!(text(&judge(Some(&base), &with_end(end, "+a"), None)), "command");
    }
    assert!(is_repeatable(CommandEnd::Signalled(9)) && is_repeatable(CommandEnd::Exited(1)));
    assert!(!is_repeatable(CommandEnd::LimitExceeded(ExceededLimit::Wall)));
}

#[test]
fn base_needs_a_run_that_exited_with_a_report() {
    assert_eq!(Baseline::from_reports(&[timed_out("+a")]), Err(ReportError::Incomplete));
    assert_eq!(Baseline::from_reports(&[crashed(), crashed()]), Err(ReportError::Missing));
    // The first one ended early, so it says nothing about b.
    let base = Baseline::from_reports(&[with_end(CommandEnd::Signalled(11), "+a"), run(0, "+a +b")]).unwrap();
    assert_eq!(text(&judge(Some(&base), &run(0, "+a"), None)), "b:missing");
    assert_eq!(Baseline::from_reports(&[run(0, "")]), Err(ReportError::NoTests));
    // The second one was killed, so it says nothing about the failures of the first.
    let base = Baseline::from_reports(&[run(2, "-a -b +c"), timed_out("-a")]).unwrap();
    assert_eq!(text(&judge(Some(&base), &run(2, "-a -b +c"), None)), "");
    assert!(!base.is_repeated());
}

#[test]
fn missing_report_does_not_pass() {
    let run = CheckOutcome { report: Some(Err(ReportError::Missing)), ..run(0, "") };
    assert_eq!(text(&judge(Some(&base(0, "+a")), &run, None)), "report");
}

#[test]
fn check_passes_if_one_of_two_runs_has_no_problem() {
    let base = base(0, "+a +b +c");
    let verdict = judge(Some(&base), &run(1, "-a +b +c"), Some(&run(0, "+a +b +c")));
    assert_eq!((text(&verdict).as_str(), verdict.flaky), ("", vec!["a".to_owned()]));
    let verdict = judge(Some(&base), &crashed(), Some(&run(0, "+a +b +c")));
    assert_eq!((text(&verdict).as_str(), verdict.flaky.len(), verdict.is_command_flaky), ("", 0, true));
    let verdict = judge(Some(&base), &run(1, "-a -b +c"), Some(&run(1, "-a +b -c")));
    assert_eq!((text(&verdict).as_str(), verdict.flaky), ("a:failed", vec!["b".to_owned(), "c".to_owned()]));
    assert_eq!(text(&judge(Some(&base), &run(0, "+a +b"), Some(&run(0, "+a +b")))), "c:missing");
}

#[test]
fn two_runs_that_fail_differently_do_not_pass() {
    let base = base(0, "+a +b");
    for (second, expected) in [
        (timed_out("+a +b"), "command"),
        (with_end(CommandEnd::Signalled(11), "+a +b"), "command"),
        (run(1, "+a +b"), "command"),
        (run(1, "+a -b"), "b:failed"),
        (crashed(), "a:failed"),
    ] {
        let verdict = judge(Some(&base), &run(1, "-a +b"), Some(&second));
        assert_eq!(text(&verdict), expected, "{second:?}");
    }
    // A run that ended before a test does not make the test flaky.
    let verdict = judge(Some(&base), &crashed(), Some(&run(1, "-a +b")));
    assert_eq!((text(&verdict).as_str(), verdict.flaky.len(), verdict.is_command_flaky), ("a:failed", 0, true));
}

#[test]
fn known_failures_of_both_runs_are_named() {
    let base = base(1, "-a +b");
    let verdict = judge(Some(&base), &crashed(), Some(&run(1, "-a +b")));
    assert_eq!((text(&verdict).as_str(), verdict.known_failures), ("", vec!["a".to_owned()]));
}

#[test]
fn test_that_fails_on_the_base_only_sometimes_is_no_known_failure() {
    let base = Baseline::from_reports(&[run(1, "-a -b -c +d"), run(1, "+a -b ~c +d")]).unwrap();
    assert_eq!(text(&judge(Some(&base), &run(1, "-a -b -c +d"), None)), "a:failed");
    // A name that only one run has is not required.
    let base = Baseline::from_reports(&[run(1, "-a +b +x1"), run(1, "-a +b +x2")]).unwrap();
    assert_eq!(text(&judge(Some(&base), &run(1, "-a +b +x3"), None)), "");
    let base = Baseline::from_reports(&[run(2, "-import"), run(0, "+a +b")]).unwrap();
    assert_eq!(text(&judge(Some(&base), &run(0, "+a +b"), None)), "", "an error that occurred once is not required");
}

#[test]
fn without_a_report_the_exit_code_decides() {
    assert_eq!(text(&judge(None, &without_report(0), None)), "");
    assert_eq!(text(&judge(None, &without_report(1), None)), "command");
    let verdict = judge(None, &without_report(1), Some(&without_report(0)));
    assert_eq!((text(&verdict).as_str(), verdict.is_command_flaky), ("", true));
    assert_eq!(Baseline::from_exit_codes(&[without_report(1), without_report(2)]).failed_with, Some(2));
    assert_eq!(Baseline::from_exit_codes(&[without_report(1), without_report(0)]).failed_with, None);
}

#[test]
fn merge_is_compared_with_both_sides_and_the_merge_base() {
    // Tests of the merge base, of `main`, of the result and of the merge, and the problems.
    for (merge_base, main, result, merge, expected) in [
        ("+a", "+a +b", "+a +c", "+a +b +c", ""),
        ("+a", "+a +b", "+a +c", "+a -b +c", "b:failed"),
        ("+a", "+a +b", "+a +c", "-a +b +c", "a:failed"),
        ("+a", "+a +b", "+a +c", "+a +b +c -new", "new:failed"),
        ("+a", "+a +b", "+a +c", "+b +c", "a:missing"),
        // Only one side has the test.
        ("+a", "+a +b", "+a", "+a", "b:missing"),
        ("+a", "+a +b", "+a", "+a ~b", "b:skipped"),
        ("+a", "+a", "+a +b", "+a", "b:missing"),
        // One side has removed the test.
        ("+a +b", "+a +b", "+a", "+a", ""),
        ("+a +b", "+a", "+a +b", "+a", ""),
        // One side has broken the test, or brought it broken.
        ("+a +b", "+a -b", "+a +b", "+a -b", ""),
        ("+a +b", "+a +b", "+a -b", "+a -b", ""),
        ("+a", "+a -b", "+a -c", "+a -b -c", ""),
        ("+a", "+a -b", "+a -c", "-a -b -c", "a:failed"),
        ("+a", "-a", "+a", "-a", ""),
        // One side has repaired the test.
        ("+a -b", "+a -b", "+a +b", "+a -b", "b:failed"),
        ("+a -b", "+a +b", "+a -b", "+a -b", "b:failed"),
        ("-a -b", "+a -b", "-a +b", "-a -b", "a:failed b:failed"),
        ("+c -a -b", "+c -a -b", "+c +a +b", "+c -a +b", "a:failed"),
        // Both sides fail.
        ("+a -b", "+a -b", "+a -b", "+a -b", ""),
    ] {
        let code = |tests: &str| i32::from(tests.contains('-'));
        let of = |tests: &str| base(code(tests), tests);
        let run = run(code(merge), merge);
        let sides = [of(main), of(result)];
        let baseline = Baseline::of_merge(&sides[0], &sides[1], Some(&of(merge_base)), false);
        let verdict = judge(Some(&baseline), &run, Some(&run));
        assert_eq!(text(&verdict), expected, "{merge_base} {main} {result} {merge}");
        assert!(verdict.flaky.is_empty(), "{merge}: {:?}", verdict.flaky);
        let lenient = Baseline::of_merge(&sides[0], &sides[1], None, false);
        assert!(text(&judge(Some(&lenient), &run, None)).len() <= expected.len(), "{merge}: without a merge base");
    }
}

#[test]
fn result_that_passed_explains_no_failure_of_its_own() {
    let (merge_base, main) = (base(0, "+a"), base(0, "+a"));
    // The new test passed where the result was checked, and fails with what the merge installs.
    let result = base(1, "+a -new");
    for merge_base in [Some(&merge_base), None] {
        let failed = |has_passed| {
            let baseline = Baseline::of_merge(&main, &result, merge_base, has_passed);
            text(&judge(Some(&baseline), &run(1, "+a -new"), None))
        };
        assert_eq!((failed(true).as_str(), failed(false).as_str()), ("new:failed", ""));
    }
    let strict = Baseline::of_merge(&main, &result, Some(&merge_base), false).without_failures();
    assert_eq!(text(&judge(Some(&strict), &run(1, "+a -new"), None)), "new:failed");
    assert_eq!(text(&judge(Some(&strict), &run(0, "+a"), None)), "new:missing");
}

#[test]
fn flaky_merge_passes_and_known_failures_of_both_sides_are_named() {
    let baseline = Baseline::of_merge(&base(1, "+a -b"), &base(1, "+a -c"), Some(&base(0, "+a")), false);
    let judged = |first: &CheckOutcome, second: &CheckOutcome| judge(Some(&baseline), first, Some(second));
    let verdict = judged(&run(1, "-a -b -c"), &run(1, "+a -b -c"));
    assert_eq!(text(&verdict), "");
    assert_eq!((verdict.known_failures, verdict.flaky), (vec!["b".to_owned(), "c".to_owned()], vec!["a".to_owned()]));
    assert_eq!(text(&judged(&crashed(), &crashed())), "report");
    // The command fails for another reason than its tests.
    assert_eq!(text(&judged(&run(3, "+a -b -c"), &run(3, "+a -b -c"))), "command");
}

#[test]
fn commands_that_failed_for_any_reason_are_known() {
    let ended = |end: CommandEnd| CheckOutcome { report: None, ..with_end(end, "") };
    let hung = || ended(CommandEnd::LimitExceeded(ExceededLimit::Wall));
    for (runs, expected) in [
        (vec![without_report(0)], false),
        (vec![without_report(1), without_report(0)], false),
        (vec![without_report(1), without_report(2)], true),
        (vec![hung()], true),
        (vec![ended(CommandEnd::Signalled(11)), ended(CommandEnd::Signalled(11))], true),
    ] {
        assert_eq!(Baseline::from_exit_codes(&runs).has_failed, expected, "{runs:?}");
    }
}

#[test]
fn coverage_is_a_problem_if_it_is_too_low_or_not_known() {
    let covering = |coverage| CheckOutcome { coverage: Some(coverage), ..run(0, "+a") };
    let covered = |covered| {
        let lines: String = (0..10).map(|line| format!("DA:{line},{}\n", u8::from(line < covered))).collect();
        covering(CoverageReport::parse(format!("SF:a\n{lines}end_of_record\n").as_bytes(), &[]))
    };
    assert_eq!(coverage_problem(&run(0, "+a"), 80), None, "without a coverage report");
    assert_eq!(coverage_problem(&covered(8), 80), None);
    let few = RunProblem::TooFewCovered(LineCount { covered: 7, total: 10 });
    assert_eq!(coverage_problem(&covered(7), 80), Some(few));
    let missing = RunProblem::CoverageReport(ReportError::Missing);
    assert_eq!(coverage_problem(&covering(Err(ReportError::Missing)), 0), Some(missing));
}
