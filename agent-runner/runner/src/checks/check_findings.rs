//! Findings about the checks of a project, as the creator gets them.

use cfq_edits::repo_path;
use cfq_proto::review::{CheckKind, Finding};

use super::checks_file::ProjectCheck;
use super::test_report::TestResult;
use super::verdict::{BaseTests, Problem, RunOutcome, Verdict};

/// Bytes of each output stream that a finding quotes: its end, where test runners print what failed.
const MAX_QUOTED_BYTES: usize = 2000;
/// Maximum number of findings about single tests of a check; the others are listed by name.
const MAX_TEST_FINDINGS: usize = 5;
/// Maximum number of names in a list.
pub(super) const MAX_NAMES: usize = 20;
/// Maximum length of a name in a list, in characters.
const MAX_NAME_CHARS: usize = 200;

/// The findings of a verdict. `runs` are the runs of the result, `base` the check's end on the base commit if it is known.
pub(super) fn findings(
    check: &ProjectCheck,
    verdict: &Verdict,
    runs: &[RunOutcome],
    base: Option<&BaseTests>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut others = Vec::new();
    for (name, problem) in &verdict.problems {
        match problem {
            Problem::Command | Problem::Report(_) => findings.insert(0, about_run(check, problem, runs, base)),
            _ if findings.len() >= MAX_TEST_FINDINGS => others.push(name.clone()),
            Problem::Failed(test) => findings.push(about_failure(check, name, test)),
            Problem::Missing => {
                findings.push(about_test(check, name, "is not run: the base commit has it, so restore it"))
            }
            Problem::Skipped => findings.push(about_test(check, name, "is skipped, and is run on the base commit")),
        }
    }
    if !others.is_empty() {
        let count = others.len();
        let message = format!(
            "{count} more tests of the check `{}` fail or are not run: {}",
            check.name,
            listed(others).join(", ")
        );
        findings.push(Finding { check: CheckKind::Project, path: String::new(), line: 0, message });
    }
    findings
}

/// The first names, each cut to a length that can be shown.
pub(super) fn listed(names: Vec<String>) -> Vec<String> {
    let cut = |name: String| match name.char_indices().nth(MAX_NAME_CHARS) {
        Some((at, _)) => format!("{}...", &name[..at]),
        None => name,
    };
    names.into_iter().take(MAX_NAMES).map(|name| cut(without_controls(&name))).collect()
}

fn about_failure(check: &ProjectCheck, name: &str, test: &TestResult) -> Finding {
    let mut finding = about_test(check, name, "fails, and does not fail on the base commit");
    let text = quoted(test.text.as_bytes());
    if !text.is_empty() {
        finding.message.push_str(&format!(":\n{text}"));
    }
    if let Ok(path) = repo_path(&test.file) {
        (finding.path, finding.line) = (path, test.line);
    }
    finding
}

fn about_test(check: &ProjectCheck, name: &str, what: &str) -> Finding {
    let name = listed(vec![name.to_owned()]).concat();
    let message = format!("the test `{name}` of the check `{}` {what}", check.name);
    Finding { check: CheckKind::Project, path: String::new(), line: 0, message }
}

fn about_run(check: &ProjectCheck, problem: &Problem, runs: &[RunOutcome], base: Option<&BaseTests>) -> Finding {
    // The last run that did not succeed.
    let run = runs.iter().rev().find(|run| !run.end.is_success()).or(runs.last());
    let end = run.map(|run| run.end.to_string()).unwrap_or_default();
    let name = &check.name;
    let mut message = match (problem, &check.report) {
        (Problem::Report(error), Some(report)) => format!("the report {report} of the check `{name}` {error} ({end})"),
        (_, Some(_)) => format!("the project's check `{name}` failed ({end}), and its report names no new failure"),
        (_, None) => format!("the project's check `{name}` failed ({end})"),
    };
    if check.report.is_none() && base.is_some_and(|base| base.failed_with.is_some()) {
        message.push_str("; it also fails on the base commit");
    }
    if let Some(run) = run {
        message.push_str(&quoted_output(run));
    }
    Finding { check: CheckKind::Project, path: String::new(), line: 0, message }
}

/// The ends of both outputs, with an introduction; empty if there is none.
pub(super) fn quoted_output(run: &RunOutcome) -> String {
    let quote = |(name, output): (&str, &Vec<u8>)| {
        let text = quoted(output);
        if text.is_empty() { text } else { format!("; end of its {name}:\n{text}") }
    };
    ["stdout", "stderr"].into_iter().zip(&run.output).map(quote).collect()
}

/// The end of an output, without control characters.
fn quoted(output: &[u8]) -> String {
    let tail = &output[output.len().saturating_sub(MAX_QUOTED_BYTES)..];
    let text = String::from_utf8_lossy(tail);
    let text = without_controls(&text);
    // The first line is cut if the output is longer.
    let text = match output.len() > MAX_QUOTED_BYTES {
        true => text.split_once('\n').map_or(text.as_str(), |(_, rest)| rest),
        false => text.as_str(),
    };
    text.trim().to_owned()
}

fn without_controls(text: &str) -> String {
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_quotes_the_end_of_the_output() {
        let long: String = (0..1000).map(|n| format!("line {n}\n")).collect();
        let text = quoted(long.as_bytes());
        assert!(text.len() <= MAX_QUOTED_BYTES && text.starts_with("line ") && text.ends_with("line 999"), "{text}");
        assert_eq!(quoted(b"\x1b[31mred\x1b[0m\r\n\xff"), "[31mred[0m\n\u{fffd}");
    }
}
