//! Scheduling rules as pure functions, without a clock, a database or a network.
//!
//! [`PlannerState`] caches the Postgres rows of nodes and of jobs that have not ended. The scheduler service feeds it
//! rows ([`PlannerState::on_job_row`], [`PlannerState::on_job_ended`], [`PlannerState::on_node_row`],
//! [`PlannerState::on_node_gone`]) and calls [`plan_step()`] for the effects to carry out next. They are a proposal: each
//! effect is a compare-and-set in Postgres, the resulting row is fed back, and a rejected effect changes nothing. A
//! plan made from stale state therefore does no harm, and a new leader only has to load the rows.
//!
//! All times are milliseconds of the database's clock and are passed as parameters.

#![warn(missing_docs)]

mod acceptance;
mod backoff;
mod bottleneck;
mod candidates;
mod capacity;
mod changes;
mod cost;
mod cron;
mod dependency_order;
mod effect;
mod events;
mod explain;
mod fair_share;
mod job;
mod loads_in_progress;
mod model_loading;
mod node;
mod node_cost;
mod occupancy;
mod pass;
mod pause;
mod pending;
mod pending_reason;
mod placement_reason;
mod plan;
mod plan_step;
mod pr_state;
mod preemption;
mod prefix_index;
mod priority;
mod queue;
mod queue_estimate;
mod request_class;
mod reservation;
mod room_timeline;
mod rooms;
mod slot_task;
mod speculative_prefill;
mod start_estimate;
mod start_state;
mod state;
mod suspicion;
mod task_state;
mod timers;

#[cfg(test)]
mod tests;

pub use backoff::{BackoffPolicy, NodeBackoff, NodeFailures};
pub use bottleneck::{BOTTLENECK_DEPENDENTS, bottleneck_priority};
pub use cron::{CronError, CronExpression};
pub use dependency_order::{Cycle, dependency_order};
pub use effect::{Effect, UnplaceReason};
pub use explain::explain_job;
pub use fair_share::{ApiTokenHead, ApiTokenQueue, ApiTokenShare, OtherApiToken, grants_before, next_api_token};
pub use job::{Job, JobPhase};
pub use node::{Exclusion, Node};
pub use pause::{
    PauseDecision, PauseFacts, ResumeDecision, ResumeFacts, keeps_requested_pause, pause, pauses_after_step, resume,
};
pub use pending_reason::{PendingReason, join_by_node};
pub use plan::plan;
pub use plan_step::{Step, plan_step};
pub use pr_state::pr_transition_allowed;
pub use preemption::{Preemption, may_be_preempted, preemptions};
pub use priority::{CLASS_STEP_MS, MAX_OVERTAKING_MS, OrderKey, order_key};
pub use queue_estimate::{QueueEstimate, queue_estimates};
pub use slot_task::{ReadyTask, RunningTask, TaskOrder};
pub use speculative_prefill::prefill_node;
pub use start_state::{Predecessor, StartState, start_state};
pub use state::{PlannerState, PlannerTiming};
pub use suspicion::{BootAttempt, UnreportedEnd, is_suspect};
pub use task_state::task_transition_allowed;
