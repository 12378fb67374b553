//! The folders of a map.

use std::collections::HashMap;

/// A folder, together with those above it that contain nothing else: `src/main/java` is one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Folder {
    /// Its path below its parent, with a slash at the end.
    pub label: String,
    /// Index of the folder that contains it; `None` at the top.
    pub parent: Option<usize>,
    /// Parts of its path that are above its label.
    pub parts_above: usize,
}

/// The folders of files, each after its parent.
#[derive(Debug, Default)]
pub(super) struct Folders {
    pub all: Vec<Folder>,
    /// Folder of each file; `None` at the top.
    pub of_file: Vec<Option<usize>>,
}

/// What a folder of the repository contains.
#[derive(Default)]
struct Content<'p> {
    has_files: bool,
    /// Paths of the folders in it, in the order of the files.
    folders: Vec<&'p str>,
}

impl Folders {
    /// The folders of these paths, which are sorted.
    pub(super) fn of(paths: &[&str]) -> Self {
        let mut contents: HashMap<&str, Content<'_>> = HashMap::new();
        for path in paths {
            let mut inner = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            contents.entry(inner).or_default().has_files = true;
            // Up to a folder that is known already: the paths of one folder follow each other.
            while !inner.is_empty() {
                let above = inner.rsplit_once('/').map_or("", |(above, _)| above);
                let folders = &mut contents.entry(above).or_default().folders;
                if folders.last() == Some(&inner) {
                    break;
                }
                folders.push(inner);
                inner = above;
            }
        }
        let mut folders = Self::default();
        let mut by_path: HashMap<&str, usize> = HashMap::new();
        // Folders to add, with their parents; the next one at the end.
        let mut open: Vec<(&str, Option<usize>)> = Vec::new();
        let below = |path: &str, parent, open: &mut Vec<_>| {
            let Some(content) = contents.get(path) else { return };
            open.extend(content.folders.iter().rev().map(|folder| (*folder, parent)));
        };
        below("", None, &mut open);
        while let Some((first, parent)) = open.pop() {
            let mut last = first;
            while let Some([only]) =
                contents.get(last).filter(|content| !content.has_files).map(|c| c.folders.as_slice())
            {
                last = only;
            }
            let above = first.rsplit_once('/').map_or(0, |(above, _)| above.len() + 1);
            let parts_above = first.matches('/').count();
            by_path.insert(last, folders.all.len());
            below(last, Some(folders.all.len()), &mut open);
            folders.all.push(Folder { label: format!("{}/", &last[above..]), parent, parts_above });
        }
        let folder = |path: &&str| path.rsplit_once('/').and_then(|(folder, _)| by_path.get(folder).copied());
        folders.of_file = paths.iter().map(folder).collect();
        folders
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_that_contains_only_one_folder_is_joined_with_it() {
        let paths = ["README.md", "a/b/c/x.py", "a/b/c/d/y.py", "a/b/e/z.py", "f/w.py"];
        let folders = Folders::of(&paths);
        let shown: Vec<(&str, Option<usize>, usize)> =
            folders.all.iter().map(|folder| (folder.label.as_str(), folder.parent, folder.parts_above)).collect();
        let expected = [("a/b/", None, 0), ("c/", Some(0), 2), ("d/", Some(1), 3), ("e/", Some(0), 2), ("f/", None, 0)];
        assert_eq!(shown, expected);
        assert_eq!(folders.of_file, [None, Some(1), Some(2), Some(3), Some(4)]);
    }
}
