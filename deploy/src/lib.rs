//! Everything one machine needs underneath cfq: the folders, the engines (Postgres and NATS, found or fetched), their
//! private instances, and the doctor that says what is wrong with any of it.
//!
//! The services never import this crate: they get a socket, a URL and key files, and do not know who started the
//! servers behind them.

pub mod account;
pub mod doctor;
pub mod engines;
pub mod files;
pub mod lock;
pub mod nats;
pub mod paths;
pub mod postgres;
pub mod stack;
mod strays;
pub mod talk;

pub use engines::{EngineOptions, Preference};
pub use lock::DataLock;
pub use paths::Paths;
pub use stack::{Options, Stack, StackError};
pub use talk::Talk;
