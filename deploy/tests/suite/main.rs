//! Tests of the private Postgres and NATS with the real servers: the servers are started, killed in every way that
//! occurs in practice, and inspected from outside.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of a test may fail it too")]

mod access;
mod lab;
mod lan;
mod other_users;
mod start;
mod supervisor;
