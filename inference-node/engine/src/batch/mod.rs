//! Continuous batching: which sequences run, and what each forward pass computes.

pub mod admission;
pub mod batcher;
pub mod calibration;
pub mod chunked_prefill;
pub mod latency_model;
pub mod oom_backoff;
pub mod preparations;
pub mod prepare;
pub mod prompt_lookup;
pub mod resume;
pub mod sequence;
pub mod speculative_prefill;
