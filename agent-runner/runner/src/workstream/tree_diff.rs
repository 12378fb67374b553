//! Differences between two trees, found by reading only the folders that differ.

use git2::{ObjectType, Oid, Repository, Tree};

use super::error::{GitError, git_context};

/// A path with different entries in two trees. Folders are not listed, only what they contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChangedPath {
    /// Path, as bytes of the tree.
    pub path: Vec<u8>,
    /// Id and mode in the new tree; `None` if the path is removed.
    pub new: Option<(Oid, i32)>,
}

/// Returns the paths at which two trees differ.
pub(super) fn changed_paths(
    repository: &Repository,
    old: &Tree<'_>,
    new: &Tree<'_>,
) -> Result<Vec<ChangedPath>, GitError> {
    let mut changed = Vec::new();
    let read = |id: Oid| git_context(format!("read the tree {id}"), repository.find_tree(id));
    let mut open = vec![(Vec::new(), Some(old.clone()), Some(new.clone()))];
    while let Some((folder, old, new)) = open.pop() {
        let mut entry = |name: &[u8]| {
            let before = old.as_ref().and_then(|tree| tree.get_name_bytes(name));
            let after = new.as_ref().and_then(|tree| tree.get_name_bytes(name));
            let value = |entry: &git2::TreeEntry<'_>| (entry.id(), entry.filemode_raw());
            if before.as_ref().map(value) == after.as_ref().map(value) {
                return Ok(());
            }
            let path = [folder.as_slice(), name].concat();
            let is_folder = |entry: &git2::TreeEntry<'_>| entry.kind() == Some(ObjectType::Tree);
            let (old_folder, new_folder) =
                (before.as_ref().filter(|e| is_folder(e)), after.as_ref().filter(|e| is_folder(e)));
            if old_folder.is_some() || new_folder.is_some() {
                let (old, new) = (old_folder.map(|e| read(e.id())), new_folder.map(|e| read(e.id())));
                open.push(([path.as_slice(), b"/"].concat(), old.transpose()?, new.transpose()?));
            }
            let is_file = |entry: &git2::TreeEntry<'_>| !is_folder(entry);
            if before.as_ref().is_some_and(is_file) || after.as_ref().is_some_and(is_file) {
                changed.push(ChangedPath { path, new: after.filter(|e| is_file(e)).map(|e| value(&e)) });
            }
            Ok::<_, GitError>(())
        };
        for name in new.iter().flat_map(Tree::iter).map(|e| e.name_bytes().to_vec()) {
            entry(&name)?;
        }
        let is_gone = |name: &[u8]| new.as_ref().is_none_or(|new| new.get_name_bytes(name).is_none());
        for name in old.iter().flat_map(Tree::iter).map(|e| e.name_bytes().to_vec()).filter(|name| is_gone(name)) {
            entry(&name)?;
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::Snapshot;
    use crate::workstream::testing::{UserRepo, file};
    use cfq_proto::loop_step::ArtifactFile;

    #[test]
    fn changed_added_and_removed_files_are_listed() {
        let user = UserRepo::new(&[("a.py", "1"), ("d/b.py", "1"), ("d/c.py", "1"), ("e/f/g.py", "1"), ("h", "1")]);
        let repository = user.repo();
        let base = Snapshot::of(&repository, &user.base).unwrap();
        let removed = |path: &str| ArtifactFile::removed(path);
        let files = [file("d/b.py", "2"), removed("e/f/g.py"), removed("h"), file("k/i.py", "3"), file("a.py", "1")];
        let tree = repository.find_tree(base.write_tree_with(&files).unwrap()).unwrap();
        let mut changed: Vec<(String, bool)> = changed_paths(&repository, base.tree(), &tree)
            .unwrap()
            .into_iter()
            .map(|changed| (String::from_utf8(changed.path).unwrap(), changed.new.is_some()))
            .collect();
        changed.sort();
        let expected = [("d/b.py", true), ("e/f/g.py", false), ("h", false), ("k/i.py", true)];
        assert_eq!(changed, expected.map(|(path, exists)| (path.to_owned(), exists)));
        assert!(changed_paths(&repository, base.tree(), base.tree()).unwrap().is_empty());
    }
}
