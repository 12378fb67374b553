//! Checks of a change. Built-in static ones, which execute nothing: syntax, and dangerous additions (L8). And those that
//! the project declares, which run in a sandbox (see `project`).
//!
//! The static checks compare with the base commit: a syntax error is not reported if the file had one in the base, and a
//! danger is not reported if the base has it.

mod activity;
mod baseline_cache;
mod baseline_run;
mod check_findings;
mod check_run_error;
mod checkout;
mod checks_file;
mod config;
mod coverage_report;
mod dangerous;
mod environment;
mod kept_checkouts;
mod language;
mod limits;
mod merge_run;
mod package_manager_variables;
mod preparation;
mod prepared_environment;
mod prepared_store;
mod project;
mod registry_proxy;
mod report_file;
mod single_run;
mod syntax;
mod test_integrity;
mod test_report;
mod verdict;

pub use check_run_error::CheckRunError;
pub use checks_file::{CHECKS_FILE_PATH, ProjectCheck, ProjectChecks, project_checks};
pub use config::ProjectChecksConfig;
pub use environment::PreparationRun;
pub use language::{Language, extension};
pub use limits::CheckLimitExceeded;
pub(crate) use merge_run::{MAX_MERGE_RUNS, MergeToCheck};
pub use preparation::{KeptFolder, LockedContent, Preparation};
pub(crate) use project::MAX_RUNS;
pub use project::{CheckRunner, CheckedCommits};
pub use registry_proxy::Registry;
pub use single_run::{ReportSummary, SingleRun};
pub use syntax::{SyntaxError, syntax_error};

use std::path::Path;

use cfq_proto::loop_step::ArtifactFile;
use cfq_proto::review::{CheckKind, Finding, Quarantine};
use cfq_proto::task::CoverageTarget;
use checks_file::ChecksFile;
use dangerous::DangerKind;
use test_integrity::Influence;
pub use test_integrity::is_test_path;

use crate::workstream::{Mirror, Snapshot};

/// The checks that a commit declares, with the content of the lock files there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeclaredChecks {
    /// The checks.
    pub checks: Vec<ProjectCheck>,
    /// What is run before them, once for each content of its lock files, in this order.
    pub preparations: Vec<(Preparation, LockedContent)>,
    /// The coverage that the task requires; `None` in what a commit declares.
    pub coverage_target: Option<CoverageTarget>,
}

/// The checks that a commit declares.
///
/// # Errors
/// [`CheckRunError::InvalidFile`] if its file is invalid, and [`CheckRunError::Git`] if it cannot be read.
pub(crate) fn declared_checks(commit: &Snapshot<'_>) -> Result<DeclaredChecks, CheckRunError> {
    let invalid = |reason| CheckRunError::InvalidFile { reason };
    let text = commit.text_file(CHECKS_FILE_PATH)?.map_err(|problem| invalid(problem.to_string()))?;
    let ProjectChecks { checks, preparations } = project_checks(text.as_deref()).map_err(invalid)?;
    // A preparation runs on the whole checkout, so another project's files can lead to another result.
    let repository = commit.repository_path().to_string_lossy().into_owned();
    let with_content = |preparation: Preparation| {
        let mut files = Vec::new();
        for path in &preparation.lock_files {
            let id = commit.file_id(path).ok_or_else(|| {
                invalid(format!(
                    "`lock_files` of the preparation {:?} has {path:?}, which is no file of the commit",
                    preparation.name
                ))
            })?;
            files.push((path.clone(), id.to_string()));
        }
        Ok::<_, CheckRunError>((preparation, LockedContent { repository: repository.clone(), files }))
    };
    let preparations = preparations.into_iter().map(with_content).collect::<Result<_, _>>()?;
    Ok(DeclaredChecks { checks, preparations, coverage_target: None })
}

/// The checks that a commit in a mirror declares.
///
/// # Errors
/// [`CheckRunError::InvalidFile`] if its file is invalid, and [`CheckRunError::Git`] if it cannot be read.
pub fn checks_of_commit(mirror: &Mirror, commit: &str) -> Result<DeclaredChecks, CheckRunError> {
    let repository = mirror.repository()?;
    declared_checks(&Snapshot::of(&repository, commit)?)
}

