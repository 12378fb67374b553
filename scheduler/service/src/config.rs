//! What a scheduler is told at its start; `cfq up` writes it as TOML.

use std::net::SocketAddr;
use std::path::PathBuf;

use cfq_proto::task::AgentBindings;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub database: DatabaseConfig,
    pub nats: cfq_link::NatsConfig,
    pub http: HttpConfig,
    #[serde(default)]
    pub defaults: Defaults,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub timing: Timing,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatabaseConfig {
    /// A host name, or the folder of the server's socket (starts with `/`).
    pub host: String,
    pub port: u16,
    pub user: String,
    pub database: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    pub bind: SocketAddr,
    /// A file of mode 0600 that holds the bearer token.
    pub token_file: PathBuf,
    /// Host names besides the loopback ones and the bound address that requests may name.
    #[serde(default)]
    pub allowed_hosts: Vec<String>,
}

/// What a task that does not say gets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Both models should be set; a task that names none is refused where they are not.
    pub agents: AgentBindings,
    /// Score out of 100.
    pub threshold: f64,
    pub max_iterations: u32,
    pub timeout_minutes: f64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { agents: AgentBindings::default(), threshold: 85.0, max_iterations: 5, timeout_minutes: 30.0 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Attempts of a job whose node may be lost before the job is dead.
    pub max_losses: i32,
    /// Attempts of a job that may break off in the middle of their answer before the job is dead.
    pub max_break_offs: i32,
    /// Runners that may be lost in a row with one task, without a step between, before it fails.
    pub max_task_losses: i32,
    /// Largest body of an HTTP request, in bytes.
    pub body_bytes: usize,
    /// Requests of one kind over NATS that are worked on at once.
    pub concurrency: usize,
    /// Connections for HTTP, feeds and requests over NATS; beats and the leader have a few of their own besides.
    pub database_connections: u32,
    /// Event feeds open at once.
    pub feeds: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_losses: 3,
            max_break_offs: 5,
            max_task_losses: 10,
            body_bytes: 1024 * 1024,
            concurrency: 16,
            database_connections: 16,
            feeds: 200,
        }
    }
}
