//! The size of a commit: number and total size of its files, and depth of its folders.

use std::collections::HashMap;

use git2::{ObjectType, Oid, Repository};

use super::error::{GitError, SizeLimit};
use super::object_reads::ObjectReader;
use super::size_limits::{SizeLimits, StopCondition};

/// Number of objects after which a walk checks whether it must stop.
const OBJECTS_PER_CHECK: usize = 1024;

/// Size of a tree with everything below it.
#[derive(Debug, Clone, Copy, Default)]
struct TreeSize {
    entries: u64,
    bytes: u64,
    /// Levels of folders below the tree.
    depth: usize,
}

impl TreeSize {
    /// Adds a subtree.
    fn add(&mut self, subtree: Self) {
        self.entries = self.entries.saturating_add(subtree.entries);
        self.bytes = self.bytes.saturating_add(subtree.bytes);
        self.depth = self.depth.max(subtree.depth + 1);
    }

    fn check(self, limits: &SizeLimits) -> Result<(), SizeLimit> {
        if self.entries > limits.entries {
            return Err(SizeLimit::Entries(limits.entries));
        }
        if self.bytes > limits.bytes {
            return Err(SizeLimit::Bytes(limits.bytes));
        }
        if self.depth > limits.depth { Err(SizeLimit::Depth(limits.depth)) } else { Ok(()) }
    }
}

/// A tree whose subtrees are being measured.
struct OpenTree {
    id: Oid,
    size: TreeSize,
    /// Subtrees that are not measured yet.
    subtrees: Vec<Oid>,
}

/// Checks the size of a commit before it is copied or checked out. Every tree object is read once, however often the
/// commit contains it, so the time depends on the number of objects and not on the size of the checkout.
///
/// # Errors
/// [`GitError::TooLarge`] if the commit exceeds a limit, the errors of `stop`, and [`GitError::Git`] if an object is
/// missing.
pub(super) fn check_size(
    repository: &Repository,
    commit: Oid,
    limits: &SizeLimits,
    stop: &StopCondition,
) -> Result<(), GitError> {
    let operation = || format!("measure commit {commit}");
    let too_large = |limit| GitError::TooLarge { path: repository.path().to_owned(), limit };
    let objects = ObjectReader::new(repository, limits)?;
    let root = objects.commit(commit)?.tree_id();
    let mut measured: HashMap<Oid, TreeSize> = HashMap::new();
    let mut open = vec![OpenTree::read(&objects, root, stop)?];
    loop {
        let depth = open.len();
        let Some(tree) = open.last_mut() else { return stop.check(&operation()) };
        tree.size.check(limits).map_err(too_large)?;
        match tree.subtrees.pop() {
            Some(subtree) => match measured.get(&subtree) {
                Some(size) => tree.size.add(*size),
                None if depth > limits.depth => return Err(too_large(SizeLimit::Depth(limits.depth))),
                None => open.push(OpenTree::read(&objects, subtree, stop)?),
            },
            None => {
                let (id, size) = (tree.id, tree.size);
                measured.insert(id, size);
                open.pop();
                if let Some(parent) = open.last_mut() {
                    parent.size.add(size);
                }
            }
        }
    }
}