/// The lock files that differ in another commit.
///
/// # Errors
/// [`CheckRunError::Git`] if the commit cannot be read.
pub fn changed_lock_files(
    mirror: &Mirror,
    declared: &DeclaredChecks,
    commit: &str,
) -> Result<Vec<String>, CheckRunError> {
    let repository = mirror.repository()?;
    let snapshot = Snapshot::of(&repository, commit)?;
    let ids = declared.preparations.iter().flat_map(|(_, locked)| &locked.files);
    let changed = ids.filter(|(path, id)| snapshot.file_id(path).map(|id| id.to_string()).as_ref() != Some(id));
    Ok(changed.map(|(path, _)| path.clone()).collect())
}

/// Maximum number of findings kept; the creator fixes the first ones first.
const MAX_FINDINGS: usize = 20;
/// Folder of the policies in a repository. A result that changes one waits for a human.
pub const POLICIES_FOLDER: &str = ".cfq/policies";

/// Checks `files` and returns the findings and the resulting quarantine, if any. `base` reads a file from the base
/// commit; dangers that the project allows there (see `allow`) are not reported.
pub fn check(files: &[ArtifactFile], base: impl Fn(&str) -> Option<String>) -> (Vec<Finding>, Option<Quarantine>) {
    let mut dangerous = Vec::new();
    let mut syntax = Vec::new();
    let mut protected = Vec::new();
    let (checks_file, parse_error) = ChecksFile::parse(base(CHECKS_FILE_PATH).as_deref());
    let note =
        parse_error.map(|error| format!(" ({CHECKS_FILE_PATH} allows nothing, because it cannot be parsed: {error})"));
    for file in files {
        if file.path == CHECKS_FILE_PATH {
            let message = "changes the checks of the project".to_owned();
            dangerous.push(Finding { check: CheckKind::Dangerous, path: file.path.clone(), line: 0, message });
        }
        if Path::new(&file.path).starts_with(POLICIES_FOLDER) {
            let message = "changes the policies of the project".to_owned();
            dangerous.push(Finding { check: CheckKind::Dangerous, path: file.path.clone(), line: 0, message });
        }
        if let Some(name) = checks_file.preparation_of(&file.path) {
            let message = format!(
                "changes what the preparation `{name}` installs for the checks, so no check ran: a human decides"
            );
            dangerous.push(Finding { check: CheckKind::Dangerous, path: file.path.clone(), line: 0, message });
        }
        let before = base(&file.path);
        // A file that is removed was there, even if it is not text.
        let is_new = before.is_none() && file.content.is_some();
        if checks_file.protects(&file.path, is_new) {
            let (change, remedy) = match &file.content {
                Some(_) if is_new => ("added", "remove it"),
                Some(_) => ("changed", "restore it"),
                None => ("removed", "restore it"),
            };
            let message = format!(
                "was {change}, but {CHECKS_FILE_PATH} protects it: {remedy}, and change the other files instead"
            );
            protected.push(Finding { check: CheckKind::Project, path: file.path.clone(), line: 0, message });
        }
        let Some(content) = &file.content else { continue };
        let is_in_base = |path: &str| base(path).is_some();
        let influences =
            test_integrity::influences(&file.path, before.as_deref(), content, checks_file.checks(), is_in_base);
        let is_allowed = checks_file.covers(DangerKind::TestRunner, &file.path);
        for Influence { line, message } in influences.into_iter().filter(|_| !is_allowed) {
            protected.push(Finding { check: CheckKind::Project, path: file.path.clone(), line, message });
        }
        let before = before.unwrap_or_default();
        let syntax_finding =
            |line, message| Finding { check: CheckKind::Syntax, path: file.path.clone(), line, message };
        let added = dangerous::added_dangers(&file.path, &before, content).unwrap_or_else(|limit| {
            syntax.push(syntax_finding(0, limit.to_string()));
            Vec::new()
        });
        for danger in added {
            if checks_file.covers(danger.kind, &file.path) {
                let kind = danger.kind.as_str();
                tracing::info!(path = file.path, danger = kind, "dangerous code allowed by the project");
                continue;
            }
            let note = note.as_deref().unwrap_or_default();
            dangerous.push(Finding {
                check: CheckKind::Dangerous,
                path: file.path.clone(),
                line: danger.line,
                message: format!("{}: `{}`{note}", danger.kind.as_str(), danger.code),
            });
        }
        let Some(language) = Language::of_path(&file.path) else { continue };
        // A file that exceeds a limit is reported above.
        let Ok(Some(error)) = syntax_error(language, content) else { continue };
        let is_new = !matches!(syntax_error(language, &before), Ok(Some(_)));
        syntax.extend(is_new.then(|| syntax_finding(error.line, error.message)));
    }
    let quarantine = match () {
        () if !dangerous.is_empty() => Some(Quarantine::Dangerous),
        () if !syntax.is_empty() => Some(Quarantine::Syntax),
        () if !protected.is_empty() => Some(Quarantine::FailedChecks),
        () => None,
    };
    let mut findings = dangerous;
    findings.append(&mut protected);
    findings.append(&mut syntax);
    findings.truncate(MAX_FINDINGS);
    (findings, quarantine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(path: &str, before: &str, after: &str) -> (Vec<Finding>, Option<Quarantine>) {
        let file = ArtifactFile::text(path, after);
        check(&[file], |_| (!before.is_empty()).then(|| before.to_owned()))
    }

    #[test]
    fn clean_code_has_no_findings() {
        assert_eq!(run("a.py", "", "def f(x):\n    return x\n"), (vec![], None));
        assert_eq!(run("notes.md", "", "never run rm -rf /\n"), (vec![], None));
    }

    #[test]
    fn danger_takes_precedence_over_syntax_and_both_are_reported() {
        let (findings, quarantine) = run("a.py", "", "eval(x)\ndef f(:\n");
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
        assert_eq!(findings.iter().map(|f| f.check).collect::<Vec<_>>(), [CheckKind::Dangerous, CheckKind::Syntax]);
    }

    #[test]
    fn project_can_allow_a_danger_but_a_change_cannot_allow_itself() {
        let list = "[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"plugins/\"]\n";
        let file = |path: &str, content: &str| ArtifactFile::text(path, content);
        let with = |list: Option<&str>, files: &[ArtifactFile]| {
            check(files, |path| list.filter(|_| path == CHECKS_FILE_PATH).map(str::to_owned))
        };
        let dangerous = [file("plugins/a.py", "eval(x)\n")];
        assert_eq!(with(None, &dangerous).1, Some(Quarantine::Dangerous));
        assert_eq!(with(Some(list), &dangerous), (vec![], None));
        assert_eq!(with(Some(list), &[file("a.py", "eval(x)\n")]).1, Some(Quarantine::Dangerous), "another folder");
        let (findings, quarantine) = with(Some("[["), &dangerous);
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
        assert!(findings[0].message.contains(".cfq/checks.toml allows nothing"), "{findings:?}");
        let (findings, quarantine) = with(None, &[file(CHECKS_FILE_PATH, list), dangerous[0].clone()]);
        assert_eq!(
            (findings.len(), quarantine),
            (2, Some(Quarantine::Dangerous)),
            "only the base's list is used, and its change is reported"
        );
        let removed = ArtifactFile::removed(CHECKS_FILE_PATH);
        assert_eq!(with(Some(list), &[removed]).1, Some(Quarantine::Dangerous));
    }

    #[test]
    fn protected_files_are_left_alone() {
        let list = "protected = [\"tests/\", \"**/conftest.py\"]\n";
        let found = |file: ArtifactFile| {
            let base = |path: &str| match path {
                CHECKS_FILE_PATH => Some(list.to_owned()),
                "tests/test_a.py" => Some("def test_a():\n    assert f()\n".to_owned()),
                _ => None,
            };
            let (findings, quarantine) = check(&[file], base);
            assert_eq!(quarantine, (!findings.is_empty()).then_some(Quarantine::FailedChecks));
            findings.into_iter().map(|finding| finding.to_string()).collect::<Vec<_>>().concat()
        };
        let skipped = "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f()\n";
        assert!(found(ArtifactFile::text("tests/test_a.py", skipped)).starts_with("tests/test_a.py: was changed"));
        assert!(found(ArtifactFile::removed("tests/test_a.py")).contains("was removed"));
        assert!(found(ArtifactFile::removed("tests/picture.png")).contains("was removed"));
        assert!(found(ArtifactFile::text("src/conftest.py", "x = 1\n")).contains("was added"));
        assert_eq!(found(ArtifactFile::text("tests/test_b.py", "x = 1\n")), "");
        let mode = ArtifactFile {
            executable: Some(true),
            ..ArtifactFile::text("tests/test_a.py", "def test_a():\n    assert f()\n")
        };
        assert!(found(mode).contains("was changed"));
    }

    #[test]
    fn changed_dependencies_are_reported() {
        let list = "[[prepare]]\nname = \"npm\"\nrun = [\"npm\", \"ci\"]\nlock_files = [\"package-lock.json\"]\n\
                    keep = [\"node_modules/\"]\n[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"package-lock.json\"]\n";
        let quarantine = |file: ArtifactFile| {
            let (findings, quarantine) = check(&[file], |path| (path == CHECKS_FILE_PATH).then(|| list.to_owned()));
            (findings.into_iter().map(|finding| finding.message).collect::<String>(), quarantine)
        };
        for path in ["package-lock.json", "node_modules/a/index.js"] {
            let (message, quarantine) = quarantine(ArtifactFile::text(path, "{}\n"));
            assert_eq!(quarantine, Some(Quarantine::Dangerous), "{path}");
            assert!(message.contains("the preparation `npm` installs"), "{message}");
        }
        assert_eq!(quarantine(ArtifactFile::removed("package-lock.json")).1, Some(Quarantine::Dangerous));
        assert_eq!(quarantine(ArtifactFile::text("src/package-lock.json", "{}\n")).1, None);
    }

    #[test]
    fn changed_policy_waits_for_a_human() {
        let quarantine = |file| check(&[file], |_| None).1;
        for path in [".cfq/policies/security.md", ".cfq/policies/new/notes.txt"] {
            assert_eq!(quarantine(ArtifactFile::text(path, "x\n")), Some(Quarantine::Dangerous), "{path}");
            assert_eq!(quarantine(ArtifactFile::removed(path)), Some(Quarantine::Dangerous), "{path}");
        }
        assert_eq!(quarantine(ArtifactFile::text(".cfq/policies.md", "x\n")), None);
    }

    #[test]
    fn problems_of_the_base_are_not_reported() {
        let (findings, quarantine) = run("a.py", "eval(x)\ndef f(:\n", "eval(x)\ndef f(:\ny = 1\n");
        assert_eq!((findings, quarantine), (vec![], None));
        let (_, quarantine) = run("a.py", "eval(x)\n", "eval(x)\neval(x)\n");
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
    }

    #[test]
    fn file_that_exceeds_a_limit_does_not_pass() {
        let nested = format!("{}{}", "f(".repeat(20_000), ")".repeat(20_000));
        let large = "x = 1\n".repeat(400_000);
        for (path, content, reason) in [
            ("a.py", nested.as_str(), "nested too deeply"),
            ("a.c", &"while (1) {".repeat(40_000), "nested too deeply"),
            ("a.sh", &"rm ".repeat(100_000), "too repetitive"),
            ("a.sql", &"DELETE FROM a ".repeat(30_000), "too repetitive"),
            ("a.py", large.as_str(), "split the file"),
            ("a.txt.gz", large.as_str(), "split the file"),
        ] {
            let (findings, quarantine) = run(path, "", content);
            assert_eq!(quarantine, Some(Quarantine::Syntax), "{path}");
            assert!(findings[0].message.contains(reason), "{path}: {findings:?}");
        }
        // A base that is too large does not hide what a change adds.
        assert_eq!(run("a.py", &large, "eval(x)\n").1, Some(Quarantine::Dangerous));
        assert_eq!(run("a.py", &large, "def f(:\n").1, Some(Quarantine::Syntax));
    }
}
