//! `.cfq/checks.toml` in a repository: the checks that the project declares, and its allow-list for dangerous additions
//! (L8).
//!
//! ```toml
//! protected = ["tests/", "**/conftest.py"]  # files that a change must leave alone
//!
//! [[check]]
//! name = "tests"
//! run = ["python3", "-m", "unittest"]       # a program and its arguments, run at the top of the repository
//! timeout_s = 300                           # of one run; 600 if absent
//! report = "report.xml"                     # JUnit XML that the program writes; absent: the exit code decides
//! coverage = "coverage.xml"                 # coverage report that the program writes
//! min_coverage = 80                         # percentage of the lines that must be covered
//!
//! [[prepare]]                               # runs once for each content of the lock files, with network
//! name = "packages"
//! run = ["npm", "ci"]
//! lock_files = ["package-lock.json"]
//! keep = ["node_modules/", "~/.cache/x/"]   # folders of the checkout and of the home folder that the checks get
//!
//! [[allow]]
//! danger = "dynamic_code"      # deletes_files, drops_table, deletes_all_rows, endless_loop, dynamic_code,
//!                              # bidi_control or test_runner
//! paths = ["plugins/", "tools/load.py"]   # a folder with everything in it, or a file
//! reason = "plugins are loaded by name"
//! ```
//!
//! Only the file in the base commit is used, so a change can neither allow itself nor remove a check. A change of the
//! file is reported as dangerous, so that a human reviews it. A file that cannot be parsed allows nothing, and no result
//! passes.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use cfq_edits::repo_path;
use serde::Deserialize;

use super::dangerous::DangerKind;
use super::preparation::{self, KeptFolder, Preparation};

/// Path of the file in the repository.
pub const CHECKS_FILE_PATH: &str = ".cfq/checks.toml";
/// Time limit of a check that has none, in s.
const DEFAULT_TIMEOUT_S: u64 = 600;
/// Maximum time limit of a check, in s.
const MAX_TIMEOUT_S: u64 = 3600;

/// Maximum number of checks. Their findings must fit into one message.
const MAX_CHECKS: usize = 20;
/// Maximum length of a check's name, in characters.
const MAX_NAME_CHARS: usize = 100;

/// The parsed file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChecksFile {
    #[serde(default)]
    allow: Vec<AllowRule>,
    /// Folders with a trailing `/`, whose files may be neither changed nor removed; files, and names of files below
    /// `**/`, which may not be added either.
    #[serde(default)]
    protected: Vec<String>,
    #[serde(default, rename = "check")]
    checks: Vec<ProjectCheck>,
    #[serde(default, rename = "prepare")]
    preparations: Vec<Preparation>,
}

/// What a project declares: its checks, and how to install what they need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProjectChecks {
    /// The checks.
    pub checks: Vec<ProjectCheck>,
    /// What is run before them, once, in this order.
    pub preparations: Vec<Preparation>,
}

/// A check that a project declares.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectCheck {
    /// Name in findings and errors.
    pub name: String,
    /// Program and arguments.
    pub run: Vec<String>,
    #[serde(default = "default_timeout_s")]
    timeout_s: u64,
    /// Path of the JUnit report that the check writes, from the top of the repository; with a trailing `/` a folder of
    /// such files.
    #[serde(default)]
    pub report: Option<String>,
    /// Path of the coverage report that the check writes, from the top of the repository.
    #[serde(default)]
    pub coverage: Option<String>,
    /// Percentage of the lines in the coverage report that must be covered.
    #[serde(default, deserialize_with = "percentage")]
    pub min_coverage: Option<u8>,
}

fn default_timeout_s() -> u64 {
    DEFAULT_TIMEOUT_S
}

fn percentage<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    let percent = i64::deserialize(deserializer)?;
    match u8::try_from(percent) {
        Ok(percent @ 0..=100) => Ok(Some(percent)),
        _ => Err(serde::de::Error::custom(format!("`min_coverage` is {percent}; it must be from 0 to 100"))),
    }
}

