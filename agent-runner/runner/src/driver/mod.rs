//! Driver of one task, from its last committed step until the task ends or waits for a human. `next_action`
//! determines the next action, [`TaskDriver`] performs it and commits its result as a step, and only committed steps
//! change the task's state. After a crash the next holder of the lease resumes at the last committed step. If the crash
//! came between an action's effect on a repository (a commit's objects, a moved reference, a branch) and the commit of
//! its step, the effect is recognised by its content and not repeated.

mod artifact;
mod first_prompt;
mod hand_off;
mod iterate;
mod jobs;
mod merge;
mod merge_check;
mod next_action;
mod port;
mod prepare_mirror;
mod prompt_sources;
mod read_change;
mod repository_map;
mod speculative_prefill;
mod task_driver;

pub use first_prompt::{FirstPromptError, first_prompt};
pub use next_action::{NextAction, next_action};
pub use port::{DriveError, FollowGuard, MainQuery, PrefillPredictor, Stopped, TaskPort};
pub use task_driver::{Assignment, TaskDriver};

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
