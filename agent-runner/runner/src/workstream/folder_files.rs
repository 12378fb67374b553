//! The text files in one folder of a commit.

use git2::{FileMode, ObjectType, Repository};
use serde::{Deserialize, Serialize};

use super::error::{GitError, parse_oid};
use super::object_reads::ObjectReader;
use super::size_limits::SizeLimits;
use super::start_point::{StartPoint, StartPointRequest};
use super::tree_files::read_text;

/// Maximum number of files that are read.
const MAX_FILES: usize = 32;
/// Maximum length of a file name, in bytes.
const MAX_NAME_BYTES: usize = 100;
/// Maximum size of a file that is read, in bytes.
pub(crate) const MAX_FILE_BYTES: usize = 16 * 1024;

/// A text file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextFile {
    /// Path in the repository, or another name under which it is shown.
    pub path: String,
    /// Its text; `None` if it is no text, or too large.
    pub text: Option<String>,
}

/// Which files to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderRequest {
    /// The repository and the commit.
    pub start: StartPointRequest,
    /// Path of the folder in the repository.
    pub folder: String,
    /// End of the names of the files.
    pub extension: String,
    /// Names of the files that come first.
    pub first: Vec<String>,
}

/// The files of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderFiles {
    pub start: StartPoint,
    /// None if the commit has no such folder.
    pub files: Vec<TextFile>,
    /// Number of further files, which were not read.
    pub left_out: usize,
}

impl FolderRequest {
    /// Reads the files.
    ///
    /// # Errors
    /// As [`StartPointRequest::open`], and [`GitError::Git`] if an object is missing.
    pub(super) fn answer(&self) -> Result<FolderFiles, GitError> {
        let (repository, start) = self.start.open()?;
        let limits = SizeLimits::default();
        let objects = ObjectReader::new(&repository, &limits)?;
        let tree = objects.tree(objects.commit(parse_oid(&start.base)?)?.tree_id())?;
        let first: Vec<&str> = self.first.iter().map(String::as_str).collect();
        let (files, left_out) = text_files(&repository, &tree, (&self.folder, &self.extension), &first);
        Ok(FolderFiles { start, files, left_out })
    }
}

/// The plain files directly in a folder whose names end with `extension`: those named in `first`, then by name, at most
/// 32. The number is that of the others. Long names, and those with control characters, are left out.
pub(super) fn text_files(
    repository: &Repository,
    tree: &git2::Tree<'_>,
    (folder, extension): (&str, &str),
    first: &[&str],
) -> (Vec<TextFile>, usize) {
    let entry = tree.get_path(folder.as_ref());
    let Some(folder_tree) = entry.ok().and_then(|entry| repository.find_tree(entry.id()).ok()) else {
        return (Vec::new(), 0);
    };
    let files: Vec<(String, git2::Oid)> = folder_tree
        .iter()
        .filter(|entry| entry.kind() == Some(ObjectType::Blob) && entry.filemode() != i32::from(FileMode::Link))
        .filter_map(|entry| Some((entry.name().ok()?.to_owned(), entry.id())))
        .filter(|(name, _)| is_accepted_name(name, extension))
        .collect();
    let (files, left_out) = select_files(files, first);
    let file = |(name, id): (String, git2::Oid)| TextFile {
        path: format!("{folder}/{name}"),
        text: read_text(repository, id, MAX_FILE_BYTES).ok().flatten(),
    };
    (files.into_iter().map(file).collect(), left_out)
}

/// Whether a file of this name is one of those that are read.
pub(crate) fn is_accepted_name(name: &str, extension: &str) -> bool {
    name.ends_with(extension) && name.len() <= MAX_NAME_BYTES && !name.contains(char::is_control)
}

/// Sorts files: those named in `first`, then by name. Returns the first 32, and the number of the others.
pub(crate) fn select_files<T>(mut files: Vec<(String, T)>, first: &[&str]) -> (Vec<(String, T)>, usize) {
    let place = |name: &str| first.iter().position(|first| *first == name).unwrap_or(first.len());
    files.sort_by(|(a, _), (b, _)| (place(a), a).cmp(&(place(b), b)));
    let left_out = files.len().saturating_sub(MAX_FILES);
    files.truncate(MAX_FILES);
    (files, left_out)
}
