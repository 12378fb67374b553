//! Unified diffs between two commits, for users and for the critic.

use cfq_edits::{Encoding, NotText, decode, decode_as};
use git2::{DiffDelta, DiffFormat, DiffOptions, Oid, Repository};

use super::error::{GitError, git_context};
use super::tree::Snapshot;
use super::tree_diff::changed_paths;

/// Number of unchanged lines around a change.
const CONTEXT_LINES: u32 = 3;
/// Maximum size of a file whose lines are compared, in bytes: far above any source file. The diff only states that a
/// larger file differs.
const MAX_DIFF_FILE_BYTES: i64 = 8 << 20;
/// Maximum size of a diff, in bytes. A longer one is cut.
const MAX_DIFF_BYTES: usize = 32 << 20;
/// Last line of a diff that was cut.
const CUT_NOTE: &str = "[the diff is longer and was cut here]\n";

/// A diff between two commits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnifiedDiff {
    /// The diff, in the format of `git diff`.
    pub text: String,
    /// Files of the diff, counted from 0 in its order, whose lines are decoded as Windows-1252.
    pub windows_1252: Vec<u32>,
}

/// Returns the unified diff from the tree of commit `from` to the tree of commit `to`. The lines of a file that is not
/// UTF-8 before or after the change are decoded as Windows-1252, as for edits. A very large file is not compared, and a
/// very long diff is cut; the diff states both.
///
/// # Errors
/// A [`GitError`] if a commit is missing or libgit2 fails.
pub fn unified(repository: &Repository, from: &str, to: &str) -> Result<UnifiedDiff, GitError> {
    let (from, to) = (Snapshot::of(repository, from)?, Snapshot::of(repository, to)?);
    let mut options = DiffOptions::new();
    options.max_size(MAX_DIFF_FILE_BYTES).context_lines(CONTEXT_LINES).indent_heuristic(true);
    let changed = changed_paths(repository, from.tree(), to.tree())?;
    if changed.is_empty() {
        return Ok(UnifiedDiff::default());
    }
    // Without a list of paths, libgit2 would read every folder of both trees.
    options.disable_pathspec_match(true);
    for changed in changed {
        options.pathspec(changed.path);
    }
    let diff = repository.diff_tree_to_tree(Some(from.tree()), Some(to.tree()), Some(&mut options));
    let diff = git_context("compare two trees", diff)?;
    let mut text = String::new();
    let mut encodings: Vec<Encoding> = Vec::new();
    let printed = diff.print(DiffFormat::Patch, |delta, _, line| {
        // The first lines of a file.
        if line.origin() == 'F' {
            encodings.push(encoding_of(repository, &delta));
        }
        if matches!(line.origin(), '+' | '-' | ' ') {
            text.push(line.origin());
        }
        match encodings.last() {
            Some(encoding) if matches!(line.origin(), '+' | '-' | ' ') && !line.content().contains(&0) => {
                text.push_str(&decode_as(line.content(), *encoding));
            }
            _ => match decode(line.content()) {
                Ok((line, _)) => text.push_str(&line),
                Err(NotText) => text.push_str(&String::from_utf8_lossy(line.content())),
            },
        }
        text.len() <= MAX_DIFF_BYTES
    });
    if text.len() > MAX_DIFF_BYTES {
        text.truncate(text.floor_char_boundary(MAX_DIFF_BYTES));
        text.push('\n');
        text.push_str(CUT_NOTE);
    } else {
        git_context("print a diff", printed)?;
    }
    let windows_1252 = (0..).zip(encodings).filter(|(_, encoding)| *encoding == Encoding::Windows1252);
    Ok(UnifiedDiff { text, windows_1252: windows_1252.map(|(n, _)| n).collect() })
}

/// The encoding in which all lines of a file's change can be decoded and encoded again.
fn encoding_of(repository: &Repository, delta: &DiffDelta<'_>) -> Encoding {
    let is_utf8 = |id: Oid| match repository.find_blob(id) {
        Ok(blob) => std::str::from_utf8(blob.content()).is_ok(),
        // The file does not exist on this side.
        Err(_) => true,
    };
    match is_utf8(delta.old_file().id()) && is_utf8(delta.new_file().id()) {
        true => Encoding::Utf8,
        false => Encoding::Windows1252,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::commit::{CommitPlan, create_commit};
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn very_large_file_is_not_compared() {
        let large = "x = 1\n".repeat(2 << 20);
        let user = UserRepo::new(&[("large.py", large.as_str()), ("a.py", "x = 1\n")]);
        let repository = user.repo();
        let files = [file("a.py", "x = 2\n"), file("large.py", "x = 2\n")];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 1 };
        let commit = create_commit(&repository, &plan).unwrap();
        let diff = unified(&repository, &user.base, &commit).unwrap().text;
        assert!(diff.contains("-x = 1\n+x = 2\n") && diff.contains("large.py") && diff.len() < 1000, "{diff:.2000}");
    }

    #[test]
    fn very_long_diff_is_cut() {
        let name = |n: usize| format!("f{n}.py");
        let content = "ä = 1\n".repeat(1 << 20);
        let old: Vec<(String, &str)> = (0..5).map(|n| (name(n), content.as_str())).collect();
        let old: Vec<(&str, &str)> = old.iter().map(|(path, content)| (path.as_str(), *content)).collect();
        let user = UserRepo::new(&old);
        let repository = user.repo();
        let files: Vec<_> = (0..5).map(|n| file(&name(n), "x = 2\n")).collect();
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 1 };
        let commit = create_commit(&repository, &plan).unwrap();
        let diff = unified(&repository, &user.base, &commit).unwrap().text;
        assert!(diff.ends_with(CUT_NOTE) && diff.len() < MAX_DIFF_BYTES + 100, "{}", diff.len());
    }
}
