//! Merge into the repository's main branch: planned on the commit that the mirror has as `main`, and recorded as an
//! intent. The merge takes effect in the scheduler's database, by a compare-and-swap of the recorded commit; the
//! mirror's `main` only follows.
//!
//! The cost of a merge depends on what the task changed, not on the length of the history or the number of files.

use git2::{MergeOptions, Oid, Repository};

use super::commit::signature;
use super::durable::sync_commit;
use super::earlier_merges::{EarlierMerges, earlier_merges};
use super::error::{GitError, git_context, parse_oid};
use super::mirror::Mirror;
use super::tree_merge::{TreeMerge, merge_trees};

/// Commit of `main` in a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MainBranch {
    /// Recorded commit of the main branch.
    pub recorded: String,
    /// The commit that the mirror has for it: the same, or a stand-in.
    pub commit: String,
}

impl MainBranch {
    /// A main branch whose commit the mirror has.
    pub fn at(commit: &str) -> Self {
        Self { recorded: commit.to_owned(), commit: commit.to_owned() }
    }
}

/// A merge to plan.
#[derive(Debug, Clone, Copy)]
pub struct MergeRequest<'a> {
    /// The mirror's `main`.
    pub main: &'a MainBranch,
    /// Base commit of the task.
    pub base: &'a str,
    /// The commit to merge, a descendant of the base.
    pub head: &'a str,
    /// Whether `main` contains the base and not the head. If false, the history is walked to determine this.
    pub has_base: bool,
    /// Message of the merge commit, if one is needed.
    pub message: &'a str,
    /// Date of the merge commit, in seconds since 1970.
    pub time: i64,
}

/// A planned update of `main`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergePlan {
    /// Recorded commit of the main branch before the merge.
    pub old: String,
    /// Its commit after the merge: the head itself (fast-forward), or a merge commit.
    pub new: String,
    /// How the files were merged; `None` if they are those of the head or of `main` before.
    pub three_way: Option<ThreeWayMerge>,
}

/// A merge whose files are those of neither side, so that they were not checked before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreeWayMerge {
    /// The mirror's commit of `main` before the merge.
    pub main: String,
    /// The merge base, or one of several; `None` if the sides have nothing in common.
    pub merge_base: Option<String>,
    /// The tasks of the last merges into `main`.
    pub earlier: EarlierMerges,
}

/// Result of planning a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MergeOutcome {
    /// The merge is possible.
    Planned(MergePlan),
    /// Both sides changed the same paths.
    Conflict {
        /// Conflicting paths, sorted.
        paths: Vec<String>,
        /// The tasks merged before that changed one of them; may be empty.
        earlier: EarlierMerges,
    },
}

/// How two commits are related.
enum Relation {
    /// The history of `main` contains the head.
    Contained,
    /// The history of the head contains `main`.
    FastForward,
    /// Both have commits of their own after this one.
    Diverged { ancestor: Oid },
    /// They have no merge base, or several, of which this is one.
    Complex { merge_base: Option<Oid> },
}

