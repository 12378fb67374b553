//! Findings about the checks of a project, as the creator gets them.

use std::collections::BTreeMap;

use cfq_edits::repo_path;
use cfq_proto::review::{CheckKind, Finding, LineCoverage, TestNames};
use cfq_proto::task::CoverageTarget;

use super::checks_file::ProjectCheck;
use super::coverage_report::{CoverageReport, LineCount};
use super::test_report::TestResult;
use super::verdict::{Baseline, CheckOutcome, RunProblem, TestProblem, Verdict};

/// Bytes of each output stream that a finding quotes: its end, where test runners print what failed.
const MAX_QUOTED_BYTES: usize = 2000;
/// Maximum number of findings about single failed tests of a check; the others are listed by name.
const MAX_TEST_FINDINGS: usize = 5;
/// Maximum number of names in a list.
const MAX_NAMES: usize = 20;
/// Maximum length of a name that is shown, in bytes.
const MAX_NAME_BYTES: usize = 200;

/// Limit of the texts of all findings about one result, which must fit into one message.
#[derive(Debug)]
pub(super) struct FindingBudget {
    remaining_bytes: usize,
}

impl Default for FindingBudget {
    fn default() -> Self {
        Self { remaining_bytes: 128 * 1024 }
    }
}

impl FindingBudget {
    /// Reduces a finding that exceeds the limit to its first line.
    pub fn limit(&mut self, mut finding: Finding) -> Finding {
        match self.remaining_bytes.checked_sub(finding.message.len()) {
            Some(remaining) => self.remaining_bytes = remaining,
            None => {
                let line = finding.message.lines().next().unwrap_or_default();
                finding.message = line[..line.floor_char_boundary(2 * MAX_NAME_BYTES)].to_owned();
            }
        }
        finding
    }
}

/// What a commit is compared with.
#[derive(Debug, Clone, Copy)]
pub(super) enum Comparison<'a> {
    /// The base commit, and the outcome there, if it is known.
    Base(Option<&'a Baseline>),
    /// The sides of a merge.
    Sides,
}

impl<'a> Comparison<'a> {
    fn baseline(self) -> Option<&'a Baseline> {
        match self {
            Self::Base(baseline) => baseline,
            Self::Sides => None,
        }
    }

    /// Introductions of lists of tests that are skipped and that did not run.
    fn not_run(self) -> [&'static str; 2] {
        match self {
            Self::Base(_) => [
                "are skipped, but run on the base commit; do not skip them",
                "did not run, but run on the base commit; restore them, or correct what stopped the run",
            ],
            Self::Sides => ["are skipped, but run on one side", "did not run, but run on one side"],
        }
    }
}

/// The findings of a verdict: about the run as a whole, about failed tests, and about tests that do not run. `runs` are
/// the runs on the commit that is judged.
pub(super) fn findings(
    check: &ProjectCheck,
    verdict: &Verdict,
    runs: &[CheckOutcome],
    comparison: Comparison<'_>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let problem = verdict.problems.run.as_ref();
    findings.extend(problem.map(|problem| about_run(check, problem, runs, comparison.baseline())));
    let (mut failed, mut skipped, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for (name, problem) in &verdict.problems.tests {
        match problem {
            TestProblem::Failed(test) if failed.len() < MAX_TEST_FINDINGS => {
                findings.push(about_failure(check, name, test, comparison));
                failed.push(name);
            }
            TestProblem::Failed(_) => failed.push(name),
            TestProblem::Skipped => skipped.push(name),
            TestProblem::Missing => missing.push(name),
        }
    }
    let more = failed.split_off(failed.len().min(MAX_TEST_FINDINGS));
    let [are_skipped, are_missing] = comparison.not_run();
    for (names, what) in [(more, "fail too"), (skipped, are_skipped), (missing, are_missing)] {
        if !names.is_empty() {
            let message = format!("tests of the check `{}` that {what}: {}", check.name, listed(names));
            findings.push(about_project(message));
        }
    }
    findings
}

/// What is wrong with the coverage that the task requires. Nothing if no report can say it.
pub(super) fn about_target(target: &CoverageTarget, reports: &[CoverageReport]) -> Option<Finding> {
    let CoverageTarget { percent, files } = target;
    // A file counts with the report that covers most of it.
    let mut counts: BTreeMap<&String, LineCount> = BTreeMap::new();
    let mut missing = Vec::new();
    if files.is_empty() {
        for (path, count) in reports.iter().flat_map(CoverageReport::files) {
            let known = counts.entry(path).or_default();
            *known = count.max(*known);
        }
    }
    for path in files {
        match reports.iter().filter_map(|report| report.of_file(path)).max() {
            Some(count) => drop(counts.insert(path, count)),
            None if reports.iter().any(|report| report.has_files_like(path)) => missing.push(path),
            None => {}
        }
    }
    if !missing.is_empty() {
        let names = listed(missing);
        let message = format!("no coverage report of the checks contains {names}: execute it in a test");
        return Some(about_project(format!("{message}; the task requires at least {percent} % of its lines")));
    }
    let of_them =
        if files.is_empty() { String::new() } else { format!(" of {}", listed(counts.keys().copied().collect())) };
    let count = counts.into_values().reduce(LineCount::plus).filter(|count| !count.reaches(*percent))?;
    let covered = LineCoverage::from(count);
    Some(about_project(format!("the tests cover {covered}{of_them}; the task requires at least {percent} %")))
}

fn about_project(message: String) -> Finding {
    Finding { check: CheckKind::Project, path: String::new(), line: 0, message }
}

/// The first names, as they can be shown, and the number of all.
pub(super) fn test_names<'a>(names: impl IntoIterator<Item = &'a String>) -> TestNames {
    let mut shown = TestNames::default();
    for name in names {
        shown.count = shown.count.saturating_add(1);
        if shown.names.len() < MAX_NAMES {
            shown.names.push(shown_name(name));
        }
    }
    shown
}

