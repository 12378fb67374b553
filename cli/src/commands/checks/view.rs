//! What `cfq checks` prints about preparations and checks: as JSON, and as text.

use std::path::{Path, PathBuf};

use cfq_agent_runner::checks::{Preparation, ProjectCheck, SingleRun};
use cfq_proto::review::{CheckRun, Finding, LineCoverage};
use schemars::JsonSchema;
use serde::Serialize;

use crate::output;

#[derive(Serialize, JsonSchema)]
pub struct PreparationView<'a> {
    pub(super) kind: &'static str,
    pub(super) name: &'a str,
    pub(super) run: &'a [String],
    pub(super) timeout_s: u64,
    pub(super) lock_files: &'a [String],
    pub(super) keep: Vec<String>,
}

/// The file that declares the checks, as written or proposed.
#[derive(Serialize, JsonSchema)]
pub struct ChecksFileView {
    pub(super) path: PathBuf,
    pub(super) content: String,
}

/// A preparation that ran.
#[derive(Serialize, JsonSchema)]
pub struct PreparedView<'a> {
    pub(super) kind: &'static str,
    pub(super) name: &'a str,
    pub(super) ms: u64,
    pub(super) path: &'a Path,
    pub(super) problems: &'a [String],
}

/// `kind` of preparations in JSON. Checks have none.
pub(super) const PREPARATION: &str = "preparation";

#[derive(Serialize, JsonSchema)]
pub struct DeclaredView<'a> {
    pub(super) name: &'a str,
    pub(super) run: &'a [String],
    pub(super) timeout_s: u64,
    pub(super) report: Option<&'a str>,
    pub(super) coverage: Option<&'a str>,
    pub(super) min_coverage: Option<u8>,
}

/// A check that was run without a comparison.
#[derive(Serialize, JsonSchema)]
pub struct SingleRunView<'a> {
    pub(super) commit: &'a str,
    pub(super) name: &'a str,
    pub(super) passed: bool,
    pub(super) end: &'a str,
    pub(super) sandbox: &'a str,
    pub(super) ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tests: Option<u32>,
    pub(super) failed: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) report_problem: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) coverage: Option<LineCoverage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) coverage_problem: Option<&'a str>,
    pub(super) output: &'a str,
}

/// A check that did not run.
#[derive(Serialize, JsonSchema)]
pub struct NotRunView<'a> {
    pub(super) commit: &'a str,
    pub(super) name: &'a str,
    pub(super) passed: bool,
    pub(super) problem: &'a str,
}

/// A check that was compared with another commit.
#[derive(Serialize, JsonSchema)]
pub struct ComparedView<'a> {
    pub(super) commit: &'a str,
    pub(super) base: &'a str,
    #[serde(flatten)]
    pub(super) run: &'a CheckRun,
    pub(super) findings: &'a [Finding],
}

pub(super) fn preparation_view(preparation: &Preparation) -> PreparationView<'_> {
    PreparationView {
        kind: PREPARATION,
        name: &preparation.name,
        run: &preparation.run,
        timeout_s: preparation.timeout().as_secs(),
        lock_files: &preparation.lock_files,
        keep: preparation.keep.iter().map(ToString::to_string).collect(),
    }
}

pub(super) fn describe_preparation(preparation: &Preparation) -> String {
    let PreparationView { name, run, timeout_s, lock_files, keep, .. } = preparation_view(preparation);
    let words: Vec<_> = run.iter().map(|word| output::shell_word(word).to_string()).collect();
    output::sanitize(&format!(
        "prepare {name}: {} (at most {timeout_s} s, once for each content of {}; keeps {})",
        words.join(" "),
        lock_files.join(", "),
        keep.join(", ")
    ))
}

pub(super) fn describe(check: &ProjectCheck) -> String {
    let words: Vec<_> = check.run.iter().map(|word| output::shell_word(word).to_string()).collect();
    let report = check.report.as_ref().map_or_else(String::new, |report| format!(", report {report}"));
    let coverage = check.coverage.as_ref().map_or_else(String::new, |report| format!(", coverage {report}"));
    let percent = check.min_coverage.map_or_else(String::new, |percent| format!(", at least {percent} %"));
    let time = check.timeout().as_secs();
    let text = format!("{}: {} (at most {time} s{report}{coverage}{percent})", check.name, words.join(" "));
    output::sanitize(&text)
}

