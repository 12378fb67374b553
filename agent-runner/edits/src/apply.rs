//! Applies edits to files, all or nothing, and compares the result with the base.

use std::collections::BTreeMap;

use crate::comparison::ComparisonBudget;
use crate::edit::{Change, Edit, Hunk};
use crate::encoding::{Encoding, decode, encode};
use crate::hunk::{HunkTarget, apply_hunks};
use crate::languages::Languages;
use crate::problem::{FileProblem, NotWritableReason, ReplyProblem, excerpt};
use crate::syntax_check::check_syntax;
use crate::text::Text;

/// Maximum number of files that one artifact may change.
const MAX_FILES: usize = 64;
/// Maximum size of a new file, and of one that grows, in bytes: far above any source file, far below the size limit of a blob.
pub const MAX_FILE_BYTES: usize = 512 * 1024;
/// Maximum size of an existing file that is edited, in bytes: far above any source file that people write.
const MAX_BASE_BYTES: usize = 8 * 1024 * 1024;

/// Beginnings of lines that mark the parts of search/replace blocks or of a merge conflict.
const MARKERS: [&str; 4] = ["<<<<<<< ", ">>>>>>> ", "------- SEARCH", "+++++++ REPLACE"];

/// A plain file of the base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseFile {
    /// Its content.
    pub bytes: Vec<u8>,
    /// Whether its mode allows execution.
    pub executable: bool,
}

/// The files before all edits.
pub trait BaseFiles {
    /// Checks whether a file may be written or removed at `path`.
    ///
    /// # Errors
    /// A [`FileProblem`] if `path`, or a path above it, is not a plain file or folder.
    fn check_writable(&self, path: &str) -> Result<(), FileProblem>;

    /// Size of a file in bytes, without reading it; `None` if there is no plain file.
    fn size(&self, path: &str) -> Option<usize>;

    /// Reads a file; `None` if there is no plain file.
    fn read(&self, path: &str) -> Option<BaseFile>;
}

/// A changed file, with its whole new content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedFile {
    /// Path relative to the repository.
    pub path: String,
    /// New content; `None` removes the file.
    pub content: Option<FileContent>,
}

/// Content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileContent {
    /// The whole text.
    pub text: String,
    /// Encoding of the text in the file.
    pub encoding: Encoding,
    /// Whether the file is executable; `None` for the mode that it has in the base, or for not executable.
    pub executable: Option<bool>,
}

/// Applies the edits in order, each to its file as it is in the previous artifact (`previous`, empty in the first
/// iteration), or in the base if that artifact does not contain the file. Returns the files of the new artifact: those
/// that differ from the base, in path order.
///
/// An edit that is applied already changes nothing. A file whose hunks add a syntax error is refused.
///
/// # Errors
/// The first [`ReplyProblem`] found; no edit is applied then.
pub fn apply(
    edits: &[Edit],
    previous: &[ChangedFile],
    base: &impl BaseFiles,
    languages: &impl Languages,
) -> Result<Vec<ChangedFile>, ReplyProblem> {
    let files = previous.iter().map(|file| (file.path.clone(), file.content.clone())).collect();
    let mut staging = Staging { base, files, texts_before: BTreeMap::new(), budget: ComparisonBudget::default() };
    for edit in edits {
        staging.apply(edit)?;
    }
    for (path, before) in &staging.texts_before {
        if let Some(Some(content)) = staging.files.get(path) {
            check_syntax(path, before, &content.text, languages)?;
        }
    }
    staging.finish()
}

/// The files of an artifact while its edits are applied.
struct Staging<'a, B> {
    base: &'a B,
    files: BTreeMap<String, Option<FileContent>>,
    /// Texts of the files before their hunks in this reply, for the check of their syntax.
    texts_before: BTreeMap<String, String>,
    budget: ComparisonBudget,
}

