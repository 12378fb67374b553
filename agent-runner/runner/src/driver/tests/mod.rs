//! Whole drives against real repositories, with a scheduler that is a list of steps and models that are a script. A drive
//! may be cut off before or after any step, as by a kill, and a new one goes on from what was committed.

mod bench;
mod foreseen;
mod hand_offs;
mod loops;
mod port;
mod replies;
mod resuming;
