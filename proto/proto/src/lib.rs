//! The words every part of cfq shares: typed ids, tasks, jobs, nodes, reviews, events, the subjects and envelope they
//! travel in, the HTTP types with the Rust client, and prefix hashing.
//!
//! Nothing here decides anything. Rules live in the pure crates (`cfq-scheduler-core`, `cfq-convergence`, `cfq-memory`,
//! `cfq-transformer`); I/O beyond the HTTP client lives in `cfq-link` and the services.

pub mod blob;
pub mod client;
pub mod early;
pub mod envelope;
pub mod event;
pub mod http;
pub mod ids;
pub mod job;
pub mod looping;
pub mod messages;
pub mod model;
pub mod node;
pub mod pr;
pub mod prefix;
pub mod review;
pub mod subject;
pub mod task;
pub mod timing;
