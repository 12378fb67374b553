//! Driver of one task, from its last committed step until the task ends or waits for a human. [`next_action`]
//! determines the next action, [`TaskDriver`] performs it, and a step takes effect only after it is committed. After a
//! crash the next holder of the lease resumes at the last committed step. Effects of an uncommitted step that already
//! took place (a commit's objects, a moved reference, a branch) are recognised by their content and not repeated.

mod artifact;
mod hand_off;
mod iterate;
mod jobs;
mod next_action;
mod port;
mod speculative_prefill;
mod task_driver;

pub use next_action::{NextAction, next_action};
pub use port::{DriveError, FollowGuard, PrefillPredictor, Stopped, TaskPort};
pub use task_driver::{Assignment, TaskDriver};

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
