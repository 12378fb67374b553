//! Simulator of the queue: the scheduler's pure core decides, in virtual time, about simulated nodes and messages.
//!
//! The same run measures baselines: routers that choose a node at arrival ([`routers`]), and a cache with the memory of
//! all nodes together ([`pooled_lru`]). A run depends only on its inputs and its seed.

// The methods `to_node` and `to_scheduler` send a message; they convert nothing.
#![allow(clippy::wrong_self_convention, clippy::too_many_arguments)]

pub mod arguments;
pub mod arrivals;
pub mod cluster;
pub mod engine;
pub mod event_queue;
pub mod metrics;
pub mod pooled_lru;
pub mod rng;
pub mod routers;
pub mod trace;
