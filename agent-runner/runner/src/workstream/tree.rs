//! Git trees, read and built without a working folder: reads the files of the base commit, and builds the base's tree
//! with an artifact's files replaced.

use std::borrow::Cow;
use std::path::Path;

use cfq_edits::{BaseFile, BaseFiles, Encoding, FileProblem, NotWritableReason, decode, encode};
use cfq_proto::loop_step::{ArtifactFile, FileEncoding};
use git2::build::TreeUpdateBuilder;
use git2::{ErrorClass, ErrorCode, FileMode, ObjectType, Oid, Repository, Tree, TreeWalkMode, TreeWalkResult};
use sha2::{Digest, Sha256};

use super::error::{GitError, git_context, parse_oid};
use super::folder_files::{TextFile, text_files};

/// Maximum size of a file that is read, in bytes: far above any source file.
const MAX_READ_BYTES: usize = 16 << 20;
/// Maximum number of files and folders that are searched for a file name.
const MAX_SEARCHED_ENTRIES: usize = 100_000;
/// First bytes of every Git LFS pointer file.
const LFS_POINTER_PREFIX: &[u8] = b"version https://git-lfs.github.com/spec/";

/// SHA-256 over the files in path order, in hexadecimal: equal content gives equal hashes, independent of the commit.
pub fn content_hash(files: &[ArtifactFile]) -> String {
    let mut files: Vec<&ArtifactFile> = files.iter().collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut hash = Sha256::new();
    for file in files {
        let content = file.content.as_deref();
        hash.update((file.path.len() as u64).to_le_bytes());
        hash.update(file.path.as_bytes());
        hash.update([u8::from(content.is_some())]);
        hash.update((content.map_or(0, str::len) as u64).to_le_bytes());
        hash.update(content.unwrap_or_default().as_bytes());
        // Nothing in the ordinary case, so that recorded hashes stay as they are.
        if let FileEncoding::Windows1252 = file.encoding {
            hash.update(b"windows-1252");
        }
        if let Some(executable) = file.executable {
            hash.update([b'x', u8::from(executable)]);
        }
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// The encoding in which a file of an artifact is stored.
pub(crate) fn encoding_of(file: &ArtifactFile) -> Encoding {
    match file.encoding {
        FileEncoding::Utf8 => Encoding::Utf8,
        FileEncoding::Windows1252 => Encoding::Windows1252,
    }
}

/// The bytes of an artifact's file in the repository; `None` if the artifact removes it.
///
/// # Errors
/// [`GitError::NotEncodable`] for a character that the file's encoding lacks. Edits with one are refused, so only a
/// forged artifact has it.
pub fn file_bytes(file: &ArtifactFile) -> Result<Option<Cow<'_, [u8]>>, GitError> {
    let encoded = file.content.as_deref().map(|content| encode(content, encoding_of(file))).transpose();
    encoded.map_err(|character| GitError::NotEncodable { path: file.path.clone(), character })
}

/// The tree of one commit: files are read from it, and new trees are built from it.
pub struct Snapshot<'r> {
    repository: &'r Repository,
    tree: Tree<'r>,
}

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("tree", &self.tree.id()).finish()
    }
}

/// A path that is not a readable text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not a plain text file in UTF-8")]
pub struct TextFileProblem;

impl<'r> Snapshot<'r> {
    pub(crate) fn of(repository: &'r Repository, commit: &str) -> Result<Self, GitError> {
        let commit = git_context(format!("find commit {commit}"), repository.find_commit(parse_oid(commit)?))?;
        Ok(Self { repository, tree: git_context(format!("read the tree of commit {}", commit.id()), commit.tree())? })
    }

