//! A run of a check without a task and without a comparison, so that a user can try it.

use std::sync::atomic::AtomicBool;

use cfq_proto::review::{LineCoverage, TestNames};

use super::DeclaredChecks;
use super::check_findings::{quoted_output, test_names};
use super::check_run_error::CheckRunError;
use super::checks_file::ProjectCheck;
use super::project::CheckRunner;
use super::test_report::ReportError;
use super::verdict::coverage_problem;
use crate::workstream::Mirror;

/// How a check ended on a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SingleRun {
    /// Whether the program succeeded, no test failed, and the coverage is sufficient.
    pub passed: bool,
    /// How the program ended.
    pub end: String,
    /// Kind of the sandbox.
    pub sandbox: String,
    /// Elapsed time, in ms.
    pub ms: u64,
    /// The report, or what is wrong with it; `None` if the check declares none.
    pub report: Option<Result<ReportSummary, String>>,
    /// The covered lines in the coverage report, or what is wrong with it; `None` if the check declares none.
    pub coverage: Option<Result<LineCoverage, String>>,
    /// The ends of its outputs, with an introduction; empty if there is none.
    pub output: String,
}

/// What a report contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportSummary {
    /// Number of tests.
    pub count: u32,
    /// Those that failed.
    pub failed: TestNames,
}

impl CheckRunner {
    /// Runs a check of `declared` once on a commit, after the preparations. `name` is a name for the folder of the
    /// checkout that no other process uses. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError`], if the check was not run to its end.
    pub fn run_single(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        check: &ProjectCheck,
        commit: &str,
        mirror: &Mirror,
        cancelled: &AtomicBool,
    ) -> Result<SingleRun, CheckRunError> {
        let context = self.prepare_context(name, declared, Some(commit), mirror, cancelled)?;
        let (outcome, wall) = self.run_once(&context, check, commit, "the commit")?;
        let report = outcome.report.as_ref().map(|report| match report {
            Ok(report) if report.count() == 0 => Err(ReportError::NoTests.to_string()),
            Ok(report) => {
                let failed = report.tests.iter().filter(|(_, test)| test.failed > 0).map(|(name, _)| name);
                Ok(ReportSummary { count: report.count(), failed: test_names(failed) })
            }
            Err(error) => Err(error.to_string()),
        });
        let has_coverage = coverage_problem(&outcome, check.min_coverage.unwrap_or(0)).is_none();
        let coverage = outcome.coverage.as_ref().map(|coverage| match coverage {
            Ok(report) => Ok(report.total().into()),
            Err(error) => Err(error.to_string()),
        });
        Ok(SingleRun {
            passed: outcome.is_clean() && has_coverage,
            end: outcome.end.to_string(),
            sandbox: context.level.as_str().to_owned(),
            ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
            report,
            coverage,
            output: quoted_output(&outcome),
        })
    }
}