impl ProjectCheck {
    /// Time limit.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }
}

/// Returns the checks of the base's file, of which `text` is the content.
///
/// # Errors
/// Says what is wrong with the file.
pub fn project_checks(text: Option<&str>) -> Result<ProjectChecks, String> {
    let (file, error) = ChecksFile::parse(text);
    if let Some(error) = error {
        return Err(error);
    }
    if file.checks.len() > MAX_CHECKS {
        return Err(format!("it declares {} checks, and at most {MAX_CHECKS} are possible", file.checks.len()));
    }
    if let Some(pattern) = file.protected.iter().find(|pattern| !is_pattern(pattern)) {
        return Err(format!("`protected` has {pattern:?}, which is neither a file, nor `FOLDER/`, nor `**/NAME`"));
    }
    let mut names = BTreeSet::new();
    for check in &file.checks {
        let name = &check.name;
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err("the name of a check is empty or has a control character".to_owned());
        }
        if name.chars().count() > MAX_NAME_CHARS {
            return Err(format!("the name of a check is longer than {MAX_NAME_CHARS} characters"));
        }
        if !names.insert(name) {
            return Err(format!("two checks have the name {name:?}"));
        }
        if check.run.first().is_none_or(String::is_empty) {
            return Err(format!("`run` of the check {name:?} names no program"));
        }
        if !(1..=MAX_TIMEOUT_S).contains(&check.timeout_s) {
            return Err(format!("`timeout_s` of the check {name:?} must be from 1 to {MAX_TIMEOUT_S}"));
        }
        if let Some(report) = check.report.as_ref().filter(|report| !is_report_path(report)) {
            return Err(format!(
                "`report` of the check {name:?} is {report:?}, which is neither a file nor `FOLDER/` in the repository"
            ));
        }
        if let Some(coverage) = check.coverage.as_ref().filter(|path| path.ends_with('/') || !is_report_path(path)) {
            return Err(format!(
                "`coverage` of the check {name:?} is {coverage:?}, which is no file in the repository"
            ));
        }
        if check.min_coverage.is_some() && check.coverage.is_none() {
            return Err(format!("the check {name:?} has `min_coverage` and no `coverage`, the path of a report"));
        }
    }
    preparation::validate(&file.preparations)?;
    for report in file.checks.iter().flat_map(|check| [check.report.as_deref(), check.coverage.as_deref()]).flatten() {
        let report = Path::new(report);
        let mut kept = file.preparations.iter().flat_map(|preparation| &preparation.keep);
        let is_same = |kept: &&KeptFolder| report.starts_with(&kept.path) || Path::new(&kept.path).starts_with(report);
        if let Some(kept) = kept.find(|kept| !kept.is_in_home && is_same(kept)) {
            return Err(format!(
                "the report {} is in the folder {kept} of a preparation, whose changes are discarded, or contains it",
                report.display()
            ));
        }
    }
    Ok(ProjectChecks { checks: file.checks, preparations: file.preparations })
}

/// True for a file or `FOLDER/`.
fn is_report_path(report: &str) -> bool {
    let path = report.strip_suffix('/').unwrap_or(report);
    repo_path(path).is_ok_and(|valid| valid == path)
}