fn listed(names: Vec<&String>) -> String {
    test_names(names).to_string()
}

/// A name in one line of limited length. It is written by code that is not trusted.
fn shown_name(name: &str) -> String {
    let name: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match name.len() > MAX_NAME_BYTES {
        true => format!("{}...", &name[..name.floor_char_boundary(MAX_NAME_BYTES)]),
        false => name,
    }
}

fn about_failure(check: &ProjectCheck, name: &str, test: &TestResult, comparison: Comparison<'_>) -> Finding {
    let compared = match comparison {
        Comparison::Base(Some(baseline)) if baseline.passes_nothing() => {
            "no test passes on the base commit either, so no failure is a known one; a package may be missing"
                .to_owned()
        }
        Comparison::Base(Some(baseline)) if baseline.allowed_failures(name) > 0 => {
            format!("{} of this name fail, {} on the base commit", test.failed, baseline.allowed_failures(name))
        }
        Comparison::Base(_) => "it does not fail on the base commit".to_owned(),
        Comparison::Sides => "it does not fail on both sides".to_owned(),
    };
    let mut message = format!("the test `{}` of the check `{}` fails; {compared}", shown_name(name), check.name);
    let text = quoted(test.text.as_bytes());
    if !text.is_empty() {
        message.push_str(&format!(":\n{text}"));
    }
    let (path, line) = repo_path(&test.file).map_or_else(|_| (String::new(), 0), |path| (path, test.line));
    Finding { path, line, ..about_project(message) }
}

fn about_run(
    check: &ProjectCheck,
    problem: &RunProblem,
    runs: &[CheckOutcome],
    baseline: Option<&Baseline>,
) -> Finding {
    // The last run that did not succeed.
    let run = runs.iter().rev().find(|run| !run.end.is_success()).or(runs.last());
    let end = run.map(|run| run.end.to_string()).unwrap_or_default();
    let name = &check.name;
    match problem {
        RunProblem::CoverageReport(error) => {
            let report = check.coverage.as_deref().unwrap_or_default();
            return about_project(format!("the coverage report {report} of the check `{name}` {error} ({end})"));
        }
        RunProblem::TooFewCovered(count) => {
            let coverage = LineCoverage::from(*count);
            let required = check.min_coverage.unwrap_or_default();
            return about_project(format!(
                "the tests of the check `{name}` cover {coverage}, and at least {required} % are required; test what is \
                 not covered"
            ));
        }
        RunProblem::CommandFailed | RunProblem::Report(_) => {}
    }
    let mut message = match (problem, &check.report) {
        (RunProblem::Report(error), Some(report)) => {
            format!("the report {report} of the check `{name}` {error} ({end})")
        }
        (_, Some(_)) => {
            format!("the project's check `{name}` failed ({end}), and no failed test in its report explains this")
        }
        (_, None) => format!("the project's check `{name}` failed ({end})"),
    };
    if check.report.is_none() && baseline.is_some_and(|baseline| baseline.failed_with.is_some()) {
        message.push_str("; it also fails on the base commit");
    }
    if let Some(run) = run {
        message.push_str(&quoted_output(run));
    }
    about_project(message)
}

/// The ends of both outputs, with an introduction; empty if there is none.
pub(super) fn quoted_output(run: &CheckOutcome) -> String {
    let quote = |(name, output): (&str, &Vec<u8>)| {
        let text = quoted(output);
        if text.is_empty() { text } else { format!("; end of its {name}:\n{text}") }
    };
    ["stdout", "stderr"].into_iter().zip(&run.output).map(quote).collect()
}

/// The text without the control sequences of terminals (ECMA-48, CSI).
fn without_colours(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // Parameters and intermediate characters, then one final character.
        let end = part.find(|c| !matches!(c, ' '..='?'));
        let is_final = |c: char| matches!(c, '@'..='~');
        let rest = end.and_then(|end| part[end..].strip_prefix(is_final));
        plain.push_str(rest.unwrap_or(part));
    }
    plain
}

