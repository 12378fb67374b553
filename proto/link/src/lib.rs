//! The cluster session the services share: connecting to NATS as who one is, request and reply, keeping leases, moving
//! blobs, guarded outbound HTTP, child processes. It knows how things travel, never what they mean.

pub mod blobs;
pub mod child;
pub mod clock;
pub mod failpoint;
pub mod lease;
pub mod outbound;
pub mod refusal;
pub mod secret;
pub mod session;
pub mod stop;
pub mod wheel;

pub use session::{LinkError, NatsConfig, Session};
