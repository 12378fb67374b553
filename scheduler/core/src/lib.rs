//! The scheduler's rules, without a clock, a database or a network.
//!
//! [`State`] is a cache of what Postgres says about jobs that are not over and about nodes; the shell feeds it rows
//! ([`State::job`], [`State::job_over`], [`State::node`], [`State::node_gone`]) and asks [`plan`] what should be written
//! next. A plan is only a wish: each of its effects is a compare-and-set in Postgres, the row it leaves is fed back, and a
//! rejected one changes nothing. So a plan made from an old state does no harm, and a new leader only has to load the rows.
//!
//! All times are milliseconds on the database's clock and come in as parameters.

mod backoff;
mod held;
mod job;
mod load;
mod node;
mod order;
mod plan;
mod pr_state;
mod price;
mod state;
mod task_state;
mod warm;

#[cfg(test)]
mod company_tests;
#[cfg(test)]
mod properties;

pub use backoff::{Ladder, Setback, Setbacks};
pub use job::{Job, Phase};
pub use node::{LeftOut, Node};
pub use order::{AGE_STEP_MS, OVERDUE_MS, Rank, rank};
pub use plan::{Effect, Waiting, plan};
pub use pr_state::pr_legal;
pub use state::{Limits, State};
pub use task_state::legal;
pub use warm::warmer;
