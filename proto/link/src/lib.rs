//! Shared I/O of the services: NATS connections with requests and replies, leases, blobs, construction of HTTP clients,
//! child processes, download of Python wheels. This crate transports messages and does not interpret them.

pub mod blobs;
pub mod child;
pub mod clock;
pub mod credentials_lock;
pub mod failpoint;
pub mod lease;
mod link_error;
pub mod outbound;
pub mod permission_violation;
pub mod secret;
pub mod server_version;
pub mod session;
pub mod stall_watch;
pub mod stop;
pub mod tls;
pub mod unix_socket;
pub mod wheel;

pub use link_error::LinkError;
pub use session::{NatsConfig, Session};
