//! End-to-end and fault tests. One target: it links a large harness.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api;
mod command_line;
mod faults;
mod grants;
mod imports;
mod loop_paths;
mod small_model;
mod terminal;
mod two_commands;
