//! The local infrastructure of one machine: cfq's folders, the backing services (Postgres and NATS, found on the
//! machine or fetched), their private instances, and the checks of `cfq doctor`.
//!
//! The scheduler, node and runner never import this crate: they get a socket, a URL and key files, and do not depend on
//! how the servers behind them were started.

pub mod account;
pub mod backup;
pub mod certificates;
pub mod doctor;
pub mod files;
pub mod lock;
pub mod nats;
mod orphans;
pub mod paths;
pub mod postgres;
pub mod services;
pub mod stack;
pub mod status_output;

pub use lock::DataLock;
pub use paths::Paths;
pub use services::{ServiceOptions, ServiceSource};
pub use stack::{LanOptions, Stack, StackError, StackOptions};
pub use status_output::StatusOutput;
