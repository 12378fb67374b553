//! Git operations through libgit2: no git program, no hooks, no filters, no index, no change of any HEAD.
//!
//! The user's repository is only read, until one new branch is created in it at the end. All intermediate work happens
//! in a bare **mirror**, in which commits are built from trees, never from a working folder. A commit is a function of
//! (base, files, parent, message, time), all of which are in the recorded steps: rebuilding it gives the same id, in
//! the mirror and in any other repository that has the base. Delivery and `cfq pull` rely on this ([`rebuild`]).
//!
//! Repositories without commits and shallow clones are refused. Bare repositories and a detached HEAD work, because the
//! base is a commit, not a branch. Submodules and Git LFS pointers are preserved, and edits to them are refused.

mod branch_name;
mod change;
mod checked_out;
mod commit;
mod commit_size;
mod copy_objects;
mod deliver;
mod delivery_record;
mod diff;
mod durable;
mod earlier_merges;
mod error;
mod fetch_lock;
mod folder_files;
mod git_links;
mod main_branch;
mod maintenance;
mod map_of_commit;
mod merge;
mod mirror;
mod object_reads;
mod pack_index;
mod ref_lock;
mod repository_access;
mod review_range;
mod size_limits;
mod source;
mod start_point;
mod tree;
mod tree_diff;
mod tree_files;
mod tree_merge;
mod uncommitted;
mod without_submodules;
mod worktree;

pub use branch_name::branch_name;
pub use change::Change;
pub use checked_out::CheckedOut;
pub use commit::{CommitPlan, rebuild};
pub use deliver::{DeliveredBranch, DeliveryRequest, deliver, deliver_recorded};
pub use delivery_record::DeliveryRecordFile;
pub use diff::{UnifiedDiff, unified};
pub use earlier_merges::EarlierMerges;
pub use error::{FailureKind, GitError, ObjectLimit, SizeLimit, UnsafeGitPathReason};
pub use folder_files::{FolderFiles, FolderRequest, TextFile};
pub(crate) use folder_files::{MAX_FILE_BYTES, is_accepted_name, select_files};
pub use maintenance::{Maintained, MaintenanceLimits, maintain, maintain_mirrors};
pub use map_of_commit::{RepoMapReply, RepoMapRequest, symbols_folder};
pub use merge::{MainBranch, MergeOutcome, MergePlan, MergeRequest, ThreeWayMerge};
pub use mirror::Mirror;
pub use ref_lock::remove_mirror_locks;
pub use repository_access::{RepositoryAccess, RepositoryProgram, serve_repository_access};
pub use review_range::{ReviewRange, ReviewRangeRequest};
pub use size_limits::{CancelGuard, SizeLimits, StopCondition};
pub use source::{find_source_repository, head_commit, open_source_repository};
pub use start_point::{StartPoint, StartPointRequest};
pub(crate) use tree::encoding_of;
pub use tree::{Snapshot, content_hash, file_bytes};
pub use uncommitted::UncommittedRequest;
pub use worktree::{Worktrees, check_out};

#[cfg(test)]
pub(crate) mod testing;
