//! Scheduling rules as pure functions, without a clock, a database or a network.
//!
//! [`PlannerState`] caches the Postgres rows of nodes and of jobs that have not ended. The scheduler service feeds it
//! rows ([`PlannerState::on_job_row`], [`PlannerState::on_job_ended`], [`PlannerState::on_node_row`],
//! [`PlannerState::on_node_gone`]) and calls [`plan()`] for the effects to carry out next. A plan is a proposal: each
//! effect is a compare-and-set in Postgres, the resulting row is fed back, and a rejected effect changes nothing. A
//! plan made from stale state therefore does no harm, and a new leader only has to load the rows.
//!
//! All times are milliseconds of the database's clock and are passed as parameters.

#![warn(missing_docs)]

mod backoff;
mod candidates;
mod capacity;
mod cost;
mod effect;
mod job;
mod model_loading;
mod node;
mod occupancy;
mod pending;
mod pending_reason;
mod plan;
mod pr_state;
mod prefix_index;
mod priority;
mod speculative_prefill;
mod state;
mod suspicion;
mod task_state;

#[cfg(test)]
mod tests;

pub use backoff::{BackoffPolicy, NodeBackoff, NodeFailures};
pub use effect::{Effect, UnplaceReason};
pub use job::{Job, JobPhase};
pub use node::{Exclusion, Node};
pub use pending_reason::{PendingReason, join_by_node};
pub use plan::plan;
pub use pr_state::pr_transition_allowed;
pub use priority::{CLASS_STEP_MS, MAX_OVERTAKING_MS, OrderKey, order_key};
pub use speculative_prefill::prefill_node;
pub use state::{PlannerState, PlannerTiming};
pub use suspicion::{BootAttempt, UnreportedEnd, is_suspect};
pub use task_state::task_transition_allowed;
