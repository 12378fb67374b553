//! Agent runner: leases tasks, builds commits in a mirror of the user's repository, calls models through the scheduler,
//! checks their output, and lets `cfq-convergence` decide after each iteration. Every step is recorded before the
//! runner acts on it.

pub mod checks;
mod config;
pub mod driver;
pub mod edits;
pub mod pipeline;
mod policy_files;
mod service;
pub mod workstream;

pub use config::{Config, DEFAULT_CONCURRENCY};
pub use policy_files::{FIRST_POLICIES, POLICIES_EXTENSION, ServerPolicies};
pub use service::{Error, run};
