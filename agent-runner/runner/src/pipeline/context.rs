//! Context files of a prompt: files of the repository at the base commit that the task lists or names.

use cfq_edits::{decode, repo_path};

use cfq_proto::task::TaskSpec;

use super::budget::truncate;
use crate::edits::possible_paths;
use crate::workstream::Snapshot;

/// Maximum size of a context file, in bytes. Larger files are not read, because a prompt shows only their beginning.
const MAX_CONTEXT_FILE_BYTES: usize = 8 * 1024 * 1024;

/// Maximum number of files that a prompt shows because the description names them.
const MAX_NAMED_FILES: usize = 8;

/// Paths of the files of the base that the description names by their paths. None for a review: the author of the change
/// chose its description.
pub fn named_files(spec: &TaskSpec, base: &Snapshot<'_>) -> Vec<String> {
    if spec.review.is_some() {
        return Vec::new();
    }
    let named = possible_paths(&spec.description).filter(|path| base.size(path).is_some());
    named.take(MAX_NAMED_FILES).map(str::to_owned).collect()
}

/// Paths of the files that a prompt shows: the task's context files, then the other [`named_files`].
pub fn shown_paths(spec: &TaskSpec, base: &Snapshot<'_>) -> Vec<String> {
    let mut shown = spec.context_files.clone();
    let is_listed = |path: &String| spec.context_files.iter().any(|listed| repo_path(listed).as_ref() == Ok(path));
    shown.extend(named_files(spec, base).into_iter().filter(|path| !is_listed(path)));
    shown
}

/// One context file as the prompt shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextFile {
    /// Path as the task gives it.
    pub path: String,
    /// Content, possibly truncated, or a note why there is none.
    pub content: String,
    /// Whether the content is truncated.
    pub is_truncated: bool,
}

/// Reads the context files in the task's order, at most `bytes` in total: each file may use the bytes that the files
/// before it did not use. A missing or binary file is listed with the reason instead of its content, so that the model
/// knows that it was requested.
pub fn context_files(paths: &[String], base: &Snapshot<'_>, bytes: usize) -> Vec<ContextFile> {
    let mut left = bytes;
    paths
        .iter()
        .map(|path| {
            let mut is_truncated = false;
            let content = match repo_path(path) {
                Err(_) => "[not a path inside the repository]\n".to_owned(),
                Ok(plain) if base.size(&plain).is_some_and(|size| size > MAX_CONTEXT_FILE_BYTES) => {
                    "[file too large]\n".to_owned()
                }
                Ok(plain) => match base.read(&plain).as_deref().map(decode) {
                    None => "[file not found, or too large]\n".to_owned(),
                    Some(Err(_)) => "[not a text file]\n".to_owned(),
                    Some(Ok((text, _))) => {
                        let shown = truncate(&text, left);
                        is_truncated = shown != *text;
                        left = left.saturating_sub(shown.len());
                        shown
                    }
                },
            };
            ContextFile { path: path.clone(), content, is_truncated }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::UserRepo;

    #[test]
    fn files_that_the_description_names_are_shown() {
        let user =
            UserRepo::new(&[("src/parse.rs", "x\n"), ("Makefile", "x\n"), ("Cargo.toml", "x\n"), ("a.py", "x\n")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let shown = |description: &str, listed: &[&str]| {
            let spec = serde_json::json!({ "description": description, "repo": "/r", "context_files": listed });
            shown_paths(&serde_json::from_value(spec).unwrap(), &base).join(" ")
        };
        for (description, listed, expected) in [
            ("Fix the bug in src/parse.rs.", &[][..], "src/parse.rs"),
            ("Fix `./src/parse.rs:12`, Cargo.toml and the Makefile", &[], "src/parse.rs Cargo.toml Makefile"),
            ("Use a.py in (src/parse.rs).", &["./a.py"], "./a.py src/parse.rs"),
            ("See `src/parse.rs`. Then \"a.py\":3, a.py", &[], "src/parse.rs a.py"),
            ("Fix parse.rs in src", &[], ""),
            ("Write lib/parse.rs and b.py, e.g. with ../a.py or src/", &[], ""),
        ] {
            assert_eq!(shown(description, listed), expected, "{description}");
        }
        let words: String = (0..1000).map(|n| format!("self.x{n} ")).collect();
        assert_eq!(shown(&format!("{words} in src/parse.rs"), &[]), "src/parse.rs");
        let review = serde_json::json!({
            "description": "Fix a.py", "repo": "/r", "review": { "head": user.base, "depth": "quick" },
        });
        assert_eq!(shown_paths(&serde_json::from_value(review).unwrap(), &base), [""; 0]);
    }

    #[test]
    fn files_share_the_budget_and_missing_ones_are_listed() {
        let user = UserRepo::new(&[("a.py", "x = 1\n"), ("b.py", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyy\nzzzz\n")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let paths = ["a.py", "../x", "none.py", "b.py"].map(str::to_owned);
        let files: [ContextFile; 4] = context_files(&paths, &base, 37).try_into().unwrap();
        assert_eq!(files[0].content, "x = 1\n");
        assert!(files[1].content.contains("not a path"));
        assert!(files[2].content.contains("not found"));
        assert!(files[3].content.contains("5 more bytes omitted"), "{}", files[3].content);
        assert_eq!(files.map(|file| file.is_truncated), [false, false, false, true]);
    }
}
