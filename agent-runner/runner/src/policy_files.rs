//! The files of policies: their names, and those of the server, in which its owner writes how code in all repositories has
//! to be.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::workstream::{MAX_FILE_BYTES, TextFile, is_accepted_name, select_files};

/// End of the names of the files.
pub const POLICIES_EXTENSION: &str = ".md";
/// Policies that come first, and are cut off last.
pub const FIRST_POLICIES: [&str; 2] = ["security.md", "style.md"];

/// Prefix of the paths under which server policies are shown.
pub(crate) const SHOWN_FOLDER: &str = "server policies";

/// The policies of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerPolicies {
    /// The policies, in the order in which they are shown. What cannot be read has no text.
    pub files: Vec<TextFile>,
    /// Number of further policies, which were not read.
    pub left_out: usize,
    /// Why something cannot be read.
    pub problems: Vec<String>,
}

impl ServerPolicies {
    /// Reads the policies in a folder; symbolic links are followed. There are none if the folder does not exist. What
    /// cannot be read is in the result, so that a prompt says that a policy is missing.
    pub fn read(folder: &Path) -> Self {
        let mut policies = Self::default();
        let mut found = Vec::new();
        match names(folder, &mut found) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return policies,
            Err(error) => return Self::unreadable(format!("cannot read {}: {error}", folder.display())),
        }
        let (selected, left_out) = select_files(found, &FIRST_POLICIES);
        policies.left_out = left_out;
        for (name, path) in selected {
            match read_text(&path) {
                // It was removed since the folder was read, or is no file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Ok(None) => {}
                Ok(Some(text)) => policies.files.push(TextFile { path: format!("{SHOWN_FOLDER}/{name}"), text }),
                Err(error) => {
                    policies.files.push(TextFile { path: format!("{SHOWN_FOLDER}/{name}"), text: None });
                    policies.problems.push(format!("cannot read {}: {error}", path.display()));
                }
            }
        }
        policies
    }

    /// Policies that exist and cannot be read, for this reason.
    pub(crate) fn unreadable(problem: String) -> Self {
        let files = vec![TextFile { path: SHOWN_FOLDER.to_owned(), text: None }];
        Self { files, left_out: 0, problems: vec![problem] }
    }
}

/// Adds the accepted names in a folder, with their paths.
fn names(folder: &Path, found: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if let Some(name) = path.file_name().and_then(|name| name.to_str())
            && is_accepted_name(name, POLICIES_EXTENSION)
            && !name.starts_with('.')
        {
            found.push((name.to_owned(), path));
        }
    }
    Ok(())
}

/// The text of a file; the inner `None` if it is no text, or too large, the outer one if it is no file.
fn read_text(path: &Path) -> io::Result<Option<Option<String>>> {
    // Opening a FIFO would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8(bytes).ok().filter(|text| text.len() <= MAX_FILE_BYTES)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn policies_are_the_markdown_files_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert_eq!(ServerPolicies::read(&at("missing")), ServerPolicies::default());
        for (name, text) in [("z.md", "Short names.\n"), ("style.md", "Tabs.\n"), ("notes.txt", "x\n")] {
            fs::write(at(name), text).unwrap();
        }
        fs::create_dir(at("folder.md")).unwrap();
        symlink("nothing", at(".#style.md")).unwrap();
        symlink("nothing", at("gone.md")).unwrap();
        symlink("z.md", at("security.md")).unwrap();
        fs::write(at("large.md"), "x".repeat(MAX_FILE_BYTES + 1)).unwrap();
        let policies = ServerPolicies::read(folder.path());
        let files: Vec<_> = policies.files.iter().map(|file| (file.path.as_str(), file.text.as_deref())).collect();
        let expected = [
            ("server policies/security.md", Some("Short names.\n")),
            ("server policies/style.md", Some("Tabs.\n")),
            ("server policies/large.md", None),
            ("server policies/z.md", Some("Short names.\n")),
        ];
        assert_eq!(files, expected);
        assert!(policies.left_out == 0 && policies.problems.is_empty(), "{policies:?}");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("security.md"), "No eval.\n").unwrap();
        symlink("loop.md", folder.path().join("loop.md")).unwrap();
        let policies = ServerPolicies::read(folder.path());
        assert_eq!(policies.files[0].text.as_deref(), Some("No eval.\n"));
        assert_eq!((policies.files[1].path.as_str(), &policies.files[1].text), ("server policies/loop.md", &None));
        assert!(policies.problems[0].contains("loop.md"), "{policies:?}");

        let no_folder = folder.path().join("security.md");
        let policies = ServerPolicies::read(&no_folder);
        assert_eq!((policies.files.len(), policies.files[0].text.as_ref()), (1, None));
        assert!(policies.problems[0].contains("security.md"), "{policies:?}");
    }
}
