//! Drives one task from wherever it stands to wherever it rests: [`next_action`] says what comes next, [`Drive`] does it,
//! and a step is acted on only after it is committed. Killed anywhere, the next holder of the lease goes on from the last
//! committed step; whatever was done beyond it (a commit's objects, a moved reference, a branch) is found again by its
//! content and not done twice.

mod drive;
mod foresee;
mod generate;
mod hand_off;
mod iterate;
mod jobs;
mod next;
mod port;

pub use drive::{Assignment, Drive};
pub use next::{NextAction, next_action};
pub use port::{Following, Foresee, Stopped, TaskPort};

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
