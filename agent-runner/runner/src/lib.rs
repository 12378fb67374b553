//! Drives tasks: takes a lease, builds commits in a mirror of the user's repository, asks models through the scheduler,
//! checks what they made, and lets `cfq-convergence` decide, one durable step at a time.

pub mod checks;
pub mod workstream;
