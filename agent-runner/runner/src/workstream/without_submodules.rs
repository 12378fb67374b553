//! The tree of a commit without its submodules, for checkouts: libgit2 cannot check out an entry of a submodule that
//! `.gitmodules` describes from a bare repository. The folders of submodules are missing in checkouts, as their files are.

use git2::build::TreeUpdateBuilder;
use git2::{ObjectType, Repository, Tree};

use super::error::{GitError, git_context, parse_oid};

/// Returns the commit's tree without the entries of submodules. Adds trees to the repository if there are any.
///
/// # Errors
/// A [`GitError`] if the commit or one of its trees is missing, or a tree cannot be written.
pub(super) fn tree_without_submodules<'r>(repository: &'r Repository, commit: &str) -> Result<Tree<'r>, GitError> {
    let found = git_context(format!("find commit {commit}"), repository.find_commit(parse_oid(commit)?))?;
    let root = git_context(format!("read the tree of commit {commit}"), found.tree())?;
    let (mut builder, mut has_submodules) = (TreeUpdateBuilder::new(), false);
    let mut open = vec![(Vec::new(), root.clone())];
    while let Some((folder, tree)) = open.pop() {
        for entry in &tree {
            let path = [folder.as_slice(), entry.name_bytes()].concat();
            match entry.kind() {
                Some(ObjectType::Tree) => {
                    let tree = git_context("read a tree", repository.find_tree(entry.id()))?;
                    open.push(([path.as_slice(), b"/"].concat(), tree));
                }
                Some(ObjectType::Commit) => {
                    builder.remove(path);
                    has_submodules = true;
                }
                _ => {}
            }
        }
    }
    if !has_submodules {
        return Ok(root);
    }
    let id = git_context("leave out submodules", builder.create_updated(repository, &root))?;
    git_context("read a tree", repository.find_tree(id))
}
