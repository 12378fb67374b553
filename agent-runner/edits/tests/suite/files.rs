//! Files in memory, and the whole path of a reply.

use std::collections::BTreeMap;

use cfq_edits::{
    BaseFile, BaseFiles, ChangedFile, FileProblem, Languages, NotWritableReason, ReplyProblem, ReplyTarget,
    SyntaxProblem, apply, encode, parse,
};

/// Content of a file, and whether it is executable.
pub type Content = (Vec<u8>, bool);

/// The base in memory, with paths that are no plain files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    pub files: BTreeMap<String, Content>,
    pub others: BTreeMap<String, NotWritableReason>,
}

impl Files {
    pub fn of(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), (text.as_bytes().to_vec(), false)));
        Self { files: files.collect(), others: BTreeMap::new() }
    }

    /// Applies a reply, and returns the resulting files.
    pub fn after(&self, reply: &str) -> Result<Self, ReplyProblem> {
        let mut after = self.clone();
        for ChangedFile { path, content } in self.changes(reply, &[])? {
            match content {
                None => after.files.remove(&path),
                Some(new) => {
                    let default = self.files.get(&path).is_some_and(|(_, executable)| *executable);
                    let bytes = encode(&new.text, new.encoding).unwrap().into_owned();
                    after.files.insert(path, (bytes, new.executable.unwrap_or(default)))
                }
            };
        }
        Ok(after)
    }

    /// The changes of a reply, on top of those of the previous artifact.
    pub fn changes(&self, reply: &str, previous: &[ChangedFile]) -> Result<Vec<ChangedFile>, ReplyProblem> {
        let target = ReplyTarget { path: "target.py".to_owned() };
        let changed = apply(&parse(reply, &target, false, &Brackets)?, previous, self, &Brackets);
        changed.map_err(|problem| problem.with_same_name(|path| self.find_by_file_name(path)))
    }

    /// The text of a file after a reply.
    pub fn text_after(&self, path: &str, reply: &str) -> Result<String, ReplyProblem> {
        let after = self.after(reply)?;
        Ok(String::from_utf8_lossy(&after.files[path].0).into_owned())
    }
}

impl BaseFiles for Files {
    fn check_writable(&self, path: &str) -> Result<(), FileProblem> {
        let refuse = |reason| Err(FileProblem { path: path.to_owned(), reason });
        if let Some(reason) = self.others.get(path) {
            return refuse(*reason);
        }
        let is_below = |above: &String| path.strip_prefix(above.as_str()).is_some_and(|rest| rest.starts_with('/'));
        if let Some((_, reason)) = self.others.iter().find(|(above, _)| is_below(above)) {
            return refuse(match reason {
                NotWritableReason::Symlink => NotWritableReason::ThroughSymlink,
                NotWritableReason::Submodule => NotWritableReason::InSubmodule,
                other => *other,
            });
        }
        match self.files.keys().any(is_below) {
            true => refuse(NotWritableReason::ParentIsFile),
            false => Ok(()),
        }
    }

    fn size(&self, path: &str) -> Option<usize> {
        Some(self.files.get(path)?.0.len())
    }

    fn read(&self, path: &str) -> Option<BaseFile> {
        let (bytes, executable) = self.files.get(path)?.clone();
        Some(BaseFile { bytes, executable })
    }
}

impl Files {
    fn find_by_file_name(&self, path: &str) -> Option<String> {
        let name = |path: &str| path.rsplit('/').next().map(str::to_owned);
        let mut same = self.files.keys().filter(|other| name(other) == name(path));
        let first = same.next()?;
        same.next().is_none().then(|| first.clone())
    }
}

/// A language in which a syntax error is a line with more closing than opening brackets, in files that end in `.py`.
pub struct Brackets;

impl Languages for Brackets {
    fn extension(&self, name: &str) -> Option<&'static str> {
        (name == "python").then_some("py")
    }

    fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxProblem> {
        let is_wrong = |line: &str| line.matches(')').count() > line.matches('(').count();
        let line = text.lines().position(is_wrong).filter(|_| path.ends_with(".py"))?;
        Some(SyntaxProblem { line: line + 1, message: "unmatched `)`".to_owned() })
    }

    fn is_valid(&self, path: &str, text: &str) -> bool {
        path.ends_with(".py") && self.syntax_error(path, text).is_none()
    }
}
