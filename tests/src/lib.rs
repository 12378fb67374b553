//! The test harness: the real binary as processes, a NATS server of its own for every cluster, a database of its own from a
//! template, and the two doubles there are, both at the outermost edge: a scripted OpenAI-compatible model server, and a model
//! hub.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

pub mod binary;
pub mod cards;
pub mod cluster;
pub mod gguf;
pub mod hub;
pub mod nats;
pub mod oracle;
pub mod postgres;
pub mod repo;
pub mod room;

pub mod rows;
pub mod scripted;
pub mod signal;
pub mod small;
pub mod started;
pub mod terminal;
pub mod up;
pub mod wait;
