//! A simulated cluster: tables in memory, a leader with the real planner, nodes, and messages between them.
//!
//! What is real: the planner ([`cfq_scheduler_core::PlannerState`] and [`cfq_scheduler_core::plan`]), the rule of
//! suspicion and the backoff. What is modelled here: the writes that the scheduler makes in SQL ([`tables`]), the
//! protocol of a node ([`node`]) and its engine, and the network.

pub mod checks;
pub mod config;
mod leader;
mod messages;
mod network;
pub mod node;
mod run;
pub mod tables;

pub use config::{ClusterConfig, Faults, Timing};
pub use run::{Outcome, run};
