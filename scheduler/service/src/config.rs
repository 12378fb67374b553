//! The scheduler's configuration; `cfq up` writes it as TOML.

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
    pub limits: SchedulerLimits,
    #[serde(default)]
    pub retention: RetentionConfig,
    #[serde(default)]
    pub timing: Timing,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatabaseConfig {
    /// Host name, or the folder of the server's Unix socket (starts with `/`).
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
    /// Path of a Unix socket on which the API is served too. Only its owner may be able to enter its folder: a client
    /// that connects to this socket knows that the server runs as the owner of the folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Whether stdin is the listening Unix socket `socket`, which the supervisor has created with
    /// [`create_socket`](crate::create_socket).
    #[serde(default)]
    pub socket_on_stdin: bool,
    /// Whether `bind` may be an address other than loopback. The token can then be intercepted.
    #[serde(default)]
    pub allow_plaintext: bool,
    /// How other machines reach this one, with TLS; `bind` may then be any address. Clients on this machine may use plain
    /// HTTP too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lan: Option<LanConfig>,
    /// File of mode 0600 that holds the bearer token. If the file is replaced, the new token is used at once.
    pub token_file: PathBuf,
    /// Values of the Host header that are accepted in addition to the loopback names and the address in `bind`.
    #[serde(default)]
    pub allowed_hosts: Vec<String>,
}

/// How other machines reach this one: TLS of the HTTP server, its URLs, and the port of NATS. With it, machines can join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanConfig {
    /// The server's certificate, followed by that of its authority (PEM).
    pub certificate_file: PathBuf,
    /// Private key of the server's certificate (PEM).
    pub key_file: PathBuf,
    /// Certificate of the authority that issued the server's certificate (PEM).
    pub authority_file: PathBuf,
    /// URLs of this server for other machines, the most likely one first.
    pub urls: Vec<String>,
    /// Port of NATS on the same hosts.
    pub nats_port: u16,
}

/// Default values for the fields that a submitted task leaves out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Default model and sampling parameters of each agent. A task that names no model for an agent is refused if the
    /// agent has no default model here.
    pub agents: AgentBindings,
    /// Score from 0 to 100 at which a task is accepted.
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
pub struct SchedulerLimits {
    /// How many attempts of a job may end with the loss of their node, or unaccepted by it, if the job may be the cause;
    /// one more makes the job a dead letter.
    pub max_losses: i32,
    /// How many attempts of a job may end in this way, suspected or not; one more makes the job a dead letter.
    pub max_lost_or_unaccepted: i32,
    /// How many attempts of a job may fail after their first token; one more makes the job a dead letter.
    #[serde(alias = "max_break_offs")]
    pub max_interruptions: i32,
    /// Maximum number of consecutive runner losses of a task without a committed step in between; one more ends the
    /// task (see `store::reclaim`).
    pub max_task_losses: i32,
    /// Maximum size of an HTTP request body, in bytes.
    pub body_bytes: usize,
    /// Maximum number of NATS requests of one verb (for example `accept`) that are processed at the same time.
    pub concurrency: usize,
    /// Database connections for HTTP, feeds and NATS requests. Heartbeats and the leader have separate connections.
    pub database_connections: u32,
    /// Maximum number of open event feeds; at most half of them of one named API token.
    pub feeds: usize,
    /// Maximum number of open model calls of clients; at most half of them of one named API token. With `feeds`, it leaves
    /// connections for other requests.
    pub client_calls: usize,
    /// Maximum number of tasks that have not ended.
    pub open_tasks: u32,
    /// Maximum number of open HTTP connections of one listener (TCP address or Unix socket). The default leaves room
    /// for both listeners and the database below 1024 open files, the usual limit of a process.
    pub connections: usize,
    /// Maximum time until the complete head of the next request has arrived, in ms. Idle connections are closed after
    /// this time too.
    pub request_head_timeout_ms: u64,
    /// Maximum time for which a client may accept no byte of a response, in ms.
    pub write_stall_timeout_ms: u64,
}

/// For how long data is kept that is not needed any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionConfig {
    /// Days after its end after which a task is deleted with everything that belongs to it; 0: never.
    pub ended_tasks_days: u32,
    /// Days after its last heartbeat after which a node or runner is forgotten; 0: never.
    pub nodes_days: u32,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        Self { ended_tasks_days: 90, nodes_days: 30 }
    }
}

impl Default for SchedulerLimits {
    fn default() -> Self {
        Self {
            max_losses: 3,
            max_lost_or_unaccepted: 20,
            max_interruptions: 5,
            max_task_losses: 10,
            body_bytes: 1024 * 1024,
            concurrency: 16,
            database_connections: 16,
            feeds: 200,
            client_calls: 100,
            open_tasks: 10_000,
            connections: 400,
            request_head_timeout_ms: 20_000,
            write_stall_timeout_ms: 30_000,
        }
    }
}
