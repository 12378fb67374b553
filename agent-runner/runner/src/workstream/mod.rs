//! Git, as far as cfq goes into it: libgit2 only, no git program, no hooks, no filters, no index, nobody's HEAD.
//!
//! The user's repository is read, and gets one new branch at the very end. Everything between happens in a bare
//! **mirror** of cfq's own, in which commits are built from trees, never from a working folder. A commit is a function of
//! (base, files, parent, message, time), all of which stand in the recorded steps: making it again gives the same id, in the
//! mirror as in any other repository that has the base. That is how a delivery and `cfq pull` work ([`rebuild`]).
//!
//! Stated behaviour: a repository without commits and a shallow clone are refused; a bare one and a detached HEAD are fine (the base is a
//! commit, not a branch); submodules and Git LFS pointers stay as they are, and edits to them are refused.

mod commit;
mod deliver;
mod diff;
mod error;
mod merge;
mod mirror;
mod path;
mod source;
mod tree;
mod worktree;

pub use commit::{CommitPlan, rebuild};
pub use deliver::{Delivery, branch_name, deliver};
pub use diff::unified;
pub use error::GitError;
pub use merge::{MergeOutcome, MergePlan, MergeState};
pub use mirror::Mirror;
pub use path::{PathProblem, repo_path};
pub use source::{head_commit, open_source};
pub use tree::{FileProblem, Snapshot, content_hash};
pub use worktree::Worktrees;

#[cfg(test)]
pub(crate) mod testing;