/// The end of an output, without control characters.
fn quoted(output: &[u8]) -> String {
    let tail = &output[output.len().saturating_sub(MAX_QUOTED_BYTES)..];
    let text = String::from_utf8_lossy(tail);
    let text: String = without_colours(&text).chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect();
    // The first line is cut if the output is longer.
    let text = match output.len() > MAX_QUOTED_BYTES {
        true => text.split_once('\n').map_or(text.as_str(), |(_, rest)| rest),
        false => text.as_str(),
    };
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use cfq_sandbox::CommandEnd;

    use super::*;

    #[test]
    fn colours_are_left_out() {
        assert_eq!(quoted(b"\x1b[1;31mERROR\x1b[0m a\x1b[K [0m\x07\x1b[5"), "ERROR a [0m5");
    }
    use crate::checks::project_checks;
    use crate::checks::test_report::{TestOutcome, TestReport};
    use crate::checks::verdict::judge;

    /// An import error of one file, as pytest reports it: no other test runs.
    #[test]
    fn cause_comes_before_the_tests_that_did_not_run() {
        let declared = "[[check]]\nname = \"tests\"\nrun = [\"x\"]\nreport = \"r.xml\"\n";
        let check = &project_checks(Some(declared)).unwrap().checks[0];
        let run = |tests: Vec<(String, TestResult)>| {
            let mut report = TestReport::default();
            tests.into_iter().for_each(|(name, test)| report.insert(name, test));
            let end = CommandEnd::Exited(if report.tests.contains_key("import") { 2 } else { 0 });
            CheckOutcome { end, report: Some(Ok(report)), coverage: None, output: Default::default() }
        };
        let passed = |n: u32| (format!("app::test_{n:02}"), TestResult::new(TestOutcome::Passed));
        let baseline = Baseline::from_reports(&[run((0..30).map(passed).collect())]).unwrap();
        let error = TestResult { text: "No module named 'y'".into(), ..TestResult::new(TestOutcome::Failed) };
        let result = run(vec![("import".into(), error)]);
        let verdict = judge(Some(&baseline), &result, None);
        let messages: Vec<String> = findings(check, &verdict, &[result], Comparison::Base(Some(&baseline)))
            .into_iter()
            .map(|finding| finding.message)
            .collect();
        let [cause, missing] = messages.as_slice() else { panic!("{messages:#?}") };
        assert!(
            cause.starts_with("the test `import` of the check `tests` fails") && cause.ends_with("No module named 'y'")
        );
        assert!(missing.contains("did not run") && missing.ends_with("app::test_19, and 10 more"), "{missing}");
    }

    #[test]
    fn coverage_of_the_task_is_that_of_its_files() {
        let report = |text: &str| CoverageReport::parse(text.as_bytes(), &[]).unwrap();
        let reports = [
            report("SF:a.py\nDA:1,1\nDA:2,0\nend_of_record\nSF:b.py\nDA:1,1\nend_of_record\n"),
            report("SF:web/c.js\nDA:1,1\nend_of_record\n"),
        ];
        let found = |percent: u8, files: &[&str]| {
            let files = files.iter().map(|path| (*path).to_owned()).collect();
            about_target(&CoverageTarget { percent, files }, &reports).map(|finding| finding.message)
        };
        assert_eq!(found(50, &["a.py"]), None);
        assert_eq!(found(66, &["a.py", "b.py", "README.md"]), None);
        assert_eq!(found(75, &[]), None);
        let few = "the tests cover 50.0 % of 2 lines of a.py; the task requires at least 51 %";
        assert_eq!(found(51, &["a.py"]).as_deref(), Some(few));
        assert_eq!(
            found(76, &[]).as_deref(),
            Some("the tests cover 75.0 % of 4 lines; the task requires at least 76 %")
        );
        let missing = "no coverage report of the checks contains d.py: execute it in a test";
        assert!(found(1, &["a.py", "d.py"]).unwrap().starts_with(missing));
        assert_eq!(found(1, &["d.rs"]), None, "no report is about this language");
        let none = CoverageTarget { percent: 1, files: vec!["a.py".to_owned()] };
        assert!(about_target(&none, &[]).is_none());
    }

    #[test]
    fn findings_beyond_the_limit_keep_their_first_line() {
        let mut budget = FindingBudget::default();
        let finding = || about_project(format!("{}\n{}", "é".repeat(300), "x".repeat(4_000)));
        let found: Vec<usize> = (0..500).map(|_| budget.limit(finding()).message.len()).collect();
        assert_eq!((found[0], found[499]), (4_601, 400));
        assert!(found.iter().sum::<usize>() < 400_000, "{}", found.iter().sum::<usize>());
    }

    #[test]
    fn names_are_shown_in_one_line_and_cut() {
        let names = test_names(&["a\n# Instructions".to_owned(), "x".repeat(900)]);
        assert_eq!((names.count, names.names[0].as_str(), names.names[1].len()), (2, "a # Instructions", 203));
    }

    #[test]
    fn finding_quotes_the_end_of_the_output() {
        let long: String = (0..1000).map(|n| format!("line {n}\n")).collect();
        let text = quoted(long.as_bytes());
        assert!(text.len() <= MAX_QUOTED_BYTES && text.starts_with("line ") && text.ends_with("line 999"), "{text}");
        assert_eq!(quoted(b"\x1b[31mred\x1b[0m\r\n\xff"), "red\n\u{fffd}");
    }
}
