//! Policies of a project: files in which its owners write how code has to be. Alpha and Beta see them in every prompt of
//! a task; they are those of the task's base commit, so a result cannot change the policies by which it is reviewed.

use super::budget::truncate;
use super::context::ContextFile;
use crate::workstream::Snapshot;

/// Folder of the policies in a repository.
pub const POLICIES_FOLDER: &str = ".cfq/policies";
/// End of the names of the files.
pub const POLICIES_EXTENSION: &str = ".md";

/// The security policy of a project that has none of its own: general rules, ordered like the risks in the
/// [OWASP Top Ten](https://owasp.org/www-project-top-ten/). Prompts do not contain it.
pub const DEFAULT_SECURITY_POLICY: &str = include_str!("policies/security.md");

/// The policies of a commit, at most `bytes` in total: each may use the bytes that those before it did not use.
pub(super) fn policies(base: &Snapshot<'_>, bytes: usize) -> Vec<ContextFile> {
    let mut left = bytes;
    let files = base.text_files(POLICIES_FOLDER, POLICIES_EXTENSION).into_iter();
    files
        .map(|file| {
            let content = match &file.text {
                Some(text) => truncate(text, left),
                None => "[not a text file, or too large]\n".to_owned(),
            };
            left = left.saturating_sub(content.len());
            ContextFile { path: file.path, content }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn policies_are_the_markdown_files_of_the_folder() {
        let user = UserRepo::new(&[
            (".cfq/policies/style.md", "Use four spaces.\n"),
            (".cfq/policies/b.md", "No globals.\n"),
            (".cfq/policies/notes.txt", "x\n"),
            (".cfq/policies/old/c.md", "x\n"),
            ("a.md", "x\n"),
        ]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let found: Vec<(String, String)> =
            policies(&base, 1000).into_iter().map(|file| (file.path, file.content)).collect();
        let expected = [(".cfq/policies/b.md", "No globals.\n"), (".cfq/policies/style.md", "Use four spaces.\n")];
        assert_eq!(found, expected.map(|(path, text)| (path.to_owned(), text.to_owned())));
        assert!(policies(&base, 14)[1].content.contains("17 more bytes omitted"), "{:?}", policies(&base, 14));
    }

    #[test]
    fn default_security_policy_fits_into_a_prompt() {
        assert!(DEFAULT_SECURITY_POLICY.len() < 4096);
    }
}