impl Mirror {
    /// Plans a merge. Writes at most the objects of a merge commit, which are on disk when this returns; no ref is
    /// updated. The merge commit is a function of the request.
    ///
    /// # Errors
    /// A [`GitError`] if an id is invalid, a commit is missing or libgit2 fails.
    pub fn plan_merge(&self, request: &MergeRequest<'_>) -> Result<MergeOutcome, GitError> {
        // Maintenance removes nothing meanwhile.
        let _lock = self.lock("cfq-merge.lock")?;
        let repository = self.repository()?;
        let (main, head) = (parse_oid(&request.main.commit)?, parse_oid(request.head)?);
        let old = request.main.recorded.clone();
        // Its files are those of a commit that exists.
        let planned = |old: String, new: String| Ok(MergeOutcome::Planned(MergePlan { old, new, three_way: None }));
        let base = parse_oid(request.base)?;
        let (merge_base, merged) = match relation(&repository, main, base, head, request.has_base)? {
            Relation::Contained => return planned(old.clone(), old),
            Relation::FastForward => return planned(old, request.head.to_owned()),
            Relation::Diverged { ancestor } => (Some(ancestor), merge_trees(&repository, ancestor, main, head)?),
            Relation::Complex { merge_base } => (merge_base, None),
        };
        let merged = match merged {
            Some(merged) => merged,
            None => merge_with_renames(&repository, main, head)?,
        };
        let tree = match merged {
            TreeMerge::Merged { tree } => tree,
            TreeMerge::Conflict { paths } => {
                let earlier = earlier_merges(&repository, main, merge_base, &paths);
                return Ok(MergeOutcome::Conflict { paths, earlier });
            }
        };
        let tree = git_context("read the merged tree", repository.find_tree(tree))?;
        let ours = git_context("read the mirror's main", repository.find_commit(main))?;
        let theirs = git_context("read the commit to merge", repository.find_commit(head))?;
        let author = signature(request.time)?;
        let parents = [&ours, &theirs];
        let merge_commit = repository.commit(None, &author, &author, request.message, &tree, &parents);
        let merge_commit = git_context("write the merge commit", merge_commit)?;
        sync_commit(&repository, merge_commit, &git_context("read the tree of main", ours.tree())?)?;
        let is_new = parents.iter().all(|parent| parent.tree_id() != tree.id());
        let three_way = is_new.then(|| ThreeWayMerge {
            main: request.main.commit.clone(),
            merge_base: merge_base.map(|base| base.to_string()),
            earlier: earlier_merges(&repository, main, merge_base, &[]),
        });
        Ok(MergeOutcome::Planned(MergePlan { old, new: merge_commit.to_string(), three_way }))
    }
}

/// Determines how `main` and `head` are related. Walks the history only if the base is not known to be in `main`.
fn relation(repository: &Repository, main: Oid, base: Oid, head: Oid, has_base: bool) -> Result<Relation, GitError> {
    if main == head {
        return Ok(Relation::Contained);
    }
    if main == base {
        return Ok(Relation::FastForward);
    }
    if has_base {
        return Ok(Relation::Diverged { ancestor: base });
    }
    let ancestors = match repository.merge_bases(main, head) {
        Err(error) if error.code() == git2::ErrorCode::NotFound => return Ok(Relation::Complex { merge_base: None }),
        found => git_context("find the common ancestor of main and the result", found)?,
    };
    Ok(match ancestors.iter().as_slice() {
        [ancestor] if *ancestor == head => Relation::Contained,
        [ancestor] if *ancestor == main => Relation::FastForward,
        [ancestor] => Relation::Diverged { ancestor: *ancestor },
        several => Relation::Complex { merge_base: several.first().copied() },
    })
}

