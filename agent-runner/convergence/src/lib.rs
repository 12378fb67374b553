//! Rules of the creator-critic loop: which step may follow which ([`transition()`]), the task state after a step
//! ([`task_state_after`]), and the decision after an iteration ([`decide()`]).
//!
//! Pure: no clock, no I/O, no randomness. Equal steps give equal results on every machine, so every decision can be
//! replayed from the recorded steps. The scheduler validates each step with [`transition()`], derives the task state
//! from it, and escalates a task whose deadline has passed ([`overdue`]). The runner calls [`decide()`] and ends a
//! review early where the rest of it cannot change the decision ([`decided_ranges`]).

#![warn(missing_docs)]

mod decide;
mod early_decision;
mod facts;
mod hand_off;
mod history;
mod iteration;
mod limits;
mod recommendation;
mod task_state;
mod transition;

pub use decide::{NotDecidable, abandoned, decide, escalate, fail, overdue};
pub use early_decision::{DecidedRange, decided_ranges};
pub use facts::Facts;
pub use hand_off::{HandOff, MergeIntent};
pub use history::{Base, History, HistoryError};
pub use iteration::{BestIteration, Iteration};
pub use limits::LoopLimits;
pub use recommendation::recommendation;
pub use task_state::task_state_after;
pub use transition::{IllegalTransition, transition};
