//! The scheduler service: the store, the shell around `cfq-scheduler-core`, the NATS side, the HTTP API.
//!
//! | module | what |
//! |---|---|
//! | `store` | Postgres: every write a compare-and-set on its fence; nothing else in cfq speaks SQL |
//! | `lead` | election, and the leader's loop: one task owns the planner's cache and carries its plans out |
//! | `bus` | answers nodes and runners over NATS; any scheduler may, since the writes are fenced |
//! | `pulse` | what wakes the feeds: committed events and generated tokens |
//! | `api` | HTTP under `/api/v1`, event feeds, health, metrics |
//!
//! It never knows how a model runs, or git.

mod api;
mod bus;
mod config;
mod lead;
mod link;
mod metrics;
mod pulse;
mod run;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use config::{Config, DatabaseConfig, Defaults, HttpConfig, Limits};
pub use run::{Error, migrate, run};
