//! The difference between the results of two iterations. Both are known as differences from the same base.

use std::borrow::Cow;
use std::collections::BTreeMap;

use cfq_agent_runner::edits::{Encoding, decode_as};
use cfq_agent_runner::workstream::file_bytes;
use cfq_proto::loop_step::{Artifact, ArtifactFile, FileEncoding};

use crate::exit;
use crate::file_diffs::{Section, sections};

/// A diff between the results of two iterations.
#[derive(Debug, Default)]
pub struct IterationDiff {
    pub text: String,
    /// As [`Artifact::windows_1252_in_diff`].
    pub windows_1252: Vec<u32>,
    /// Number of files in `text`.
    files: u32,
}

impl IterationDiff {
    fn push(&mut self, section: &str, is_windows_1252: bool) {
        if section.is_empty() {
            return;
        }
        if is_windows_1252 {
            self.windows_1252.push(self.files);
        }
        self.files += 1;
        self.text += section;
    }
}

/// The diff from the files of `from` to those of `to`.
pub fn diff_between(from: &Artifact, to: &Artifact) -> anyhow::Result<IterationDiff> {
    let (old, new) = (by_path(from), by_path(to));
    let mut paths: Vec<&str> = old.keys().chain(new.keys()).map(String::as_str).collect();
    paths.sort_unstable();
    paths.dedup();
    let mut difference = IterationDiff::default();
    for path in paths {
        let file = |artifact: &'_ Artifact| artifact.files.iter().find(|file| file.path == path).cloned();
        match (old.get(path), new.get(path)) {
            (Some((section, encoded)), None) => difference.push(&section.reversed(), *encoded),
            (None, Some((section, encoded))) => difference.push(section.text, *encoded),
            (Some((old_section, _)), Some((new_section, _))) => {
                // The content of a binary file is not in the results.
                if let (Some(old), Some(new)) = (file(from), file(to)) {
                    let is_windows_1252 = [&old, &new].iter().any(|file| file.encoding == FileEncoding::Windows1252);
                    let modes = (old_section.mode(), new_section.mode());
                    difference.push(&changes_of_file(&old, &new, modes, is_windows_1252)?, is_windows_1252);
                }
            }
            (None, None) => {}
        }
    }
    Ok(difference)
}

/// The part of each changed file, and whether its lines are decoded as Windows-1252.
fn by_path(artifact: &Artifact) -> BTreeMap<String, (Section<'_>, bool)> {
    let sections = (0..).zip(sections(&artifact.diff));
    sections.map(|(n, section)| (section.path.clone(), (section, artifact.windows_1252_in_diff.contains(&n)))).collect()
}

/// The diff between two contents of one file; empty if they are equal.
fn changes_of_file(
    old: &ArtifactFile,
    new: &ArtifactFile,
    modes: (Option<&str>, Option<&str>),
    is_windows_1252: bool,
) -> anyhow::Result<String> {
    let (old_bytes, new_bytes) = (bytes(old)?, bytes(new)?);
    // Those of the artifacts are only the changes from the base.
    let (old_mode, new_mode) = (modes.0.unwrap_or("100644"), modes.1.unwrap_or("100644"));
    let mode_changes = old_mode != new_mode && old.content.is_some() && new.content.is_some();
    if old_bytes == new_bytes && old.content.is_some() == new.content.is_some() && !mode_changes {
        return Ok(String::new());
    }
    let path = &new.path;
    let name = |file: &ArtifactFile, side: &str| match &file.content {
        Some(_) => quoted(&format!("{side}/{path}")),
        None => "/dev/null".to_owned(),
    };
    let mut text = format!("diff --git {} {}\n", quoted(&format!("a/{path}")), quoted(&format!("b/{path}")));
    match (&old.content, &new.content) {
        (None, Some(_)) => text += &format!("new file mode {new_mode}\n"),
        (Some(_), None) => text += &format!("deleted file mode {old_mode}\n"),
        _ if mode_changes => text += &format!("old mode {old_mode}\nnew mode {new_mode}\n"),
        _ => {}
    }
    let mut options = git2::DiffOptions::new();
    options.context_lines(3).indent_heuristic(true).force_text(true);
    let failed = |error: git2::Error| exit::failed(format!("cannot compare two results: {error}"));
    let mut patch =
        git2::Patch::from_buffers(&old_bytes, None, &new_bytes, None, Some(&mut options)).map_err(failed)?;
    let patch = patch.to_buf().map_err(failed)?;
    let patch = decode_as(&patch, if is_windows_1252 { Encoding::Windows1252 } else { Encoding::Utf8 });
    if let Some(start) = patch.find("\n@@ ") {
        text += &format!("--- {}\n+++ {}\n{}", name(old, "a"), name(new, "b"), &patch[start + 1..]);
    }
    Ok(text)
}

/// A name as git writes it.
fn quoted(name: &str) -> String {
    if name.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'"' && byte != b'\\') {
        return name.to_owned();
    }
    let mut text = String::from("\"");
    for byte in name.bytes() {
        match byte {
            b'"' | b'\\' => text.extend(['\\', char::from(byte)]),
            b' '..=b'~' => text.push(char::from(byte)),
            _ => text += &format!("\\{byte:03o}"),
        }
    }
    text + "\""
}

fn bytes(file: &ArtifactFile) -> anyhow::Result<Cow<'_, [u8]>> {
    let bytes = file_bytes(file).map_err(|error| exit::failed(error.with_causes()))?;
    Ok(bytes.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_of_content_mode_and_existence() {
        let text = |content: &str| ArtifactFile::text("a b.py", content);
        assert_eq!(changes_of_file(&text("x\n"), &text("x\n"), (None, None), false).unwrap(), "");
        let expected = "diff --git a/a b.py b/a b.py\n--- a/a b.py\n+++ b/a b.py\n@@ -1 +1 @@\n-x\n+y\n";
        assert_eq!(changes_of_file(&text("x\n"), &text("y\n"), (None, None), false).unwrap(), expected);
        let expected = "diff --git a/a b.py b/a b.py\nold mode 100644\nnew mode 100755\n";
        assert_eq!(
            changes_of_file(&text("x\n"), &text("x\n"), (Some("100644"), Some("100755")), false).unwrap(),
            expected
        );
        let removed =
            changes_of_file(&text("x\n"), &ArtifactFile::removed("a b.py"), (Some("100644"), None), false).unwrap();
        assert!(
            removed.contains("deleted file mode 100644\n--- a/a b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"),
            "{removed}"
        );
        assert_eq!(quoted("b/nä\"\n"), "\"b/n\\303\\244\\\"\\012\"");
    }
}
