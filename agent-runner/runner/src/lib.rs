//! Drives tasks: takes a lease, builds commits in a mirror of the user's repository, asks models through the scheduler,
//! checks what they made, and lets `cfq-convergence` decide, one durable step at a time.

pub mod checks;
mod config;
pub mod driver;
pub mod edits;
pub mod pipeline;
mod service;
pub mod workstream;

pub use config::Config;
pub use service::{Error, run};
