//! The text files in one folder of a commit.

use git2::{FileMode, ObjectType, Repository};
use serde::{Deserialize, Serialize};

use super::error::{GitError, git_context, parse_oid};
use super::source::find_source_repository;
use super::start_point::{StartPoint, StartPointRequest};
use super::tree_files::read_text;

/// Maximum number of files that are read.
const MAX_FILES: usize = 32;
/// Maximum size of a file that is read, in bytes.
const MAX_FILE_BYTES: usize = 16 * 1024;

/// A text file of a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextFile {
    /// Path in the repository.
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
}

/// The files of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderFiles {
    pub start: StartPoint,
    /// Sorted by path; none if the commit has no such folder.
    pub files: Vec<TextFile>,
}

impl FolderRequest {
    /// Reads the files.
    ///
    /// # Errors
    /// As [`StartPointRequest::find`], and [`GitError::Git`] if an object is missing.
    pub(super) fn answer(&self) -> Result<FolderFiles, GitError> {
        let start = self.start.find()?;
        let repository = find_source_repository(&self.start.dir)?;
        let commit =
            git_context(format!("read commit {}", start.base), repository.find_commit(parse_oid(&start.base)?))?;
        let tree = git_context(format!("read the tree of {}", start.base), commit.tree())?;
        let files = text_files(&repository, &tree, &self.folder, &self.extension);
        Ok(FolderFiles { start, files })
    }
}

/// The plain files directly in a folder whose names end with `extension`, sorted by path: the first 32.
pub(super) fn text_files(
    repository: &Repository,
    tree: &git2::Tree<'_>,
    folder: &str,
    extension: &str,
) -> Vec<TextFile> {
    let entry = tree.get_path(folder.as_ref());
    let Some(folder_tree) = entry.ok().and_then(|entry| repository.find_tree(entry.id()).ok()) else {
        return Vec::new();
    };
    let mut files: Vec<(String, git2::Oid)> = folder_tree
        .iter()
        .filter(|entry| entry.kind() == Some(ObjectType::Blob) && entry.filemode() != i32::from(FileMode::Link))
        .filter_map(|entry| Some((entry.name().ok()?.to_owned(), entry.id())))
        .filter(|(name, _)| name.ends_with(extension))
        .collect();
    files.sort();
    files.truncate(MAX_FILES);
    let file = |(name, id): (String, git2::Oid)| TextFile {
        path: format!("{folder}/{name}"),
        text: read_text(repository, id, MAX_FILE_BYTES),
    };
    files.into_iter().map(file).collect()
}
