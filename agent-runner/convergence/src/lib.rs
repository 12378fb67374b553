//! The loop's rules, and nothing else: which step may follow which ([`transition()`]), what a step makes of the task
//! ([`task_state_after`]), and what follows from an iteration ([`decide()`]).
//!
//! Pure: no clock, no I/O, no randomness. The same steps give the same answer on any machine, so every decision can be
//! replayed from the recorded steps. The scheduler guards its writes with the first two and says when a deadline has passed
//! ([`overdue`]); the runner decides with the third, and ends a review early where [`certain()`] says that nothing hangs on the rest.

mod certain;
mod decide;
mod facts;
mod history;
mod limits;
mod recommendation;
mod task_state;
mod transition;

pub use certain::{Certain, certain};
pub use decide::{NotDecidable, abandoned, decide, escalate, fail, overdue};
pub use facts::Facts;
pub use history::{Base, Best, HandOff, History, HistoryError, Iteration, MergeIntent};
pub use limits::Limits;
pub use recommendation::recommendation;
pub use task_state::task_state_after;
pub use transition::{IllegalTransition, transition};
