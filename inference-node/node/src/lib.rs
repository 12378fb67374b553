//! The node: one per machine, runs models and serves their jobs.
//!
//! `gpu` says what the machine has, `models` where model files are and what is in them, `engine` runs one model (in this
//! process, or behind an endpoint), `node` speaks NATS. It knows jobs and prompts, never tasks or reviews.

mod config;
pub mod engine;
pub mod gpu;
pub mod models;
mod node;

pub use config::{Config, default_parked_weights, default_yield_ignores, thread_environment};
pub use engine::proxy::Endpoint;
pub use node::{Error, run};
