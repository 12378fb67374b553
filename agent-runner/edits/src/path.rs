//! Validation of paths in edits: only plain relative paths inside the repository's tree are accepted. A path is refused
//! if it could lead outside the worktree or into the `.git` folder on any file system on which the branch may later be
//! checked out.

/// Maximum length of a path, in bytes: the limit of common file systems.
const MAX_PATH_BYTES: usize = 1024;
/// Maximum length of one path component, in bytes: the limit of common file systems.
const MAX_COMPONENT_BYTES: usize = 255;

/// A path that an edit may not name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the path {path:?} {reason}")]
pub struct PathProblem {
    /// The path as written in the reply.
    pub path: String,
    /// The rule that the path breaks.
    pub reason: InvalidPathReason,
}

/// Rule that a path breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPathReason {
    #[error("is empty")]
    Empty,
    #[error("is not relative to the repository")]
    NotRelative,
    #[error("names a folder")]
    Folder,
    /// A backslash, a colon or a control character.
    #[error("has a character that is not allowed in paths")]
    InvalidCharacter,
    #[error("is too long")]
    TooLong,
    /// An empty component or `.`.
    #[error("is not normalized")]
    NotNormalized,
    #[error("leaves the repository")]
    LeavesRepository,
    #[error("has a component that begins or ends with a space")]
    SurroundingSpace,
    #[error("has a component that is too long")]
    ComponentTooLong,
    #[error("lies in the .git folder")]
    GitFolder,
}

/// Returns the normalized path: with `/`, without a leading `./`.
///
/// # Errors
/// A [`PathProblem`] with the first rule that `text` breaks.
pub fn repo_path(text: &str) -> Result<String, PathProblem> {
    let refuse = |reason| Err(PathProblem { path: text.to_owned(), reason });
    let mut path = text.trim();
    while let Some(rest) = path.strip_prefix("./") {
        path = rest.trim_start_matches('/');
    }
    if path.is_empty() {
        return refuse(InvalidPathReason::Empty);
    }
    if path.starts_with('/') || path.starts_with('~') {
        return refuse(InvalidPathReason::NotRelative);
    }
    if path.ends_with('/') {
        return refuse(InvalidPathReason::Folder);
    }
    if path.contains('\\') || path.contains(':') || path.chars().any(char::is_control) {
        return refuse(InvalidPathReason::InvalidCharacter);
    }
    if path.len() > MAX_PATH_BYTES {
        return refuse(InvalidPathReason::TooLong);
    }
    for component in path.split('/') {
        match component {
            "" | "." => return refuse(InvalidPathReason::NotNormalized),
            ".." => return refuse(InvalidPathReason::LeavesRepository),
            // Spaces at the start or end of a component are easily lost in transport and never intended.
            _ if component.trim() != component => return refuse(InvalidPathReason::SurroundingSpace),
            _ if component.len() > MAX_COMPONENT_BYTES => return refuse(InvalidPathReason::ComponentTooLong),
            _ if is_git_folder(component) => return refuse(InvalidPathReason::GitFolder),
            _ => {}
        }
    }
    Ok(path.to_owned())
}

/// True if some file system resolves `component` to `.git`: in upper or lower case, with trailing dots or spaces, as a
/// DOS short name, or with characters that HFS+ ignores.
fn is_git_folder(component: &str) -> bool {
    let visible: String = component
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
    fn plain_paths_are_accepted() {
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
    fn paths_outside_the_repository_are_refused() {
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
        fn accepted_paths_stay_below_the_root(text in "[a./~ \\\\:git]{0,24}") {
            if let Ok(path) = repo_path(&text) {
                let joined = std::path::Path::new("/root/x").join(&path);
                prop_assert!(joined.starts_with("/root/x"));
                prop_assert!(joined.components().all(|c| !matches!(c, std::path::Component::ParentDir)));
                prop_assert_eq!(repo_path(&path).unwrap(), path);
            }
        }
    }
}