impl OpenTree {
    /// Reads a tree and the sizes of its files.
    fn read(objects: &ObjectReader<'_>, id: Oid, stop: &StopCondition) -> Result<Self, GitError> {
        let tree = objects.tree(id)?;
        let mut size = TreeSize { entries: tree.len() as u64, ..TreeSize::default() };
        let mut subtrees = Vec::new();
        for (n, entry) in tree.iter().enumerate() {
            if n.is_multiple_of(OBJECTS_PER_CHECK) {
                stop.check("measure the repository")?;
            }
            match entry.kind() {
                Some(ObjectType::Tree) => subtrees.push(entry.id()),
                // A file that is missing here, as in a partial clone, fails later when it is copied.
                Some(ObjectType::Blob) => {
                    let bytes = match objects.file_bytes(entry.id()) {
                        Err(GitError::Git { .. }) => 0,
                        bytes => bytes?,
                    };
                    size.bytes = size.bytes.saturating_add(bytes);
                }
                _ => {}
            }
        }
        Ok(Self { id, size, subtrees })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::size_limits::CancelGuard;
    use crate::workstream::testing::{UserRepo, commit_tree, nested_tree};
    use git2::FileMode;
    use std::time::Duration;

    fn unlimited() -> (StopCondition, CancelGuard) {
        StopCondition::after(Duration::from_secs(3600))
    }

    fn check(user: &UserRepo, commit: Oid, limits: &SizeLimits) -> Result<(), GitError> {
        check_size(&user.repo(), commit, limits, &unlimited().0)
    }

    #[test]
    fn large_real_repository_is_accepted() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let blob = repository.blob(&[b'x'; 10_000]).unwrap();
        let mut root = repository.treebuilder(None).unwrap();
        for folder in 0..100 {
            let mut tree = repository.treebuilder(None).unwrap();
            for file in 0..1000 {
                tree.insert(format!("{folder}-{file}.py"), blob, FileMode::Blob.into()).unwrap();
            }
            root.insert(format!("d{folder}"), tree.write().unwrap(), FileMode::Tree.into()).unwrap();
        }
        let commit = commit_tree(&repository, root.write().unwrap());
        check(&user, commit, &SizeLimits::default()).unwrap();
        let too_large = |limits| match check(&user, commit, &limits) {
            Err(GitError::TooLarge { limit, .. }) => limit,
            other => panic!("{other:?}"),
        };
        let entries = 100_000;
        let limit = too_large(SizeLimits { entries, ..SizeLimits::default() });
        assert_eq!(limit, SizeLimit::Entries(entries), "the folders count as well");
        let bytes = 999_999_999;
        assert_eq!(too_large(SizeLimits { bytes, ..SizeLimits::default() }), SizeLimit::Bytes(bytes));
        let exact = SizeLimits { entries: 100_100, bytes: bytes + 1, depth: 1, ..SizeLimits::default() };
        check(&user, commit, &exact).unwrap();
    }

    #[test]
    fn few_objects_that_describe_a_huge_checkout_are_refused() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let mut tree = repository.find_commit(Oid::from_str(&user.base).unwrap()).unwrap().tree_id();
        // 10 to the power of 30 files in 30 objects.
        for _ in 0..30 {
            let mut above = repository.treebuilder(None).unwrap();
            for n in 0..10 {
                above.insert(format!("d{n}"), tree, FileMode::Tree.into()).unwrap();
            }
            tree = above.write().unwrap();
        }
        let error = check(&user, commit_tree(&repository, tree), &SizeLimits::default()).unwrap_err();
        assert!(error.is_invalid_request() && error.to_string().contains("more than 2000000 files"), "{error}");
    }

    #[test]
    fn nested_folders_are_limited_also_in_shared_trees() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let repository = user.repo();
        let limits = SizeLimits { depth: 20, ..SizeLimits::default() };
        let nested = nested_tree(&repository, 15);
        check(&user, commit_tree(&repository, nested), &limits).unwrap();
        assert!(check(&user, commit_tree(&repository, nested_tree(&repository, 21)), &limits).is_err());
        // The same folder at the top and, again, 10 levels below.
        let mut tree = nested;
        for n in 0..10 {
            let mut above = repository.treebuilder(None).unwrap();
            above.insert("a", nested, FileMode::Tree.into()).unwrap();
            above.insert(format!("z{n}"), tree, FileMode::Tree.into()).unwrap();
            tree = above.write().unwrap();
        }
        let error = check(&user, commit_tree(&repository, tree), &limits).unwrap_err();
        assert!(error.to_string().contains("more than 20 levels"), "{error}");
    }

    #[test]
    fn measuring_stops_at_the_deadline_and_on_cancellation() {
        let user = UserRepo::new(&[("a.py", "x = 1\n")]);
        let (repository, commit) = (user.repo(), Oid::from_str(&user.base).unwrap());
        let measure = |stop: &StopCondition| check_size(&repository, commit, &SizeLimits::default(), stop);
        let (late, _guard) = StopCondition::after(Duration::ZERO);
        assert!(matches!(measure(&late), Err(GitError::TimeLimit { .. })));
        let (stop, guard) = unlimited();
        measure(&stop).unwrap();
        drop(guard);
        assert!(matches!(measure(&stop), Err(GitError::Cancelled { .. })));
    }
}
