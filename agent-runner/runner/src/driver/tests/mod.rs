//! Tests: complete runs of the driver against real repositories, with a fake scheduler, which only keeps a list of
//! steps, and with scripted models. A run may be interrupted before or after any step, as if the runner were killed; a
//! new run resumes from the committed steps.

mod fixture;
mod hand_offs;
mod loops;
mod port;
mod replies;
mod repositories;
mod resume;
mod speculative_prefill;
