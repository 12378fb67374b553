//! The engine's own checks of what a change adds: does it parse, and does it do harm (L8). Nothing is executed.
//!
//! Both compare with the base: a file that did not parse before is not the change's fault, and a danger that was there
//! before is not added by it.

mod allow;
mod dangerous;
mod language;
mod syntax;

pub use language::{Language, extension};
pub use syntax::{SyntaxError, syntax_error};

use allow::Allowed;
use cfq_proto::looping::ArtifactFile;
use cfq_proto::review::{CheckKind, Finding, Quarantine};

/// At most so many findings are kept: the first ones are what is mended.
const MOST_FINDINGS: usize = 20;

/// Findings about `files`, and what they make of the artifact. `base` reads a file as the base has it; what the project
/// allows there (see [`allow`]) passes.
pub fn check(files: &[ArtifactFile], base: impl Fn(&str) -> Option<String>) -> (Vec<Finding>, Option<Quarantine>) {
    let mut dangerous = Vec::new();
    let mut syntax = Vec::new();
    let (allowed, unreadable) = Allowed::of(base(allow::FILE).as_deref());
    let note = unreadable.map(|why| format!(" ({} allows nothing, it cannot be read: {why})", allow::FILE));
    for file in files {
        if file.path == allow::FILE {
            let message = "changes what the danger check lets pass".to_owned();
            dangerous.push(Finding { check: CheckKind::Dangerous, path: file.path.clone(), line: 0, message });
        }
        let Some(content) = &file.content else { continue };
        let before = base(&file.path).unwrap_or_default();
        for danger in dangerous::added(&file.path, &before, content) {
            if allowed.covers(danger.what, &file.path) {
                tracing::info!(path = file.path, danger = danger.what.as_str(), "allowed by the project");
                continue;
            }
            let note = note.as_deref().unwrap_or_default();
            dangerous.push(Finding {
                check: CheckKind::Dangerous,
                path: file.path.clone(),
                line: danger.line,
                message: format!("{}: `{}`{note}", danger.what.as_str(), danger.code),
            });
        }
        let Some(language) = Language::of_path(&file.path) else { continue };
        if let Some(error) = syntax_error(language, content)
            && syntax_error(language, &before).is_none()
        {
            syntax.push(Finding {
                check: CheckKind::Syntax,
                path: file.path.clone(),
                line: error.line,
                message: error.message,
            });
        }
    }
    let quarantine = match (dangerous.is_empty(), syntax.is_empty()) {
        (false, _) => Some(Quarantine::Dangerous),
        (true, false) => Some(Quarantine::Syntax),
        (true, true) => None,
    };
    let mut findings = dangerous;
    findings.append(&mut syntax);
    findings.truncate(MOST_FINDINGS);
    (findings, quarantine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(path: &str, before: &str, after: &str) -> (Vec<Finding>, Option<Quarantine>) {
        let file = ArtifactFile { path: path.into(), content: Some(after.into()) };
        check(&[file], |_| (!before.is_empty()).then(|| before.to_owned()))
    }

    #[test]
    fn clean_code_has_no_findings() {
        assert_eq!(run("a.py", "", "def f(x):\n    return x\n"), (vec![], None));
        assert_eq!(run("notes.md", "", "never run rm -rf /\n"), (vec![], None));
    }

    #[test]
    fn danger_outweighs_syntax_and_both_are_reported() {
        let (findings, quarantine) = run("a.py", "", "eval(x)\ndef f(:\n");
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
        assert_eq!(findings.iter().map(|f| f.check).collect::<Vec<_>>(), [CheckKind::Dangerous, CheckKind::Syntax]);
    }

    #[test]
    fn a_project_may_allow_a_danger_and_a_change_cannot_allow_itself() {
        let list = "[[allow]]\ndanger = \"dynamic_code\"\npaths = [\"plugins/\"]\n";
        let file = |path: &str, content: &str| ArtifactFile { path: path.into(), content: Some(content.into()) };
        let with = |list: Option<&str>, files: &[ArtifactFile]| {
            check(files, |path| list.filter(|_| path == allow::FILE).map(str::to_owned))
        };
        let evil = [file("plugins/a.py", "eval(x)\n")];
        assert_eq!(with(None, &evil).1, Some(Quarantine::Dangerous));
        assert_eq!(with(Some(list), &evil), (vec![], None));
        assert_eq!(with(Some(list), &[file("a.py", "eval(x)\n")]).1, Some(Quarantine::Dangerous), "elsewhere");
        let (findings, quarantine) = with(Some("[["), &evil);
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
        assert!(findings[0].message.contains(".cfq/checks.toml allows nothing"), "{findings:?}");
        let (findings, quarantine) = with(None, &[file(allow::FILE, list), evil[0].clone()]);
        assert_eq!(
            (findings.len(), quarantine),
            (2, Some(Quarantine::Dangerous)),
            "the base's list counts, and it is seen"
        );
        let removed = ArtifactFile { path: allow::FILE.into(), content: None };
        assert_eq!(with(Some(list), &[removed]).1, Some(Quarantine::Dangerous));
    }

    #[test]
    fn what_was_there_before_is_not_the_changes_fault() {
        let (findings, quarantine) = run("a.py", "eval(x)\ndef f(:\n", "eval(x)\ndef f(:\ny = 1\n");
        assert_eq!((findings, quarantine), (vec![], None));
        let (_, quarantine) = run("a.py", "eval(x)\n", "eval(x)\neval(x)\n");
        assert_eq!(quarantine, Some(Quarantine::Dangerous));
    }
}
