//! Applies edits to files, all or nothing, and compares the result with the base.

use std::collections::BTreeMap;

use crate::comparison::ComparisonBudget;
use crate::edit::{Change, Edit, Hunk};
use crate::encoding::{Encoding, decode, encode};
use crate::hunk::apply_hunks;
use crate::parse::Languages;
use crate::problem::{FileProblem, NotWritableReason, Problem};
use crate::text::Text;

/// Maximum number of files that one artifact may change.
const MAX_FILES: usize = 64;
/// Maximum size of one file, in bytes: far above any source file, far below the size limit of a blob.
pub const MAX_FILE_BYTES: usize = 512 * 1024;
/// Maximum size of an existing file that is edited, in bytes: far above any source file that people write.
const MAX_BASE_BYTES: usize = 8 * 1024 * 1024;
/// Number of lines above and below a syntax error that a problem shows.
const SHOWN_LINES: usize = 3;
/// Maximum length of a shown line, in characters.
const MAX_SHOWN_CHARS: usize = 120;

/// A plain file of the base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseFile {
    pub bytes: Vec<u8>,
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

    /// The path of a file with the same name in another folder, if there is exactly one.
    fn same_name(&self, path: &str) -> Option<String>;
}

/// A file of an artifact: its whole new content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileVersion {
    /// Path relative to the repository.
    pub path: String,
    /// New content; `None` removes the file.
    pub content: Option<NewContent>,
}

/// Content of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewContent {
    pub text: String,
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
/// The first [`Problem`] found; no edit is applied then.
pub fn apply(
    edits: &[Edit],
    previous: &[FileVersion],
    base: &impl BaseFiles,
    languages: &impl Languages,
) -> Result<Vec<FileVersion>, Problem> {
    let files = previous.iter().map(|file| (file.path.clone(), file.content.clone())).collect();
    let mut staging = Staging { base, files, budget: ComparisonBudget::default() };
    let mut hunk_edited: BTreeMap<&str, String> = BTreeMap::new();
    for edit in edits {
        if let Change::Modify { hunks, rename_to, .. } = &edit.change
            && !hunks.is_empty()
        {
            let before = staging.current(&edit.path).ok().flatten().map(|content| content.text).unwrap_or_default();
            let new_path = rename_to.as_deref().unwrap_or(&edit.path);
            let before = hunk_edited.remove(edit.path.as_str()).unwrap_or(before);
            hunk_edited.insert(new_path, before);
        } else {
            hunk_edited.remove(edit.path.as_str());
        }
        staging.apply(edit)?;
    }
    for (path, before) in &hunk_edited {
        if let Some(Some(content)) = staging.files.get(*path) {
            check_syntax(path, before, &content.text, languages)?;
        }
    }
    staging.finish()
}

/// The files of an artifact while its edits are applied.
struct Staging<'a, B> {
    base: &'a B,
    files: BTreeMap<String, Option<NewContent>>,
    budget: ComparisonBudget,
}

