//! Turns a creator's reply into the files of an artifact. `cfq_edits` parses and applies the reply; this module gives it
//! the files of the base commit and the grammars, and determines the file of an unlabelled code block.

mod grammars;
mod target;

use cfq_edits::{Change, ChangedFile, FileContent, ReplyProblem, ReplyTarget};
use cfq_proto::loop_step::{ArtifactFile, FileEncoding};

use crate::workstream::{Snapshot, encoding_of};
use grammars::Grammars;

pub use cfq_edits::{Encoding, decode_as, encode, unquoted};
pub use target::{is_single_file, possible_paths, target_file};

/// Files of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EditedFiles {
    /// The files that differ from the base, in path order.
    pub files: Vec<ArtifactFile>,
    /// The file that the reply sends whole at its end, and which may still grow if the reply is not complete. Empty if the
    /// last edit is another one: later hunks may change any place of a file.
    pub open: String,
}

/// Applies a reply to the files of the previous artifact (empty in the first iteration) and of the base.
///
/// # Errors
/// The [`ReplyProblem`] for which the reply is refused.
pub fn edited_files(
    reply: &str,
    target: &ReplyTarget,
    truncated: bool,
    previous: &[ArtifactFile],
    base: &Snapshot<'_>,
) -> Result<EditedFiles, ReplyProblem> {
    let edits = cfq_edits::parse(reply, target, truncated, &Grammars)?;
    let previous: Vec<ChangedFile> = previous.iter().map(changed_file).collect();
    let files = cfq_edits::apply(&edits, &previous, base, &Grammars)?;
    let open = edits.last().filter(|edit| matches!(edit.change, Change::Write { .. }));
    let open = open.map(|edit| edit.path.clone()).unwrap_or_default();
    Ok(EditedFiles { files: files.into_iter().map(artifact_file).collect(), open })
}

fn changed_file(file: &ArtifactFile) -> ChangedFile {
    let content =
        file.content.clone().map(|text| FileContent { text, encoding: encoding_of(file), executable: file.executable });
    ChangedFile { path: file.path.clone(), content }
}

fn artifact_file(file: ChangedFile) -> ArtifactFile {
    let Some(FileContent { text, encoding, executable }) = file.content else {
        return ArtifactFile::removed(file.path);
    };
    let encoding = match encoding {
        Encoding::Utf8 => FileEncoding::Utf8,
        Encoding::Windows1252 => FileEncoding::Windows1252,
    };
    ArtifactFile { encoding, executable, ..ArtifactFile::text(file.path, text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};

    fn edited(
        files: &[(&str, &str)],
        previous: &[ArtifactFile],
        reply: &str,
    ) -> Result<Vec<ArtifactFile>, ReplyProblem> {
        let user = UserRepo::new(files);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let target = ReplyTarget { path: "a.py".into() };
        edited_files(reply, &target, false, previous, &base).map(|edited| edited.files)
    }

    #[test]
    fn edits_apply_to_previous_files_and_are_compared_with_the_base() {
        let base = [("a.py", "x = 1\n"), ("b.py", "y\n")];
        let one = edited(&base, &[], "a.py\n```\nx = 2\n```\nc.py\n```\nz\n```\n").unwrap();
        assert_eq!(one, [file("a.py", "x = 2\n"), file("c.py", "z\n")]);
        // A revision that sends only one file keeps the other; a file that equals the base again is dropped.
        assert_eq!(edited(&base, &one, "a.py\n```\nx = 1\n```\n").unwrap(), [file("c.py", "z\n")]);
        assert_eq!(edited(&base, &[], "a.py\n```\nx = 1\n```\n"), Err(ReplyProblem::NothingChanged));
        let removed = edited(&base, &one, "*** Begin Patch\n*** Delete File: b.py\n*** End Patch\n").unwrap();
        assert_eq!(removed[1], ArtifactFile::removed("b.py"));
    }

    #[test]
    fn hunk_that_breaks_the_syntax_is_refused_and_a_whole_file_is_checked_later() {
        let base = [("a.py", "x = 1\ny = 2\n")];
        let hunk = "a.py\n<<<<<<< SEARCH\ny = 2\n=======\ny = (2\n>>>>>>> REPLACE";
        let problem = edited(&base, &[], hunk).unwrap_err();
        assert!(matches!(&problem, ReplyProblem::AddsSyntaxError { path, .. } if path == "a.py"), "{problem}");
        assert_eq!(edited(&base, &[], "```python\ny = (2\n```").unwrap(), [file("a.py", "y = (2\n")]);
    }
}