/// Merges all files of two commits, and follows renames.
fn merge_with_renames(repository: &Repository, main: Oid, head: Oid) -> Result<TreeMerge, GitError> {
    let ours = git_context("read the mirror's main", repository.find_commit(main))?;
    let theirs = git_context("read the commit to merge", repository.find_commit(head))?;
    let mut options = MergeOptions::new();
    options.find_renames(true);
    let mut index = git_context("merge", repository.merge_commits(&ours, &theirs, Some(&options)))?;
    if index.has_conflicts() {
        let mut paths: Vec<String> = git_context("read the conflicts", index.conflicts())?
            .flatten()
            .filter_map(|c| c.our.or(c.their).or(c.ancestor))
            .map(|entry| String::from_utf8_lossy(&entry.path).into_owned())
            .collect();
        paths.sort();
        paths.dedup();
        return Ok(TreeMerge::Conflict { paths });
    }
    let tree = git_context("write the merged tree", index.write_tree_to(repository))?;
    Ok(TreeMerge::Merged { tree })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workstream::testing::{UserRepo, file};
    use crate::workstream::{CommitPlan, Snapshot};
    use cfq_proto::loop_step::ArtifactFile;

    struct Fixture {
        user: UserRepo,
        mirror: Mirror,
        _data: tempfile::TempDir,
    }

    fn fixture(files: &[(&str, &str)]) -> Fixture {
        let user = UserRepo::new(files);
        let data = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        Fixture { user, mirror, _data: data }
    }

    fn removed(path: &str) -> ArtifactFile {
        ArtifactFile::removed(path)
    }

    impl Fixture {
        fn head(&self, files: &[ArtifactFile]) -> String {
            let base = &self.user.base;
            let message = files[0].path.as_str();
            self.mirror.commit(&CommitPlan { base, files, parent: base, message, time: 7 }).unwrap()
        }

        fn plan(&self, head: &str, has_base: bool) -> MergeOutcome {
            let base = self.user.base.as_str();
            let main = self.mirror.main().unwrap().unwrap_or_else(|| MainBranch::at(base));
            let request = MergeRequest { main: &main, base, head, has_base, message: "Merge", time: 9 };
            self.mirror.plan_merge(&request).unwrap()
        }

        fn planned(&self, head: &str) -> MergePlan {
            let outcome = self.plan(head, false);
            let MergeOutcome::Planned(plan) = outcome else { panic!("{outcome:?}") };
            plan
        }

        fn merge(&self, files: &[ArtifactFile]) {
            let plan = self.planned(&self.head(files));
            self.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        }

        fn main(&self) -> String {
            self.mirror.repository().unwrap().refname_to_id("refs/heads/main").unwrap().to_string()
        }

        fn read(&self, path: &str) -> Option<String> {
            let repository = self.mirror.repository().unwrap();
            Snapshot::of(&repository, &self.main()).unwrap().read_text(path)
        }
    }

    const TWO_FILES: [(&str, &str); 2] = [("a.py", "x = 1\n"), ("b.py", "y = 1\n")];

    #[test]
    fn first_merge_fast_forwards_and_second_creates_a_merge_commit() {
        let f = fixture(&TWO_FILES);
        let (one, two) = (f.head(&[file("a.py", "x = 2\n")]), f.head(&[file("b.py", "y = 2\n")]));
        let plan = f.planned(&one);
        let fast_forward =
            |old: &str, new: &str| MergePlan { old: old.to_owned(), new: new.to_owned(), three_way: None };
        assert_eq!(plan, fast_forward(&f.user.base, &one));
        f.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        let plan = f.planned(&two);
        let expected = ThreeWayMerge {
            main: one.clone(),
            merge_base: Some(f.user.base.clone()),
            earlier: EarlierMerges::default(),
        };
        assert_eq!((&plan.old, &plan.three_way), (&one, &Some(expected)));
        assert_eq!(plan, f.planned(&two), "planning is idempotent");
        assert_eq!(f.plan(&two, true), MergeOutcome::Planned(plan.clone()), "with and without a walk");
        f.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        assert_eq!((f.read("a.py").unwrap(), f.read("b.py").unwrap()), ("x = 2\n".into(), "y = 2\n".into()));
        let main = f.main();
        assert_eq!(f.planned(&one), fast_forward(&main, &main), "already merged");
    }

    #[test]
    fn conflict_names_its_paths_and_leaves_main_unchanged() {
        let f = fixture(&TWO_FILES);
        f.merge(&[file("a.py", "x = 2\n")]);
        let main = f.main();
        let two = f.head(&[file("a.py", "x = 3\n")]);
        for has_base in [true, false] {
            let expected = MergeOutcome::Conflict { paths: vec!["a.py".into()], earlier: EarlierMerges::default() };
            assert_eq!(f.plan(&two, has_base), expected);
        }
        assert_eq!(f.main(), main);
    }

    #[test]
    fn earlier_tasks_are_named() {
        let f = fixture(&TWO_FILES);
        let merge = |number: u32, files: &[ArtifactFile]| {
            let (base, message) = (&f.user.base, format!("t{number}: Task {number}\n\nIteration 1, by m.\n"));
            let plan = CommitPlan { base, files, parent: base, message: &message, time: 7 };
            let head = f.mirror.commit(&plan).unwrap();
            let main = f.mirror.main().unwrap().unwrap_or_else(|| MainBranch::at(base));
            let message = format!("Merge t{number}: Task {number}\n");
            let request = MergeRequest { main: &main, base, head: &head, has_base: true, message: &message, time: 9 };
            let outcome = f.mirror.plan_merge(&request).unwrap();
            if let MergeOutcome::Planned(plan) = &outcome {
                f.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
            }
            outcome
        };
        for (number, path) in [(1, "a.py"), (2, "c.py"), (3, "d.py"), (4, "a.txt")] {
            let MergeOutcome::Planned(_) = merge(number, &[file(path, "x\n")]) else { panic!("a conflict") };
        }
        let MergeOutcome::Planned(plan) = merge(5, &[file("e.py", "x\n")]) else { panic!("a conflict") };
        assert_eq!(plan.three_way.unwrap().earlier.to_string(), "t4: Task 4, t3: Task 3, t2: Task 2, and 1 more");
        let MergeOutcome::Conflict { paths, earlier } = merge(6, &[file("a.py", "y\n"), file("c.py", "y\n")]) else {
            panic!("no conflict")
        };
        assert_eq!(
            (paths, earlier.to_string()),
            (vec!["a.py".into(), "c.py".into()], "t2: Task 2, t1: Task 1".to_owned())
        );
    }

    #[test]
    fn newer_base_is_merged_with_the_result() {
        let f = fixture(&TWO_FILES);
        f.merge(&[file("a.py", "x = 2\n")]);
        let base = f.user.commit_files(&f.user.repo(), &[("c.py", "z = 1\n")]);
        f.mirror.fetch_base(&base).unwrap();
        let files = [file("d.py", "d = 1\n")];
        let plan = CommitPlan { base: &base, files: &files, parent: &base, message: "m", time: 8 };
        let head = f.mirror.commit(&plan).unwrap();
        let main = MainBranch::at(&f.main());
        let request =
            MergeRequest { main: &main, base: &base, head: &head, has_base: false, message: "Merge", time: 9 };
        let MergeOutcome::Planned(plan) = f.mirror.plan_merge(&request).unwrap() else { panic!("a conflict") };
        f.mirror.set_main(&MainBranch::at(&plan.new)).unwrap();
        let contents = ["a.py", "b.py", "c.py", "d.py"].map(|path| f.read(path).unwrap());
        assert_eq!(contents, ["x = 2\n", "y = 1\n", "z = 1\n", "d = 1\n"]);
    }

    /// Every pair of changes gives the same result as libgit2's merge of all files.
    #[test]
    fn merge_of_changed_folders_equals_the_merge_of_all_files() {
        let lines: String = (0..30).map(|n| format!("line {n}\n")).collect();
        let (first, last) = (lines.replace("line 1\n", "first\n"), lines.replace("line 28\n", "last\n"));
        let renamed = [removed("d/e/c.py"), file("moved.py", &lines)];
        let changes: [&[ArtifactFile]; 11] = [
            &[file("d/e/c.py", &first)],
            &[file("d/e/c.py", &last)],
            &[file("d/e/c.py", "other\n")],
            &[removed("d/e/c.py")],
            &renamed,
            &[removed("d/b.py"), file("a.py", "x = 2\n")],
            &[file("d/e/new.py", "n\n")],
            &[file("d/e/new.py", "m\n")],
            &[file("new/n.py", "n\n"), file("new/m/n.py", "n\n")],
            &[file("new/m/o.py", "n\n")],
            &[file("d/e/c.py", "zero\0byte\n")],
        ];
        for (n, ours) in changes.iter().enumerate() {
            for theirs in &changes[n + 1..] {
                let f = fixture(&[("a.py", "x = 1\n"), ("d/b.py", "y = 1\n"), ("d/e/c.py", &lines)]);
                f.merge(ours);
                let head = f.head(theirs);
                let outcome = f.plan(&head, true);
                let repository = f.mirror.repository().unwrap();
                let id = |commit: &str| parse_oid(commit).unwrap();
                let expected = merge_with_renames(&repository, id(&f.main()), id(&head)).unwrap();
                let found = match outcome {
                    MergeOutcome::Conflict { paths, .. } => TreeMerge::Conflict { paths },
                    MergeOutcome::Planned(plan) => {
                        TreeMerge::Merged { tree: repository.find_commit(id(&plan.new)).unwrap().tree_id() }
                    }
                };
                assert_eq!(found, expected, "{ours:?} {theirs:?}");
            }
        }
    }
}
