//! Which paths an edit may name: a plain relative path of this repository's tree, and nothing else. Everything is refused
//! that could reach outside the worktree or into git's own folder on any file system the branch may later be checked out on.

/// Longest path and longest part of one, in bytes: what common file systems take.
const LONGEST_PATH: usize = 1024;
const LONGEST_PART: usize = 255;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the path {path:?} {why}")]
pub struct PathProblem {
    pub path: String,
    pub why: &'static str,
}

/// The path in its one spelling: with `/`, without a leading `./`.
pub fn repo_path(text: &str) -> Result<String, PathProblem> {
    let refuse = |why| Err(PathProblem { path: text.to_owned(), why });
    let mut path = text.trim();
    while let Some(rest) = path.strip_prefix("./") {
        path = rest.trim_start_matches('/');
    }
    if path.is_empty() {
        return refuse("is empty");
    }
    if path.starts_with('/') || path.starts_with('~') {
        return refuse("is not relative to the repository");
    }
    if path.ends_with('/') {
        return refuse("names a folder");
    }
    if path.contains('\\') || path.contains(':') || path.chars().any(char::is_control) {
        return refuse("has a character that paths here may not have");
    }
    if path.len() > LONGEST_PATH {
        return refuse("is too long");
    }
    for part in path.split('/') {
        match part {
            "" | "." => return refuse("is not written plainly"),
            ".." => return refuse("leaves the repository"),
            // Easily lost on the way, and never meant.
            _ if part.trim() != part => return refuse("has a part that begins or ends with a space"),
            _ if part.len() > LONGEST_PART => return refuse("has a part that is too long"),
            _ if is_git_folder(part) => return refuse("lies in git's own folder"),
            _ => {}
        }
    }
    Ok(path.to_owned())
}

/// `.git` as any file system may read it: in any case, with trailing dots or spaces, as its DOS short name, or with
/// characters that HFS+ ignores.
fn is_git_folder(part: &str) -> bool {
    let visible: String = part
        .chars()
        .filter(
            |c| !matches!(*c, '\u{200c}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{206a}'..='\u{206f}' | '\u{feff}'),
        )
        .collect();
    let folded = visible.trim_end_matches(['.', ' ']).to_ascii_lowercase();
    folded == ".git" || folded.starts_with("git~")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn plain_paths_pass() {
        for (text, path) in [
            ("a.py", "a.py"),
            ("./src/a b.rs", "src/a b.rs"),
            (".github/x.yml", ".github/x.yml"),
            (".gitignore", ".gitignore"),
        ] {
            assert_eq!(repo_path(text).unwrap(), path);
        }
    }

    #[test]
    fn nothing_leaves_the_repository() {
        for bad in [
            "",
            "/etc/passwd",
            "~/.ssh/id",
            "../a",
            "a/../../b",
            "a/..",
            "a//b",
            "a/./b",
            "a/",
            ".git/config",
            ".GIT/hooks/x",
            "a/.git/x",
            ".git./x",
            ".git /x",
            "git~1/x",
            ".g\u{200d}it/config",
            "a\\b",
            "C:/x",
            "a\nb",
            "a\0b",
            "./ a",
            "a /b",
        ] {
            assert!(repo_path(bad).is_err(), "{bad:?}");
        }
        assert!(repo_path(&"x/".repeat(600)).is_err());
        assert!(repo_path(&"x".repeat(256)).is_err());
    }

    proptest! {
        #[test]
        fn what_passes_stays_below_the_root(text in "[a./~ \\\\:git]{0,24}") {
            if let Ok(path) = repo_path(&text) {
                let joined = std::path::Path::new("/root/x").join(&path);
                prop_assert!(joined.starts_with("/root/x"));
                prop_assert!(joined.components().all(|c| !matches!(c, std::path::Component::ParentDir)));
                prop_assert_eq!(repo_path(&path).unwrap(), path);
            }
        }
    }
}