impl<B: BaseFiles> Staging<'_, B> {
    fn apply(&mut self, edit: &Edit) -> Result<(), Problem> {
        let path = &edit.path;
        self.check_path(path)?;
        match &edit.change {
            Change::Write { content } => {
                let current = self.current(path)?;
                let text = match &current {
                    Some(current) => Text::new(&current.text).replace_all(content).to_string(),
                    None => content.clone(),
                };
                self.put(path, text, current)
            }
            Change::Create { content, executable } => match self.current(path)? {
                // Applied already.
                Some(current) if current.text == *content => Ok(()),
                Some(_) => Err(Problem::Exists { path: path.clone() }),
                None => {
                    let encoding = Encoding::Utf8;
                    self.put(
                        path,
                        content.clone(),
                        Some(NewContent { text: String::new(), encoding, executable: *executable }),
                    )
                }
            },
            Change::Delete { lines } => self.delete(path, lines.as_deref()),
            Change::Modify { hunks, rename_to, executable, in_order } => {
                self.modify(path, (hunks, *in_order), rename_to.as_deref(), *executable)
            }
        }
    }

    fn modify(
        &mut self,
        path: &str,
        (hunks, in_order): (&[Hunk], bool),
        rename_to: Option<&str>,
        executable: Option<bool>,
    ) -> Result<(), Problem> {
        let current = match (self.current(path)?, rename_to) {
            (Some(current), _) => Some(current),
            // Renamed already.
            (None, Some(to)) if self.is_removed(path) && self.current(to)?.is_some() => {
                return self.modify(to, (hunks, in_order), None, executable);
            }
            // A search for nothing creates the file.
            (None, None) if !hunks.is_empty() && hunks.iter().all(|hunk| hunk.old_lines().is_empty()) => None,
            (None, _) => return Err(self.no_such_file(path)),
        };
        let mut content = match current {
            Some(content) => content,
            None => NewContent { text: String::new(), encoding: Encoding::Utf8, executable: None },
        };
        let mut text = Text::new(&content.text);
        apply_hunks(path, &mut text, (hunks, in_order), MAX_FILE_BYTES, &mut self.budget)?;
        content.executable = match (executable, rename_to) {
            (Some(stated), _) => Some(stated),
            // The new path keeps the mode of the old one.
            (None, Some(_)) => Some(content.executable.unwrap_or_else(|| self.is_executable(path))),
            (None, None) => content.executable,
        };
        let Some(to) = rename_to else { return self.put(path, text.to_string(), Some(content)) };
        self.check_path(to)?;
        if self.current(to)?.is_some() {
            return Err(Problem::Exists { path: to.to_owned() });
        }
        self.files.insert(path.to_owned(), None);
        self.put(to, text.to_string(), Some(content))
    }

    fn delete(&mut self, path: &str, lines: Option<&[String]>) -> Result<(), Problem> {
        let is_removed = self.is_removed(path);
        // The content of a file that is not text, or too large, does not matter.
        let current = match lines {
            Some(_) => self.current(path)?.map(|content| Text::new(&content.text)),
            None if is_removed || self.base.size(path).is_none() && !self.files.contains_key(path) => None,
            None => Some(Text::default()),
        };
        let Some(text) = current else {
            return if is_removed { Ok(()) } else { Err(self.no_such_file(path)) };
        };
        if let Some(lines) = lines {
            let equal = text.lines.iter().map(|l| l.text.trim_end()).eq(lines.iter().map(|l| l.trim_end()));
            if !equal {
                return Err(Problem::OtherContent { path: path.to_owned() });
            }
        }
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

    fn no_such_file(&self, path: &str) -> Problem {
        Problem::NoSuchFile { path: path.to_owned(), similar: self.base.same_name(path) }
    }

    /// Checks a path before its file is read.
    fn check_path(&self, path: &str) -> Result<(), Problem> {
        if let Some(bytes) = self.base.size(path).filter(|bytes| *bytes > MAX_BASE_BYTES) {
            return Err(Problem::BaseTooLarge { path: path.to_owned(), bytes, max: MAX_BASE_BYTES });
        }
        Ok(self.base.check_writable(path)?)
    }

    /// The file as it is now; `None` if there is none.
    fn current(&self, path: &str) -> Result<Option<NewContent>, Problem> {
        if let Some(staged) = self.files.get(path) {
            return Ok(staged.clone());
        }
        let Some(file) = self.base.read(path) else { return Ok(None) };
        let not_text = |_| FileProblem { path: path.to_owned(), reason: NotWritableReason::NotText };
        let (text, encoding) = decode(&file.bytes).map_err(not_text)?;
        Ok(Some(NewContent { text: text.into_owned(), encoding, executable: None }))
    }

    /// Puts a text in the place of `current`.
    fn put(&mut self, path: &str, text: String, current: Option<NewContent>) -> Result<(), Problem> {
        let (encoding, executable) = current.map_or((Encoding::Utf8, None), |c| (c.encoding, c.executable));
        if text.len() > MAX_FILE_BYTES {
            return Err(Problem::TooLarge { path: path.to_owned(), bytes: text.len(), max: MAX_FILE_BYTES });
        }
        let not_encodable = |character| Problem::NotEncodable { path: path.to_owned(), character };
        encode(&text, encoding).map_err(not_encodable)?;
        self.files.insert(path.to_owned(), Some(NewContent { text, encoding, executable }));
        Ok(())
    }

    /// The files that differ from the base.
    fn finish(self) -> Result<Vec<FileVersion>, Problem> {
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
                changed.push(FileVersion { path, content });
            }
        }
        match changed.len() {
            0 => Err(Problem::NothingChanged),
            count if count > MAX_FILES => Err(Problem::TooManyFiles { count, max: MAX_FILES }),
            _ => Ok(changed),
        }
    }
}

/// Refuses a file that its hunks gave a syntax error.
fn check_syntax(path: &str, before: &str, after: &str, languages: &impl Languages) -> Result<(), Problem> {
    if before.is_empty() || languages.syntax_error(path, before).is_some() {
        return Ok(());
    }
    let Some(error) = languages.syntax_error(path, after) else { return Ok(()) };
    // The same place before the edit: as far from the line where the texts begin to differ.
    let equal = before.lines().zip(after.lines()).take_while(|(a, b)| a == b).count();
    let place_before = error.line.min(equal + 1);
    Err(Problem::SyntaxError {
        path: path.to_owned(),
        line: error.line,
        message: error.message,
        before: view(before, place_before),
        after: view(after, error.line),
    })
}

/// The lines around a line, with their numbers.
fn view(text: &str, line: usize) -> String {
    let first = line.saturating_sub(SHOWN_LINES + 1);
    let lines = text.lines().enumerate().skip(first).take(2 * SHOWN_LINES + 1);
    let shown = lines.map(|(n, line)| {
        let line: String = line.chars().take(MAX_SHOWN_CHARS).collect();
        format!("{:>4}| {line}", n + 1)
    });
    shown.collect::<Vec<_>>().join("\n")
}