impl<B: BaseFiles> Staging<'_, B> {
    fn apply(&mut self, edit: &Edit) -> Result<(), ReplyProblem> {
        let path = self.path_of(edit);
        self.check_path(path)?;
        match &edit.change {
            Change::Write { content, label } => self.write(path, content, label.as_deref()),
            Change::Create { content, executable } => match self.current(path)? {
                // Applied already.
                Some(current) if current.text == *content => Ok(()),
                Some(_) => Err(ReplyProblem::Exists { path: path.to_owned() }),
                None => {
                    let new = FileContent { executable: *executable, ..FileContent::default() };
                    self.put(path, content.clone(), new)
                }
            },
            Change::Delete { lines } => self.delete(path, lines.as_deref()),
            Change::Modify { hunks, rename_to, executable, in_order } => {
                self.modify(path, (hunks, *in_order), rename_to.as_deref(), *executable)
            }
        }
    }

    /// The path of the file that an edit means: the first one at which there is a file.
    fn path_of<'e>(&self, edit: &'e Edit) -> &'e str {
        let exists = |path: &&str| match self.files.get(*path) {
            Some(staged) => staged.is_some(),
            None => self.base.size(path).is_some(),
        };
        let mut paths = std::iter::once(edit.path.as_str()).chain(edit.other_paths.iter().map(String::as_str));
        paths.find(exists).unwrap_or(&edit.path)
    }

    fn write(&mut self, path: &str, content: &str, label: Option<&str>) -> Result<(), ReplyProblem> {
        self.texts_before.remove(path);
        let current = self.current(path)?;
        let old = current.as_ref().map_or("", |current| current.text.as_str());
        // A marker in the content means an edit that was not understood, unless the file has markers.
        let has_marker = |line: &&str| MARKERS.iter().any(|marker| line.starts_with(marker));
        if let Some(line) = content.lines().find(has_marker)
            && !old.lines().any(|line| has_marker(&line))
        {
            return Err(ReplyProblem::Marker { path: path.to_owned(), line: excerpt(line) });
        }
        // A comment with the path may be the first line of the file.
        let content = match label {
            Some(label) if old.lines().next().is_some_and(|line| line.trim() == label.trim()) => {
                format!("{label}\n{content}")
            }
            Some(_) | None => content.to_owned(),
        };
        match current {
            Some(current) => {
                let text = Text::new(&current.text).replace_all(&content).to_string();
                self.put(path, text, current)
            }
            None => self.put(path, content, FileContent::default()),
        }
    }

    fn modify(
        &mut self,
        path: &str,
        (hunks, in_order): (&[Hunk], bool),
        rename_to: Option<&str>,
        executable: Option<bool>,
    ) -> Result<(), ReplyProblem> {
        let current = match (self.current(path)?, rename_to) {
            (Some(current), _) => Some(current),
            // An earlier edit has renamed it.
            (None, Some(to)) if self.is_removed(path) && matches!(self.files.get(to), Some(Some(_))) => {
                return self.modify(to, (hunks, in_order), None, executable);
            }
            // A search for nothing creates the file.
            (None, None) if !hunks.is_empty() && hunks.iter().all(|hunk| hunk.old_lines().is_empty()) => None,
            (None, _) => return Err(no_such_file(path)),
        };
        let mut content = current.unwrap_or_default();
        let mut text = Text::new(&content.text);
        let is_edited = self.files.contains_key(path);
        let target = &mut HunkTarget { path, is_edited, budget: &mut self.budget };
        apply_hunks(target, &mut text, (hunks, in_order), MAX_FILE_BYTES.max(content.text.len()))?;
        let before = self.texts_before.remove(path);
        let before = if hunks.is_empty() { before } else { before.or(Some(content.text.clone())) };
        self.texts_before.extend(before.map(|text| (rename_to.unwrap_or(path).to_owned(), text)));
        content.executable = match (executable, rename_to) {
            (Some(stated), _) => Some(stated),
            // The new path keeps the mode of the old one.
            (None, Some(_)) => Some(content.executable.unwrap_or_else(|| self.is_executable(path))),
            (None, None) => content.executable,
        };
        let Some(to) = rename_to else { return self.put(path, text.to_string(), content) };
        self.check_path(to)?;
        if self.current(to)?.is_some() {
            return Err(ReplyProblem::NewNameExists { path: to.to_owned() });
        }
        self.files.insert(path.to_owned(), None);
        self.put(to, text.to_string(), content)
    }

    fn delete(&mut self, path: &str, lines: Option<&[String]>) -> Result<(), ReplyProblem> {
        let is_removed = self.is_removed(path);
        // The content of a file that is not text, or too large, does not matter.
        let current = match lines {
            Some(_) => self.current(path)?.map(|content| Text::new(&content.text)),
            None if is_removed || self.base.size(path).is_none() && !self.files.contains_key(path) => None,
            None => Some(Text::default()),
        };
        let Some(text) = current else {
            return if is_removed { Ok(()) } else { Err(no_such_file(path)) };
        };
        if let Some(lines) = lines {
            let equal = text.lines.iter().map(|l| l.text.trim_end()).eq(lines.iter().map(|l| l.trim_end()));
            if !equal {
                return Err(ReplyProblem::OtherContent { path: path.to_owned() });
            }
        }
        self.texts_before.remove(path);
        self.files.insert(path.to_owned(), None);
        Ok(())
    }

    /// True if the artifact removes the file.
    fn is_removed(&self, path: &str) -> bool {
        matches!(self.files.get(path), Some(None))
    }

    fn is_executable(&self, path: &str) -> bool {
        self.base.read(path).is_some_and(|file| file.executable)
    }

    /// Checks a path before its file is read.
    fn check_path(&self, path: &str) -> Result<(), ReplyProblem> {
        if let Some(bytes) = self.base.size(path).filter(|bytes| *bytes > MAX_BASE_BYTES) {
            return Err(ReplyProblem::BaseTooLarge { path: path.to_owned(), bytes, max: MAX_BASE_BYTES });
        }
        Ok(self.base.check_writable(path)?)
    }

    /// The file as it is now; `None` if there is none.
    fn current(&self, path: &str) -> Result<Option<FileContent>, ReplyProblem> {
        if let Some(staged) = self.files.get(path) {
            return Ok(staged.clone());
        }
        let Some(file) = self.base.read(path) else { return Ok(None) };
        let not_text = |_| FileProblem { path: path.to_owned(), reason: NotWritableReason::NotText };
        let (text, encoding) = decode(&file.bytes).map_err(not_text)?;
        Ok(Some(FileContent { text: text.into_owned(), encoding, executable: None }))
    }

    /// Puts a text in the place of `current`.
    fn put(&mut self, path: &str, text: String, current: FileContent) -> Result<(), ReplyProblem> {
        let FileContent { encoding, executable, text: old } = current;
        // A large file may be edited, but not grow.
        let max = MAX_FILE_BYTES.max(old.len());
        if text.len() > max {
            return Err(ReplyProblem::TooLarge { path: path.to_owned(), bytes: text.len(), max });
        }
        let not_encodable = |character| ReplyProblem::NotEncodable { path: path.to_owned(), character };
        encode(&text, encoding).map_err(not_encodable)?;
        self.files.insert(path.to_owned(), Some(FileContent { text, encoding, executable }));
        Ok(())
    }

    /// The files that differ from the base.
    fn finish(self) -> Result<Vec<ChangedFile>, ReplyProblem> {
        // The path of a file cannot be a folder of another file.
        let written: Vec<&str> =
            self.files.iter().filter(|(_, c)| c.is_some()).map(|(path, _)| path.as_str()).collect();
        for path in &written {
            if let Some(folder) = written.iter().find(|o| path.strip_prefix(**o).is_some_and(|r| r.starts_with('/'))) {
                let path = (*folder).to_owned();
                return Err(FileProblem { path, reason: NotWritableReason::FileAndFolder }.into());
            }
        }
        let mut changed = Vec::new();
        for (path, content) in self.files {
            let base = self.base.read(&path);
            let content = content.map(|mut content| {
                let default = base.as_ref().is_some_and(|file| file.executable);
                content.executable = content.executable.filter(|executable| *executable != default);
                content
            });
            let is_equal = match (&content, &base) {
                (None, None) => true,
                (Some(new), Some(old)) => {
                    let bytes = encode(&new.text, new.encoding);
                    new.executable.is_none() && bytes.is_ok_and(|bytes| bytes == old.bytes.as_slice())
                }
                (Some(_), None) | (None, Some(_)) => false,
            };
            if !is_equal {
                changed.push(ChangedFile { path, content });
            }
        }
        match changed.len() {
            0 => Err(ReplyProblem::NothingChanged),
            count if count > MAX_FILES => Err(ReplyProblem::TooManyFiles { count, max: MAX_FILES }),
            _ => Ok(changed),
        }
    }
}

fn no_such_file(path: &str) -> ReplyProblem {
    ReplyProblem::NoSuchFile { path: path.to_owned(), same_name: None }
}
