//! The test harness. It runs the real binary as processes; each cluster gets its own NATS server and its own database,
//! copied from a template. It replaces only what lies outside the product: an OpenAI-compatible model server with
//! scripted replies, a model hub, and NVIDIA's management library.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

pub mod binary;
pub mod cfq_process;
pub mod cfq_up;
pub mod chaos;
pub mod cli_json;
pub mod cluster;
pub mod fake_gpus;
pub mod file_lease;
pub mod foreign_process;
pub mod gguf;
pub mod hub;
pub mod machines;
pub mod mcp_client;
pub mod mount_namespace;
pub mod nats;
pub mod nats_proxy;
pub mod oracle;
pub mod postgres;
pub mod repo;
pub mod scripted;
pub mod signal;
pub mod small_model;
pub mod task_rows;
pub mod terminal;
pub mod wait;
