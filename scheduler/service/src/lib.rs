//! The scheduler service: the Postgres store, the leader's loop that runs the planner of `cfq-scheduler-core`, the NATS
//! request handlers and the HTTP API.
//!
//! | module | contents |
//! |---|---|
//! | `store` | Postgres: every write is a compare-and-set on its fence |
//! | `leader` | election, and the leader's loop: one async task owns the planner's cache and applies its plans |
//! | `bus` | answers nodes and runners over NATS; any scheduler may answer, because the writes are fenced |
//! | `heartbeat_failures` | which nodes and runners could not extend their leases |
//! | `call_watch` | wakes the handlers of API clients' calls |
//! | `ended_calls` | deletes the calls of API clients that have ended |
//! | `feed_wakeup` | wakes the event feeds when events are committed or tokens are generated |
//! | `api` | HTTP under `/api/v1`, event feeds, health, metrics; the OpenAI-compatible API under `/v1` |
//! | `retention` | deletes ended tasks and lost nodes after the configured time |
//! | `version` | which versions of nodes and runners are accepted |
//! | `server` | listens on TCP and on a Unix socket, limits connections |
//!
//! Outside of tests, only `store` reads and writes cfq's tables; `deploy` uses SQL to create the role and the database.
//! The service runs no models and does not use git.

mod api;
mod bus;
mod call_watch;
mod config;
mod ended_calls;
mod feed_wakeup;
mod heartbeat_failures;
mod leader;
mod link;
mod metrics;
mod retention;
mod run;
mod running_text;
mod server;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod version;

pub use api::openapi_document;
pub use config::{Config, DatabaseConfig, Defaults, HttpConfig, LanConfig, RetentionConfig, SchedulerLimits};
pub use run::{Error, HttpServer, migrate, run};
pub use server::{ListenError, create_socket};
