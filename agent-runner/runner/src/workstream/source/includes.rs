//! Finds the files that a git configuration includes: libgit2 opens them when it opens the repository. Only the form
//! that git writes is read; a configuration with another form of include is refused, so that no include is overlooked.

use std::path::{Path, PathBuf};

use super::git_files::{read_settings, unsafe_path};
use crate::workstream::error::{GitError, UnsafeGitPathReason};

/// Maximum number of files that a configuration may include. libgit2 nests them at most ten levels deep.
const MAX_INCLUDES: usize = 64;
/// Beginning of the sections `include` and `includeIf`, in lower case.
const SECTION: &str = "[include";

/// Files that the configuration at `config` includes, directly or through other files, whether they exist or not. The
/// conditions of `includeIf` are ignored.
///
/// # Errors
/// [`GitError::UnsafeGitPath`] for a file that is not a regular file, too large, or not in the form that git writes, or
/// if there are too many; and the errors of reading the files.
pub(super) fn included_files(config: &Path) -> Result<Vec<PathBuf>, GitError> {
    let mut files = vec![config.to_owned()];
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let text = read_settings(&file)?.unwrap_or_default();
        let paths = included_paths(&text).ok_or_else(|| unsafe_path(&file, UnsafeGitPathReason::UnclearInclude))?;
        for path in paths {
            let path = match path.strip_prefix("~/") {
                Some(path) => std::env::home_dir().unwrap_or_default().join(path),
                None => file.parent().unwrap_or(Path::new("/")).join(path),
            };
            if !files.contains(&path) {
                files.push(path);
            }
        }
        if files.len() > MAX_INCLUDES {
            return Err(unsafe_path(config, UnsafeGitPathReason::TooManyIncludes(MAX_INCLUDES)));
        }
    }
    Ok(files.split_off(1))
}

/// Values of `path` in the sections `include` and `includeIf`; `None` if they are not in the form that git writes: a
/// section and a value each on a line of its own.
fn included_paths(text: &str) -> Option<Vec<String>> {
    let mut paths = Vec::new();
    let mut in_include = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let lower = line.to_ascii_lowercase();
        if lower.contains(SECTION) {
            if !lower.starts_with(SECTION) || !lower.ends_with(']') || lower.matches(['[', ']']).count() > 2 {
                return None;
            }
            in_include = true;
        } else if lower.starts_with('[') {
            in_include = false;
        } else if in_include && !line.is_empty() {
            // Escapes, continued lines and bytes that are no text are read differently by libgit2.
            if line.contains(['\\', '\0', char::REPLACEMENT_CHARACTER]) {
                return None;
            }
            if let Some((key, value)) = line.split_once('=')
                && key.trim().eq_ignore_ascii_case("path")
            {
                paths.push(unquote(value.trim()));
            }
        }
    }
    Some(paths)
}

/// Removes the quotes, escapes and comment of a value in a git configuration.
pub(super) fn unquote(value: &str) -> String {
    let mut text = String::new();
    let mut quoted = false;
    let mut chars = value.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' => quoted = !quoted,
            '\\' => text.extend(chars.next()),
            '#' | ';' if !quoted => break,
            char => text.push(char),
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_read_as_git_writes_them_or_refused() {
        let text = "[core]\n\tpath = x\n[include]\n\tpath = ../a # b\n[INCLUDEIF \"gitdir:~/w/\"]\n\tPath = \"~/c d\"\n\
                    [remote \"include\"]\n\tpath = y\n# [include] path = z\n";
        assert_eq!(included_paths(text).unwrap(), ["../a", "~/c d"]);
        for unclear in [
            "[include] path = a\n",
            "[include] path = a # ]\n",
            "[include] path = a]\n",
            "[core][include]\npath = a\n",
            "\u{feff}[include]\npath = a\n",
            "[include]\npath = a\\\nb\n",
            "[include]\npath = a\\tb\n",
            "[include]\npath = a\0b\n",
        ] {
            assert_eq!(included_paths(unclear), None, "{unclear:?}");
        }
    }
}
