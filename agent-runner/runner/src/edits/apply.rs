//! Applies edits to files, all or nothing, and compares the result with the base.

use std::collections::BTreeMap;

use cfq_proto::loop_step::ArtifactFile;

use super::ReplyProblem;
use super::parse::Edit;
use super::replace::{MAX_LINE_COMPARISONS, replace};
use crate::workstream::{FileProblem, NotWritableReason, Snapshot};

/// Maximum number of files that one artifact may change.
const MAX_FILES: usize = 64;
/// Maximum size of one file, in bytes: far above any source file, far below the size limit of a blob.
pub const MAX_FILE_BYTES: usize = 512 * 1024;

/// Maximum size of an existing file that is edited, in bytes: far above any source file that people write.
const MAX_BASE_BYTES: usize = 8 * 1024 * 1024;

/// Applies each edit to its file as it is in the previous artifact (`previous`, empty in the first iteration), or in
/// the base if that artifact does not contain the file. Returns the files of the new artifact: those that differ from
/// the base, in path order.
///
/// # Errors
/// The first [`ReplyProblem`] found; no edit is applied then.
pub fn apply(
    edits: &[Edit],
    previous: &[ArtifactFile],
    base: &Snapshot<'_>,
) -> Result<Vec<ArtifactFile>, ReplyProblem> {
    let mut files: BTreeMap<String, Option<String>> =
        previous.iter().map(|f| (f.path.clone(), f.content.clone())).collect();
    let mut comparisons = MAX_LINE_COMPARISONS;
    for edit in edits {
        let path = edit.path();
        // Before the file is read.
        if let Some(bytes) = base.size(path).filter(|bytes| *bytes > MAX_BASE_BYTES) {
            return Err(ReplyProblem::BaseTooLarge { path: path.to_owned(), bytes, max: MAX_BASE_BYTES });
        }
        base.check_writable(path)?;
        let current = files.get(path).cloned().unwrap_or_else(|| base.read_text(path));
        let text = current.as_deref().unwrap_or_default();
        let new = match edit {
            Edit::Write { content, .. } => content.clone(),
            Edit::Replace { hunks, .. } => {
                let comparisons = &mut comparisons;
                hunks.iter().try_fold(text.to_owned(), |text, hunk| {
                    // Checked after each hunk, because a hunk may append any text.
                    match replace(path, &text, hunk, comparisons)? {
                        new if new.len() > MAX_FILE_BYTES.max(text.len()) => {
                            Err(ReplyProblem::TooLarge { path: path.to_owned(), bytes: new.len(), max: MAX_FILE_BYTES })
                        }
                        new => Ok(new),
                    }
                })?
            }
        };
        if new.len() > MAX_FILE_BYTES {
            return Err(ReplyProblem::TooLarge { path: path.to_owned(), bytes: new.len(), max: MAX_FILE_BYTES });
        }
        files.insert(path.to_owned(), Some(with_line_endings_of(text, new)));
    }
    // The path of a file cannot be a folder of another file.
    for path in files.keys() {
        if let Some(folder) =
            files.keys().find(|other| path.strip_prefix(other.as_str()).is_some_and(|r| r.starts_with('/')))
        {
            let problem = FileProblem { path: folder.clone(), reason: NotWritableReason::FileAndFolder };
            return Err(problem.into());
        }
    }
    let files: Vec<_> = files.into_iter().map(|(path, content)| ArtifactFile { path, content }).collect();
    let changed = base.changed_files(files);
    if changed.len() > MAX_FILES {
        return Err(ReplyProblem::TooManyFiles { count: changed.len(), max: MAX_FILES });
    }
    if changed.is_empty() {
        return Err(ReplyProblem::NothingChanged);
    }
    Ok(changed)
}

/// Converts `new` to CRLF line endings if `old` has them: prompts show only LF, so replies use LF.
fn with_line_endings_of(old: &str, new: String) -> String {
    if old.contains("\r\n") && !new.contains('\r') { new.replace('\n', "\r\n") } else { new }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::{Hunk, ReplyTarget, parse};
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
    fn edits_apply_to_previous_files_and_are_compared_with_the_base() {
        with_base(&[("a.py", "x = 1\n"), ("b.py", "y\n")], |base| {
            let one = apply(&[write("a.py", "x = 2\n"), write("c.py", "z\n")], &[], base).unwrap();
            assert_eq!(one, [file("a.py", "x = 2\n"), file("c.py", "z\n")]);
            // A revision that sends only one file keeps the other; a file that equals the base again is dropped.
            assert_eq!(apply(&[write("a.py", "x = 1\n")], &one, base).unwrap(), [file("c.py", "z\n")]);
            assert_eq!(apply(&[write("a.py", "x = 1\n")], &[], base), Err(ReplyProblem::NothingChanged));
        });
    }

    #[test]
    fn one_invalid_edit_rejects_all_edits() {
        with_base(&[("a.py", "x = 1\n"), ("d/e.py", "y\n")], |base| {
            let hunk = Hunk { search: vec!["nowhere".into()], replace: vec![] };
            let bad = Edit::Replace { path: "d/e.py".into(), hunks: vec![hunk] };
            assert!(matches!(apply(&[write("a.py", "x = 2\n"), bad], &[], base), Err(ReplyProblem::NotFound { .. })));
            assert!(matches!(apply(&[write("a.py/x", "1\n")], &[], base), Err(ReplyProblem::File(_))));
            assert!(matches!(apply(&[write("n", "1\n"), write("n/m", "1\n")], &[], base), Err(ReplyProblem::File(_))));
            let huge = "x".repeat(MAX_FILE_BYTES + 1);
            assert!(matches!(apply(&[write("h", &huge)], &[], base), Err(ReplyProblem::TooLarge { .. })));
            let many: Vec<_> = (0..100).map(|i| write(&format!("f{i}"), "x\n")).collect();
            assert!(matches!(apply(&many, &[], base), Err(ReplyProblem::TooManyFiles { count: 100, .. })));
        });
    }

    #[test]
    fn hunks_apply_to_the_previous_artifact() {
        with_base(&[("a.py", "x = 1\n")], |base| {
            let reply = "a.py\n<<<<<<< SEARCH\nx = 2\n=======\nx = 3\n>>>>>>> REPLACE";
            let edits = parse(reply, &ReplyTarget { path: "a.py".into(), language: None }, false).unwrap();
            assert!(apply(&edits, &[], base).is_err());
            assert_eq!(apply(&edits, &[file("a.py", "x = 2\n")], base).unwrap(), [file("a.py", "x = 3\n")]);
        });
    }

    #[test]
    fn crlf_line_endings_are_kept() {
        with_base(&[("a.py", "x = 1\r\ny = 1\r\n")], |base| {
            assert_eq!(
                apply(&[write("a.py", "x = 2\ny = 1\n")], &[], base).unwrap(),
                [file("a.py", "x = 2\r\ny = 1\r\n")]
            );
        });
    }

    #[test]
    fn large_file_of_the_base_cannot_be_edited() {
        let large = "x = 1\n".repeat(MAX_BASE_BYTES / 6 + 1);
        with_base(&[("a.py", &large)], |base| {
            let problem = apply(&[write("a.py", "x = 2\n")], &[], base).unwrap_err();
            assert_eq!(
                problem,
                ReplyProblem::BaseTooLarge { path: "a.py".into(), bytes: large.len(), max: MAX_BASE_BYTES }
            );
        });
    }
}
