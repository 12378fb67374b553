//! Policies: files in which the owners of a project, or of the server, write how code has to be. Alpha and Beta see
//! them in every prompt of a task. Those of a project are those of the task's base commit, so a result cannot change
//! the policies by which it is reviewed.

use super::budget::truncate;
use super::context::ContextFile;
use crate::checks::POLICIES_FOLDER;
use crate::policy_files::{FIRST_POLICIES, POLICIES_EXTENSION, SHOWN_FOLDER, ServerPolicies};
use crate::workstream::{Snapshot, TextFile};

/// The security policy of a project that has none of its own: general rules, ordered like the risks in the
/// [OWASP Top Ten](https://owasp.org/www-project-top-ten/). Prompts do not contain it.
pub const DEFAULT_SECURITY_POLICY: &str = include_str!("policies/security.md");

/// The server policies and those of a commit, at most `bytes` of text in total. The server policies get half of it if
/// both exist, and the others what is left.
pub(super) fn policies(base: &Snapshot<'_>, server: &ServerPolicies, bytes: usize) -> Vec<ContextFile> {
    let (files, files_left_out) = base.text_files(POLICIES_FOLDER, POLICIES_EXTENSION, &FIRST_POLICIES);
    let of_server = if files.is_empty() { bytes } else { bytes / 2 };
    let (mut shown, bytes_shown) = fitting(&server.files, server.left_out, SHOWN_FOLDER, of_server);
    shown.extend(fitting(&files, files_left_out, POLICIES_FOLDER, bytes - bytes_shown).0);
    shown
}

/// The policies of a folder, and the number of their bytes: each may use the bytes that those before it did not use.
fn fitting(files: &[TextFile], mut files_left_out: usize, folder: &str, bytes: usize) -> (Vec<ContextFile>, usize) {
    let (mut shown, mut bytes_left) = (Vec::new(), bytes);
    for file in files {
        let content = match &file.text {
            Some(_) if bytes_left == 0 => {
                files_left_out += 1;
                continue;
            }
            Some(text) => truncate(text, bytes_left),
            None => "[cannot be read: not a text file, too large, or not accessible]\n".to_owned(),
        };
        bytes_left = bytes_left.saturating_sub(content.len());
        let is_truncated = file.text.as_ref().is_some_and(|text| *text != content);
        shown.push(ContextFile { path: file.path.clone(), content, is_truncated });
    }
    if files_left_out > 0 {
        let content = format!("[{files_left_out} more policies omitted]\n");
        shown.push(ContextFile { path: folder.to_owned(), content, is_truncated: false });
    }
    (shown, bytes - bytes_left)
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
        let none = ServerPolicies::default();
        let found: Vec<(String, String)> =
            policies(&base, &none, 1000).into_iter().map(|file| (file.path, file.content)).collect();
        let expected = [(".cfq/policies/style.md", "Use four spaces.\n"), (".cfq/policies/b.md", "No globals.\n")];
        assert_eq!(found, expected.map(|(path, text)| (path.to_owned(), text.to_owned())));
        let short = policies(&base, &none, 18);
        assert!(short[1].content.contains("11 more bytes omitted"), "{short:?}");
        let shorter = policies(&base, &none, 17);
        assert_eq!(shorter[1].content, "[1 more policies omitted]\n");
    }

    #[test]
    fn server_policies_come_first_and_leave_room_for_the_others() {
        let user = UserRepo::new(&[(".cfq/policies/security.md", "No eval.\n")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let file = |name: &str, text: Option<String>| TextFile { path: format!("{SHOWN_FOLDER}/{name}"), text };
        let long = "Full words.\n".repeat(100);
        let files = vec![file("a.md", Some(long.clone())), file("b.md", Some("x\n".into())), file("c.md", None)];
        let server = ServerPolicies { files, left_out: 2, problems: Vec::new() };
        let shown = policies(&base, &server, 200);
        let paths: Vec<&str> = shown.iter().map(|file| file.path.as_str()).collect();
        let expected = ["server policies/a.md", "server policies/c.md", "server policies", ".cfq/policies/security.md"];
        assert_eq!(paths, expected);
        assert!(shown[0].content.len() < 150 && shown[0].is_truncated, "{shown:?}");
        assert!(shown[1].content.starts_with("[cannot be read"), "{shown:?}");
        assert_eq!(shown[2].content, "[3 more policies omitted]\n");
        assert_eq!(shown[3].content, "No eval.\n");
        let alone = UserRepo::new(&[("a.py", "x\n")]);
        let repository = alone.repo();
        let base = Snapshot::of(&repository, &alone.base).unwrap();
        assert_eq!(policies(&base, &server, long.len() + 100)[0].content, long, "without policies of the repository");
    }

    #[test]
    fn security_policy_is_never_left_out() {
        let names: Vec<String> = (0..40).map(|n| format!(".cfq/policies/a{n}.md")).collect();
        let mut files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x\n")).collect();
        files.push((".cfq/policies/security.md", "No eval.\n"));
        let user = UserRepo::new(&files);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let found = policies(&base, &ServerPolicies::default(), 1000);
        assert_eq!(found[0].content, "No eval.\n");
        assert_eq!(found[32].content, "[9 more policies omitted]\n");
    }

    #[test]
    fn default_security_policy_fits_into_a_prompt() {
        assert!(DEFAULT_SECURITY_POLICY.len() < 4096);
    }
}
