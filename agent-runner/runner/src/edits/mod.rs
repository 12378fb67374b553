//! Turns a creator's reply into the files of an artifact. `cfq_edits` parses and applies the reply; this module gives it
//! the files of the base commit and the grammars, and determines the file of an unlabelled code block.

mod grammars;
mod target;

use cfq_edits::{Encoding, FileVersion, NewContent, Problem, ReplyTarget};
use cfq_proto::loop_step::{ArtifactFile, FileEncoding};

use crate::workstream::{Snapshot, encoding_of};
use grammars::Grammars;

pub use target::{is_single_file, target_file};

/// Files of an artifact, and the path of the file that the reply edits last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EditedFiles {
    /// The files that differ from the base, in path order.
    pub files: Vec<ArtifactFile>,
    /// Path in the last edit.
    pub last: String,
}

/// Applies a reply to the files of the previous artifact (empty in the first iteration) and of the base.
///
/// # Errors
/// The [`Problem`] for which the reply is refused.
pub fn edited_files(
    reply: &str,
    target: &ReplyTarget,
    truncated: bool,
    previous: &[ArtifactFile],
    base: &Snapshot<'_>,
) -> Result<EditedFiles, Problem> {
    let edits = cfq_edits::parse(reply, target, truncated, &Grammars)?;
    let previous: Vec<FileVersion> = previous.iter().map(file_version).collect();
    let files = cfq_edits::apply(&edits, &previous, base, &Grammars)?;
    let last = edits.last().map(|edit| edit.path.clone()).unwrap_or_default();
    Ok(EditedFiles { files: files.into_iter().map(artifact_file).collect(), last })
}

fn file_version(file: &ArtifactFile) -> FileVersion {
    let content =
        file.content.clone().map(|text| NewContent { text, encoding: encoding_of(file), executable: file.executable });
    FileVersion { path: file.path.clone(), content }
}

fn artifact_file(file: FileVersion) -> ArtifactFile {
    let Some(NewContent { text, encoding, executable }) = file.content else {
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

    fn edited(files: &[(&str, &str)], previous: &[ArtifactFile], reply: &str) -> Result<Vec<ArtifactFile>, Problem> {
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
        assert_eq!(edited(&base, &[], "a.py\n```\nx = 1\n```\n"), Err(Problem::NothingChanged));
        let removed = edited(&base, &one, "*** Begin Patch\n*** Delete File: b.py\n*** End Patch\n").unwrap();
        assert_eq!(removed[1], ArtifactFile::removed("b.py"));
    }

    #[test]
    fn hunk_that_breaks_the_syntax_is_refused_and_a_whole_file_is_checked_later() {
        let base = [("a.py", "x = 1\ny = 2\n")];
        let hunk = "a.py\n<<<<<<< SEARCH\ny = 2\n=======\ny = (2\n>>>>>>> REPLACE";
        let problem = edited(&base, &[], hunk).unwrap_err();
        assert!(matches!(&problem, Problem::SyntaxError { path, .. } if path == "a.py"), "{problem}");
        assert_eq!(edited(&base, &[], "```python\ny = (2\n```").unwrap(), [file("a.py", "y = (2\n")]);
    }
}