/// True for a file, `FOLDER/`, or `**/NAME`.
fn is_pattern(pattern: &str) -> bool {
    let path = match pattern.strip_prefix("**/") {
        Some(name) if name.contains('/') => return false,
        Some(name) => name,
        None => pattern.strip_suffix('/').unwrap_or(pattern),
    };
    !path.contains('*') && repo_path(path).is_ok_and(|valid| valid == path)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowRule {
    danger: DangerKind,
    /// Paths that the rule applies to: files, and folders with a trailing `/`.
    paths: Vec<String>,
    /// Justification for human readers.
    #[serde(default, rename = "reason", alias = "why")]
    _reason: String,
}

impl ChecksFile {
    /// Parses the base's file. Returns an empty one and the parse error if the text is invalid.
    pub fn parse(text: Option<&str>) -> (Self, Option<String>) {
        let text = text.unwrap_or_default();
        match toml::from_str(text) {
            Ok(list) => (list, None),
            Err(error) => {
                let before = error.span().and_then(|span| text.get(..span.start));
                let line = before.map_or_else(String::new, |before| {
                    format!("line {}: ", before.bytes().filter(|byte| *byte == b'\n').count() + 1)
                });
                (Self::default(), Some(format!("{line}{}", error.message())))
            }
        }
    }

    /// True if a change may not touch the file at `path`. `is_new` if the base does not have the file.
    pub fn protects(&self, path: &str, is_new: bool) -> bool {
        self.protected.iter().any(|pattern| match (pattern.strip_prefix("**/"), pattern.strip_suffix('/')) {
            (Some(name), _) => path == name || path.strip_suffix(name).is_some_and(|folder| folder.ends_with('/')),
            (None, Some(folder)) => !is_new && path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')),
            (None, None) => path == pattern,
        })
    }

    /// The declared checks, which may be invalid.
    pub fn checks(&self) -> &[ProjectCheck] {
        &self.checks
    }

    /// Name of the preparation whose lock files or kept folders include the file.
    pub fn preparation_of(&self, path: &str) -> Option<&str> {
        self.preparations.iter().find(|preparation| preparation.affects(path)).map(|found| found.name.as_str())
    }

    /// True if the list allows this kind of danger in the file at `path`.
    pub fn covers(&self, kind: DangerKind, path: &str) -> bool {
        self.allow.iter().filter(|rule| rule.danger == kind).flat_map(|rule| &rule.paths).any(|allowed| {
            match allowed.strip_suffix('/') {
                Some(folder) => path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')),
                None => path == allowed,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_read_and_wrong_ones_are_named() {
        let declared = project_checks(Some("[[check]]\nname = \"tests\"\nrun = [\"make\", \"test\"]\n")).unwrap();
        let checks = declared.checks;
        assert_eq!(
            (checks[0].run.as_slice(), checks[0].timeout()),
            (&["make".into(), "test".into()][..], Duration::from_secs(600))
        );
        assert_eq!(project_checks(None), Ok(ProjectChecks::default()));
        for report in ["report.xml", "out/report.xml", "target/surefire-reports/"] {
            let text = format!("[[check]]\nname = \"a\"\nrun = [\"x\"]\nreport = {report:?}\n");
            assert_eq!(project_checks(Some(&text)).unwrap().checks[0].report.as_deref(), Some(report));
        }
        let covered = "[[check]]\nname = \"a\"\nrun = [\"x\"]\ncoverage = \"out/lcov.info\"\nmin_coverage = 80\n";
        let check = &project_checks(Some(covered)).unwrap().checks[0];
        assert_eq!((check.coverage.as_deref(), check.min_coverage), (Some("out/lcov.info"), Some(80)));
        for (text, expected) in [
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\nmin_coverage = 80\n", "no `coverage`"),
            (
                "[[check]]\nname = \"a\"\nrun = [\"x\"]\ncoverage = \"c\"\nmin_coverage = 101\n",
                "line 5: `min_coverage` is 101",
            ),
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\ncoverage = \"out/\"\n", "no file"),
            ("[[check]]\nname = \"\"\nrun = [\"x\"]\n", "empty"),
            ("[[check]]\nname = \"a\"\nrun = []\n", "names no program"),
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\ntimeout_s = 0\n", "from 1 to 3600"),
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\n[[check]]\nname = \"a\"\nrun = [\"y\"]\n", "two checks"),
            ("[[check]]\nname = \"a\"\nshell = \"x\"\n", "line 3: unknown field"),
            ("# ä\n\n[[check]]\nname = \"a\n", "line 4: "),
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\nreport = \"../r.xml\"\n", "../r.xml"),
            ("[[check]]\nname = \"a\"\nrun = [\"x\"]\nreport = \"/r.xml\"\n", "neither a file nor `FOLDER/`"),
            (
                "[[check]]\nname = \"a\"\nrun = [\"x\"]\nreport = \"target/r.xml\"\n[[prepare]]\nname = \"p\"\n\
                 run = [\"x\"]\nlock_files = [\"l\"]\nkeep = [\"target/\"]\n",
                "the report target/r.xml is in the folder target/",
            ),
            ("protected = [\"tests/**\"]\n", "tests/**"),
            ("protected = [\"**/a/b.py\"]\n", "**/a/b.py"),
            ("protected = [\"\"]\n", "neither a file"),
        ] {
            let error = project_checks(Some(text)).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn rule_covers_its_kind_in_its_files_and_folders() {
        let text =
            "[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"plugins/\", \"tools/load.py\"]\nreason = \"by name\"\n";
        let (allowed, problem) = ChecksFile::parse(Some(text));
        assert_eq!(problem, None);
        for path in ["plugins/a.py", "plugins/deep/b.py", "tools/load.py"] {
            assert!(allowed.covers(DangerKind::DynamicCode, path), "{path}");
            assert!(!allowed.covers(DangerKind::DeletesFiles, path), "{path}");
        }
        for path in ["plugins", "plugins2/a.py", "x/plugins/a.py", "tools/load.pyc", "tools/load.py/x", ""] {
            assert!(!allowed.covers(DangerKind::DynamicCode, path), "{path}");
        }
    }

    #[test]
    fn protected_files_are_found() {
        let (file, problem) = ChecksFile::parse(Some("protected = [\"tests/\", \"**/conftest.py\", \"pytest.ini\"]\n"));
        assert_eq!(problem, None);
        for (path, is_new, protected) in [
            ("tests/test_a.py", false, true),
            ("tests/deep/test_a.py", false, true),
            ("tests/test_b.py", true, false),
            ("tests2/test_a.py", false, false),
            ("conftest.py", true, true),
            ("src/conftest.py", true, true),
            ("src/xconftest.py", true, false),
            ("pytest.ini", true, true),
            ("src/pytest.ini", true, false),
        ] {
            assert_eq!(file.protects(path, is_new), protected, "{path}");
        }
    }

    #[test]
    fn allow_list_of_0_1_still_loads() {
        let (allowed, problem) = ChecksFile::parse(Some(include_str!("../../tests/fixtures/checks-0.1.toml")));
        assert_eq!(problem, None);
        for (kind, folder) in [
            (DangerKind::DeletesFiles, "deletes_files"),
            (DangerKind::DropsTable, "drops_table"),
            (DangerKind::DeletesAllRows, "deletes_all_rows"),
            (DangerKind::EndlessLoop, "endless_loop"),
            (DangerKind::DynamicCode, "dynamic_code"),
        ] {
            assert!(allowed.covers(kind, &format!("{folder}/a.py")) && allowed.covers(kind, "one.py"), "{folder}");
            assert!(!allowed.covers(kind, "elsewhere.py"), "{folder}");
        }
    }

    #[test]
    fn invalid_list_allows_nothing_and_reports_the_error() {
        assert!(ChecksFile::parse(None).1.is_none());
        for bad in
            ["[[allow]]\ndanger = \"everything\"\npaths = [\"a/\"]\n", "allow = 1", "[[allow]]\npath = \"a\"", "[["]
        {
            let (allowed, problem) = ChecksFile::parse(Some(bad));
            assert!(problem.is_some() && !allowed.covers(DangerKind::DynamicCode, "a/b.py"), "{bad}");
        }
    }
}
