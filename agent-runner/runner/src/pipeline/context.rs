//! The files of the repository that belong in the prompt, as the base has them.

use super::budget::cut;
use crate::workstream::{Snapshot, repo_path};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextFile {
    pub path: String,
    pub content: String,
}

/// In the task's order, within `bytes` together: each file may use what those before it left. What is not there or not
/// text is named with the reason instead of its content, so that nobody wonders.
pub fn context_files(paths: &[String], base: &Snapshot<'_>, bytes: usize) -> Vec<ContextFile> {
    let mut left = bytes;
    paths
        .iter()
        .map(|path| {
            let content = match repo_path(path) {
                Err(_) => "[not a path inside the repository]\n".to_owned(),
                Ok(plain) => match base.read(&plain).map(String::from_utf8) {
                    None => "[there is no such file]\n".to_owned(),
                    Some(Err(_)) => "[not a text file]\n".to_owned(),
                    Some(Ok(text)) => {
                        let shown = cut(&text, left);
                        left = left.saturating_sub(shown.len());
                        shown
                    }
                },
            };
            ContextFile { path: path.clone(), content }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn files_share_the_budget_and_missing_ones_are_named() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyy\nzzzz\n")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let paths = ["a.py", "../x", "none.py", "b.py"].map(str::to_owned);
        let files = context_files(&paths, &base, 37);
        assert_eq!(files[0].content, "x = 1\n");
        assert!(files[1].content.contains("not a path"));
        assert!(files[2].content.contains("no such file"));
        assert!(files[3].content.contains("5 more bytes are left out"), "{}", files[3].content);
    }
}
