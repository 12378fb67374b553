//! Edits to files against the base: all of them, or none and the reason.

use std::collections::BTreeMap;

use cfq_proto::looping::ArtifactFile;

use super::ReplyProblem;
use super::parse::Edit;
use super::replace::replace;
use crate::workstream::Snapshot;

/// Files one artifact may change.
const MOST_FILES: usize = 64;
/// Bytes one file may have: far above any source file, far below what a blob can carry.
pub const LARGEST_FILE: usize = 512 * 1024;

/// Lays `edits` over the files of the artifact before (none at first) and returns what now differs from the base.
pub fn apply(edits: &[Edit], before: &[ArtifactFile], base: &Snapshot<'_>) -> Result<Vec<ArtifactFile>, ReplyProblem> {
    let mut files: BTreeMap<String, Option<String>> =
        before.iter().map(|f| (f.path.clone(), f.content.clone())).collect();
    for edit in edits {
        let path = edit.path();
        base.may_write(path)?;
        let there = files.get(path).cloned().unwrap_or_else(|| base.read_text(path));
        let text = there.as_deref().unwrap_or_default();
        let new = match edit {
            Edit::Write { content, .. } => content.clone(),
            Edit::Replace { hunks, .. } => {
                hunks.iter().try_fold(text.to_owned(), |text, hunk| replace(path, &text, hunk))?
            }
        };
        if new.len() > LARGEST_FILE {
            return Err(ReplyProblem::TooLarge { path: path.to_owned(), bytes: new.len(), most: LARGEST_FILE });
        }
        files.insert(path.to_owned(), Some(with_line_ends_of(text, new)));
    }
    // A file cannot also be another one's folder.
    for path in files.keys() {
        if let Some(folder) =
            files.keys().find(|other| path.strip_prefix(other.as_str()).is_some_and(|r| r.starts_with('/')))
        {
            let problem =
                crate::workstream::FileProblem { path: folder.clone(), why: "is a file and a folder at once" };
            return Err(problem.into());
        }
    }
    let files: Vec<_> = files.into_iter().map(|(path, content)| ArtifactFile { path, content }).collect();
    let changed = base.changes(files);
    if changed.len() > MOST_FILES {
        return Err(ReplyProblem::TooManyFiles { count: changed.len(), most: MOST_FILES });
    }
    if changed.is_empty() {
        return Err(ReplyProblem::NothingChanged);
    }
    Ok(changed)
}

/// A file with DOS line ends keeps them; the creator never sees them.
fn with_line_ends_of(old: &str, new: String) -> String {
    if old.contains("\r\n") && !new.contains('\r') { new.replace('\n', "\r\n") } else { new }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::{Hunk, Target, parse};
    use crate::workstream::testing::{UserRepo, file};

    fn write(path: &str, content: &str) -> Edit {
        Edit::Write { path: path.into(), content: content.into() }
    }

    fn with_base<R>(files: &[(&str, &str)], run: impl FnOnce(&Snapshot<'_>) -> R) -> R {
        let user = UserRepo::new(files);
        let repository = user.repo();
        run(&Snapshot::of(&repository, &user.base).unwrap())
    }

    #[test]
    fn files_are_laid_over_each_other_and_compared_with_the_base() {
        with_base(&[("a.py", "x = 1\n"), ("b.py", "y\n")], |base| {
            let one = apply(&[write("a.py", "x = 2\n"), write("c.py", "z\n")], &[], base).unwrap();
            assert_eq!(one, [file("a.py", "x = 2\n"), file("c.py", "z\n")]);
            // A revision that sends only one file keeps the other; going back to the base drops it.
            assert_eq!(apply(&[write("a.py", "x = 1\n")], &one, base).unwrap(), [file("c.py", "z\n")]);
            assert_eq!(apply(&[write("a.py", "x = 1\n")], &[], base), Err(ReplyProblem::NothingChanged));
        });
    }

    #[test]
    fn one_bad_edit_refuses_all() {
        with_base(&[("a.py", "x = 1\n"), ("d/e.py", "y\n")], |base| {
            let hunk = Hunk { search: vec!["nowhere".into()], replace: vec![] };
            let bad = Edit::Replace { path: "d/e.py".into(), hunks: vec![hunk] };
            assert!(matches!(apply(&[write("a.py", "x = 2\n"), bad], &[], base), Err(ReplyProblem::NotFound { .. })));
            assert!(matches!(apply(&[write("a.py/x", "1\n")], &[], base), Err(ReplyProblem::File(_))));
            assert!(matches!(apply(&[write("n", "1\n"), write("n/m", "1\n")], &[], base), Err(ReplyProblem::File(_))));
            let huge = "x".repeat(LARGEST_FILE + 1);
            assert!(matches!(apply(&[write("h", &huge)], &[], base), Err(ReplyProblem::TooLarge { .. })));
            let many: Vec<_> = (0..100).map(|i| write(&format!("f{i}"), "x\n")).collect();
            assert!(matches!(apply(&many, &[], base), Err(ReplyProblem::TooManyFiles { count: 100, .. })));
        });
    }

    #[test]
    fn hunks_see_the_last_artifact() {
        with_base(&[("a.py", "x = 1\n")], |base| {
            let reply = "a.py\n<<<<<<< SEARCH\nx = 2\n=======\nx = 3\n>>>>>>> REPLACE";
            let edits = parse(reply, &Target { path: "a.py".into(), language: None }, false).unwrap();
            assert!(apply(&edits, &[], base).is_err());
            assert_eq!(apply(&edits, &[file("a.py", "x = 2\n")], base).unwrap(), [file("a.py", "x = 3\n")]);
        });
    }

    #[test]
    fn dos_line_ends_stay() {
        with_base(&[("a.py", "x = 1\r\ny = 1\r\n")], |base| {
            assert_eq!(
                apply(&[write("a.py", "x = 2\ny = 1\n")], &[], base).unwrap(),
                [file("a.py", "x = 2\r\ny = 1\r\n")]
            );
        });
    }
}
