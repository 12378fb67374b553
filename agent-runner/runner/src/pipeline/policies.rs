//! Policies of a project: files in which its owners write how code has to be. Alpha and Beta see them in every prompt of
//! a task; they are those of the task's base commit, so a result cannot change the policies by which it is reviewed.

use super::budget::truncate;
use super::context::ContextFile;
use crate::checks::POLICIES_FOLDER;
use crate::workstream::Snapshot;

/// End of the names of the files.
pub const POLICIES_EXTENSION: &str = ".md";
/// Policies that come first, and are cut off last.
pub const FIRST_POLICIES: [&str; 2] = ["security.md", "style.md"];

/// The security policy of a project that has none of its own: general rules, ordered like the risks in the
/// [OWASP Top Ten](https://owasp.org/www-project-top-ten/). Prompts do not contain it.
pub const DEFAULT_SECURITY_POLICY: &str = include_str!("policies/security.md");

/// The policies of a commit, at most `bytes` in total: each may use the bytes that those before it did not use.
pub(super) fn policies(base: &Snapshot<'_>, bytes: usize) -> Vec<ContextFile> {
    let mut left = bytes;
    let (files, left_out) = base.text_files(POLICIES_FOLDER, POLICIES_EXTENSION, &FIRST_POLICIES);
    let mut shown: Vec<ContextFile> = files
        .into_iter()
        .map(|file| {
            let content = match &file.text {
                Some(text) => truncate(text, left),
                None => "[not a text file, or too large]\n".to_owned(),
            };
            left = left.saturating_sub(content.len());
            let is_truncated = file.text.is_some_and(|text| text != content);
            ContextFile { path: file.path, content, is_truncated }
        })
        .collect();
    if left_out > 0 {
        let content = format!("[{left_out} more policies omitted]\n");
        shown.push(ContextFile { path: POLICIES_FOLDER.to_owned(), content, is_truncated: false });
    }
    shown
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
        let expected = [(".cfq/policies/style.md", "Use four spaces.\n"), (".cfq/policies/b.md", "No globals.\n")];
        assert_eq!(found, expected.map(|(path, text)| (path.to_owned(), text.to_owned())));
        assert!(policies(&base, 17)[1].content.contains("12 more bytes omitted"), "{:?}", policies(&base, 17));
    }

    #[test]
    fn security_policy_is_never_left_out() {
        let names: Vec<String> = (0..40).map(|n| format!(".cfq/policies/a{n}.md")).collect();
        let mut files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x\n")).collect();
        files.push((".cfq/policies/security.md", "No eval.\n"));
        let user = UserRepo::new(&files);
        let repository = user.repo();
        let found = policies(&Snapshot::of(&repository, &user.base).unwrap(), 1000);
        assert_eq!(found[0].content, "No eval.\n");
        assert_eq!(found[32].content, "[9 more policies omitted]\n");
    }

    #[test]
    fn default_security_policy_fits_into_a_prompt() {
        assert!(DEFAULT_SECURITY_POLICY.len() < 4096);
    }
}