pub(super) fn single_view<'a>(commit: &'a str, check: &'a ProjectCheck, run: &'a SingleRun) -> SingleRunView<'a> {
    let report = run.report.as_ref().and_then(|report| report.as_ref().ok());
    SingleRunView {
        commit,
        name: &check.name,
        passed: run.passed,
        end: &run.end,
        sandbox: &run.sandbox,
        ms: run.ms,
        tests: report.map(|report| report.count),
        failed: report.map(|report| report.failed.names.as_slice()).unwrap_or_default(),
        report_problem: run.report.as_ref().and_then(|report| report.as_ref().err()).map(String::as_str),
        coverage: run.coverage.as_ref().and_then(|coverage| coverage.as_ref().ok()).copied(),
        coverage_problem: run.coverage.as_ref().and_then(|coverage| coverage.as_ref().err()).map(String::as_str),
        output: &run.output,
    }
}

pub(super) fn single(check: &ProjectCheck, run: &SingleRun) -> String {
    let seconds = run.ms as f64 / 1000.0;
    let end = if run.passed { "passed".to_owned() } else { format!("failed ({})", run.end) };
    let mut text = format!("{} {end} in {seconds:.1} s ({}", check.name, run.sandbox);
    if let Some(Ok(report)) = &run.report {
        text.push_str(&format!(", {}", output::count(report.count as usize, "test")));
    }
    if let Some(Ok(coverage)) = &run.coverage {
        text.push_str(&format!(", covers {coverage}"));
    }
    text.push(')');
    if let (Some(Ok(_)), Some(percent)) = (&run.coverage, check.min_coverage) {
        text.push_str(&format!("; at least {percent} % are required"));
    }
    if let Some(Err(problem)) = &run.coverage {
        text.push_str(&format!("; its coverage report {} {problem}", check.coverage.as_deref().unwrap_or_default()));
    }
    match &run.report {
        Some(Err(problem)) => {
            text.push_str(&format!("; its report {} {problem}", check.report.as_deref().unwrap_or_default()));
        }
        Some(Ok(report)) if !report.failed.is_empty() => {
            text.push_str(&format!("; failed: {}", report.failed));
            text.push_str(
                "\n(tests that fail on a task's base commit are known failures there: a result may fail them)",
            );
        }
        Some(Ok(_)) | None => {}
    }
    if !run.passed {
        text.push_str(run.output.strip_prefix("; ").map(|rest| format!("\n{rest}")).unwrap_or_default().as_str());
    }
    output::sanitize(&text)
}

pub(super) fn compared(run: &CheckRun, findings: &[Finding]) -> String {
    let found = findings.iter().map(|finding| format!("\n{}", output::sanitize(&finding.to_string())));
    [output::check_run(run)].into_iter().chain(found).collect()
}

pub(super) fn view(check: &ProjectCheck) -> DeclaredView<'_> {
    DeclaredView {
        name: &check.name,
        run: &check.run,
        timeout_s: check.timeout().as_secs(),
        report: check.report.as_deref(),
        coverage: check.coverage.as_deref(),
        min_coverage: check.min_coverage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_checks_fit_the_terminal() {
        let check: ProjectCheck = serde_json::from_value(serde_json::json!({
            "name": "tests", "run": ["python3", "-m", "pytest", "--junitxml=report.xml", "tests of readers"],
            "timeout_s": 120, "report": "report.xml",
        }))
        .unwrap();
        let preparation: Preparation = serde_json::from_value(serde_json::json!({
            "name": "packages", "run": ["npm", "ci", "--ignore-scripts"], "lock_files": ["package-lock.json"],
            "keep": ["node_modules/"],
        }))
        .unwrap();
        let text = format!("{}\n{}", describe_preparation(&preparation), describe(&check));
        insta::assert_snapshot!("view_checks_show", output::at_widths(|_| output::plain_lines(&text)));
    }
}
