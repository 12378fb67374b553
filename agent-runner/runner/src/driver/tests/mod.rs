//! Complete runs of the driver against real repositories, with a scheduler that is a list of steps and scripted models.
//! A run may be interrupted before or after any step, as by a kill; a new run resumes from the committed steps.

mod fixture;
mod hand_offs;
mod loops;
mod port;
mod replies;
mod resume;
mod speculative_prefill;
