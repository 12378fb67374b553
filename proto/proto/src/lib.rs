//! Shared vocabulary of cfq: typed ids, tasks, jobs, nodes, reviews, events, the NATS messages with their subjects and
//! envelope, the HTTP types with the Rust client (feature `client`), and prefix hashing.
//!
//! This crate contains data and no decision rules. The rules live in the pure crates (`cfq-scheduler-core`,
//! `cfq-convergence`, `cfq-memory`, `cfq-transformer`); I/O beyond the HTTP client lives in `cfq-link` and the
//! services.
//!
//! Names in JSON change only with a `serde` alias: messages and rows of cfq 0.1 must load (`tests/compatibility.rs`).

#![warn(missing_docs)]

pub mod blob;
#[cfg(feature = "client")]
pub mod client;
pub mod early_stop;
pub mod envelope;
pub mod event;
mod finite;
pub mod http;
pub mod ids;
pub mod job;
pub mod join_token;
pub mod label;
pub mod loop_step;
pub mod messages;
pub mod model;
pub mod node;
pub mod plain_types;
pub mod pr;
pub mod prefix;
pub mod review;
pub mod subject;
pub mod task;
pub mod task_ref;
pub mod timing;
pub mod visible_text;