    pub(crate) fn tree(&self) -> &Tree<'r> {
        &self.tree
    }

    /// Returns a file's size in bytes without reading it; `None` if the path does not exist or is not a plain file.
    pub fn size(&self, path: &str) -> Option<usize> {
        let entry = self.tree.get_path(path.as_ref()).ok()?;
        if entry.kind() != Some(ObjectType::Blob) || entry.filemode() == i32::from(FileMode::Link) {
            return None;
        }
        Some(self.repository.odb().ok()?.read_header(entry.id()).ok()?.0)
    }

    /// Path of the repository.
    pub(crate) fn repository_path(&self) -> &'r Path {
        self.repository.path()
    }

    /// Returns the id of a file's content; `None` if the path does not exist or is not a plain file.
    pub(crate) fn file_id(&self, path: &str) -> Option<Oid> {
        let entry = self.tree.get_path(path.as_ref()).ok()?;
        let is_plain = entry.kind() == Some(ObjectType::Blob) && entry.filemode() != i32::from(FileMode::Link);
        is_plain.then(|| entry.id())
    }

    /// Returns a file's bytes; `None` if the path does not exist, is not a plain file, or is too large to be read.
    pub fn read(&self, path: &str) -> Option<Vec<u8>> {
        let entry = self.tree.get_path(path.as_ref()).ok()?;
        if entry.kind() != Some(ObjectType::Blob) || entry.filemode() == i32::from(FileMode::Link) {
            return None;
        }
        if self.is_too_large(entry.id()) {
            return None;
        }
        Some(self.repository.find_blob(entry.id()).ok()?.content().to_vec())
    }

    fn is_too_large(&self, file: Oid) -> bool {
        let header = self.repository.odb().and_then(|odb| odb.read_header(file));
        header.is_ok_and(|(bytes, _)| bytes > MAX_READ_BYTES)
    }

    /// Returns the text files directly in a folder whose names end with `extension`, those named in `first` first, and
    /// the number of files that are left out because there are too many.
    pub(crate) fn text_files(&self, folder: &str, extension: &str, first: &[&str]) -> (Vec<TextFile>, usize) {
        text_files(self.repository, &self.tree, (folder, extension), first)
    }

    /// Returns a file as text, decoded as [`decode`] does; `None` also if it is not a text file.
    pub fn read_text(&self, path: &str) -> Option<String> {
        Some(decode(&self.read(path)?).ok()?.0.into_owned())
    }

    /// Returns the text file at `path`, `None` if nothing is there, or the problem if it is not a readable text file.
    ///
    /// # Errors
    /// A [`GitError`] if the repository cannot be read.
    pub fn text_file(&self, path: &str) -> Result<Result<Option<String>, TextFileProblem>, GitError> {
        let entry = match self.tree.get_path(path.as_ref()) {
            Ok(entry) => entry,
            // A missing object is also "not found", but an error of the object database.
            Err(error) if error.code() == ErrorCode::NotFound && error.class() != ErrorClass::Odb => {
                let is_reachable = self.writable(path).is_ok();
                return Ok(if is_reachable { Ok(None) } else { Err(TextFileProblem) });
            }
            Err(error) => return git_context(format!("find {path}"), Err(error)),
        };
        let is_plain = entry.kind() == Some(ObjectType::Blob) && entry.filemode() != i32::from(FileMode::Link);
        if !is_plain || self.is_too_large(entry.id()) {
            return Ok(Err(TextFileProblem));
        }
        let blob = git_context(format!("read {path}"), self.repository.find_blob(entry.id()))?;
        Ok(String::from_utf8(blob.content().to_vec()).map(Some).map_err(|_| TextFileProblem))
    }

    /// Checks that a file may be written or removed at `path`, which is a result of [`cfq_edits::repo_path`].
    ///
    /// # Errors
    /// A [`FileProblem`] if, in the tree, `path` is a folder, symbolic link, submodule, LFS pointer or very large file,
    /// or is below a file, symbolic link or submodule.
    fn writable(&self, path: &str) -> Result<(), FileProblem> {
        let refuse = |reason| Err(FileProblem { path: path.to_owned(), reason });
        let components: Vec<&str> = path.split('/').collect();
        for end in 1..components.len() {
            match self.tree.get_path(components[..end].join("/").as_ref()) {
                Ok(entry) if entry.kind() == Some(ObjectType::Tree) => {}
                Ok(entry) if entry.kind() == Some(ObjectType::Commit) => {
                    return refuse(NotWritableReason::InSubmodule);
                }
                Ok(entry) if entry.filemode() == i32::from(FileMode::Link) => {
                    return refuse(NotWritableReason::ThroughSymlink);
                }
                Ok(_) => return refuse(NotWritableReason::ParentIsFile),
                Err(_) => return Ok(()),
            }
        }
        match self.tree.get_path(path.as_ref()) {
            Ok(entry) if entry.kind() == Some(ObjectType::Tree) => refuse(NotWritableReason::Folder),
            Ok(entry) if entry.kind() == Some(ObjectType::Commit) => refuse(NotWritableReason::Submodule),
            Ok(entry) if entry.filemode() == i32::from(FileMode::Link) => refuse(NotWritableReason::Symlink),
            Ok(entry) if self.is_too_large(entry.id()) => refuse(NotWritableReason::TooLarge),
            Ok(_) if self.read(path).is_some_and(|b| b.starts_with(LFS_POINTER_PREFIX)) => {
                refuse(NotWritableReason::Lfs)
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Writes the tree with `files` replaced, added or removed, and returns its id. A replaced file keeps its mode, and a
    /// new file is not executable, unless the artifact states the mode.
    pub(crate) fn write_tree_with(&self, files: &[ArtifactFile]) -> Result<Oid, GitError> {
        let mut update = TreeUpdateBuilder::new();
        for file in files {
            let existing = self.tree.get_path(file.path.as_ref()).ok();
            match file_bytes(file)? {
                Some(bytes) => {
                    let blob = git_context(format!("store {}", file.path), self.repository.blob(&bytes))?;
                    let was_executable = existing.is_some_and(|e| e.filemode() == i32::from(FileMode::BlobExecutable));
                    let executable = file.executable.unwrap_or(was_executable);
                    let mode = if executable { FileMode::BlobExecutable } else { FileMode::Blob };
                    update.upsert(file.path.as_str(), blob, mode);
                }
                None if existing.is_some() => {
                    update.remove(file.path.as_str());
                }
                None => {}
            }
        }
        git_context("build a tree", update.create_updated(self.repository, &self.tree))
    }
}

impl Snapshot<'_> {
    /// The path of a file with the name of the file at `path` in another folder, if there is exactly one among the first
    /// files of the tree.
    pub fn find_by_file_name(&self, path: &str) -> Option<String> {
        let name = path.rsplit('/').next()?;
        let (mut found, mut seen) = (Vec::new(), 0);
        let walked = self.tree.walk(TreeWalkMode::PreOrder, |folder, entry| {
            seen += 1;
            if entry.kind() == Some(ObjectType::Blob) && entry.name() == Ok(name) {
                found.push(format!("{folder}{name}"));
            }
            match seen < MAX_SEARCHED_ENTRIES && found.len() < 2 {
                true => TreeWalkResult::Ok,
                false => TreeWalkResult::Abort,
            }
        });
        // A walk that was ended early returns an error.
        drop(walked);
        if found.len() == 1 { found.pop() } else { None }
    }
}

impl BaseFiles for Snapshot<'_> {
    fn check_writable(&self, path: &str) -> Result<(), FileProblem> {
        self.writable(path)
    }

    fn size(&self, path: &str) -> Option<usize> {
        Self::size(self, path)
    }

    fn read(&self, path: &str) -> Option<BaseFile> {
        let bytes = Self::read(self, path)?;
        let entry = self.tree.get_path(path.as_ref()).ok()?;
        Some(BaseFile { bytes, executable: entry.filemode() == i32::from(FileMode::BlobExecutable) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};

    #[test]
    fn content_hash_does_not_depend_on_file_order() {
        let (a, b) = (file("a", "1"), file("b", "2"));
        assert_eq!(content_hash(&[a.clone(), b.clone()]), content_hash(&[b.clone(), a.clone()]));
        assert_ne!(content_hash(std::slice::from_ref(&a)), content_hash(&[a.clone(), b]));
        assert_ne!(content_hash(&[file("a", "")]), content_hash(&[ArtifactFile::removed("a")]));
        // Recorded hashes stay as they are.
        let recorded = "7121b6d45dbe707711eabfcb7c4c24e445dd5c854277dd8db1f35d5276f03e26";
        assert_eq!(content_hash(&[file("add.py", "x = 1\n"), ArtifactFile::removed("old.py")]), recorded);
    }

    #[test]
    fn mode_and_encoding_of_an_artifact_are_stored() {
        let user = UserRepo::new(&[("a.sh", "x\n"), ("d/a.sh", "x\n"), ("once.py", "x\n")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let executable = ArtifactFile { executable: Some(true), ..file("a.sh", "x\n") };
        let encoded = ArtifactFile { encoding: FileEncoding::Windows1252, ..file("l.txt", "\u{201c}a\u{e9}\u{81}\n") };
        let tree = repository.find_tree(base.write_tree_with(&[executable.clone(), encoded.clone()]).unwrap()).unwrap();
        let stored = Snapshot { repository: &repository, tree };
        assert!(BaseFiles::read(&stored, "a.sh").unwrap().executable);
        assert_eq!(stored.read("l.txt").unwrap(), b"\x93a\xe9\x81\n");
        assert_eq!(stored.read_text("l.txt"), encoded.content);
        for (one, other) in [(&executable, file("a.sh", "x\n")), (&encoded, file("l.txt", "\u{201c}a\u{e9}\u{81}\n"))] {
            assert_ne!(content_hash(std::slice::from_ref(one)), content_hash(&[other]));
        }
        let invalid = ArtifactFile { encoding: FileEncoding::Windows1252, ..file("l.txt", "\u{65e5}") };
        assert!(matches!(base.write_tree_with(&[invalid]), Err(GitError::NotEncodable { character: '\u{65e5}', .. })));
        assert_eq!(base.find_by_file_name("src/once.py").as_deref(), Some("once.py"));
        assert_eq!((base.find_by_file_name("src/a.sh"), base.find_by_file_name("none.py")), (None, None));
    }

    #[test]
    fn links_submodules_and_lfs_pointers_are_not_writable() {
        let huge = "x".repeat(MAX_READ_BYTES + 1);
        let user = UserRepo::new(&[
            ("big.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            ("dir/a", "x"),
            ("huge.txt", &huge),
        ]);
        let repository = user.repo();
        let base = repository.find_commit(git2::Oid::from_str(&user.base).unwrap()).unwrap();
        let link = repository.blob(b"/etc").unwrap();
        let mut update = TreeUpdateBuilder::new();
        update.upsert("link", link, FileMode::Link).upsert("sub", base.id(), FileMode::Commit);
        let tree = update.create_updated(&repository, &base.tree().unwrap()).unwrap();
        let tree = repository.find_tree(tree).unwrap();
        let author = git2::Signature::now("t", "t@t").unwrap();
        let commit = repository.commit(None, &author, &author, "m", &tree, &[&base]).unwrap().to_string();
        let snapshot = Snapshot::of(&repository, &commit).unwrap();
        for (path, reason) in [
            ("link", "symbolic link"),
            ("link/passwd", "through a symbolic link"),
            ("sub", "submodule"),
            ("sub/x", "in a submodule"),
            ("big.bin", "LFS"),
            ("dir", "a folder"),
            ("huge.txt", "larger than 16 MiB"),
            ("dir/a/b", "below a path that is a file"),
        ] {
            let problem = snapshot.check_writable(path).unwrap_err();
            assert!(problem.to_string().contains(reason), "{path}: {problem}");
        }
        for path in ["new", "dir/new", "dir/a", "deep/er/new"] {
            snapshot.check_writable(path).unwrap();
        }
        assert_eq!((snapshot.read("link"), snapshot.read("huge.txt")), (None, None));
        // Entries that are not edited are unchanged.
        let new = repository.find_tree(snapshot.write_tree_with(&[file("dir/a", "y")]).unwrap()).unwrap();
        assert_eq!(new.get_name("sub").unwrap().id(), base.id());
        assert_eq!(new.get_name("link").unwrap().id(), link);
    }
}
