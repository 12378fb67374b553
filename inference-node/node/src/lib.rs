//! The inference node: a process, one per machine, that runs models and executes jobs on them.
//!
//! `gpu` is the inventory of the machine's devices, `models` stores model files, `proxy` runs models behind a server or a
//! program (models in this process are run by cfq-engine), `sandbox` parses untrusted model files in child processes, and
//! `node` connects them to NATS. The node handles jobs and prompts; it does not depend on tasks or reviews.

mod config;
mod engine_check;
mod error_text;
pub mod gpu;
pub mod models;
mod node;
pub mod proxy;
pub mod sandbox;

pub use config::{Config, default_weight_cache_bytes, default_yield_ignores, thread_environment};
pub use engine_check::{EngineCheckError, check_engine};
pub use node::{Error, LoaderFailure, ModelFault, run};
pub use proxy::{CommandConfig, Endpoint};
