//! End-to-end and fault tests. One target: it links a large harness.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api;
mod bad_models;
mod cards;
mod command_line;
mod durable_requests;
mod faults;
mod full_disk;
mod grants;
mod hostile_machine;
mod hub;
mod hub_models;
mod imports;
mod late_results;
mod loads;
mod loop_paths;
mod make_way;
mod neighbours;
mod out_of_memory;
mod postgres_faults;
mod small_model;
mod terminal;
mod two_commands;
mod two_nodes;
mod unbound_models;
mod warm_up;
mod watch;
