//! End-to-end and fault tests. One target: it links a large harness.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod imports;
