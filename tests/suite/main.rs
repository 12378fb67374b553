//! End-to-end and fault injection tests. They are one target because each target would link the large harness.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api;
mod api_token;
mod architecture;
mod broken_environment;
mod canaries;
mod command_line;
mod default_model;
mod duplicate_ids;
mod durable_requests;
mod fault_injection;
mod full_disk;
mod gpu_yield;
mod gpus;
mod hostile_repository;
mod hub_download;
mod hub_models;
mod imports;
mod invalid_model_files;
mod job_isolation;
mod late_results;
mod loop_paths;
mod model_loading;
mod nats_permissions;
mod out_of_memory;
mod postgres_faults;
mod requirements;
mod sandbox;
mod small_model;
mod speculative_prefill;
mod standby_scheduler;
mod terminal;
mod two_nodes;
mod unresponsive_server;
mod up_and_demo;
mod watch;
