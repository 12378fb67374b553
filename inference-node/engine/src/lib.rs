//! A continuous-batching inference engine for GGUF and safetensors models on consumer hardware.
//!
//! One [`LocalEngine`] runs one model: it admits a sequence if the KV pool has enough free tokens, computes all running
//! sequences in one forward pass per step, and streams their tokens. [`Engine`] is the trait that other implementations
//! (a proxy to a model server) share. The crate does not depend on the network, the cluster or a model hub; its input
//! is the path of a model file.
//!
//! | folder     | holds                                                                                      |
//! |------------|--------------------------------------------------------------------------------------------|
//! | `model/`   | model files and their headers, tokenizer, chat template, architecture, RoPE and its scaling |
//! | `backend/` | forward passes: `cpu` (our kernels), `cuda` (candle tensors, paged KV), `candle_transformers` |
//! | `kv/`      | the KV cache in blocks: sharing, eviction, offload to host memory                             |
//! | `batch/`   | continuous batching, admission, chunked prefill, prompt lookup, speculative prefill            |
//! | `sampling/`| sampling, constrained decoding, stop strings                                                  |
//! | `check/`   | the engine's self-check                                                                      |

#![warn(missing_docs)]

mod backend;
mod batch;
mod builder;
pub mod check;
mod engine;
#[cfg(test)]
#[path = "../tests/fixtures/models.rs"]
mod fixtures;
mod generation;
mod kv;
mod load_error;
mod local_engine;
mod memory_estimate;
pub mod model;
#[cfg(test)]
mod parity;
pub mod sampling;
mod weight_cache;

pub use backend::cuda;
pub use batch::admission::Changes;
pub use batch::batcher::StepHook;
pub use batch::speculative_prefill::{PrefillProgress, SpeculativePrompt};
pub use builder::EngineBuilder;
pub use cfq_memory::{Bytes, DoesNotFit, MemoryEstimate};
pub use engine::{Admitted, Engine, ExpectedPrompt, Refused};
pub use generation::{Ended, Event, Generation, Outbox, generation};
pub use kv::{HostKvCache, KvOffloadFormat};
pub use load_error::{EngineLimits, LoadError};
pub use local_engine::LocalEngine;
pub use memory_estimate::{ModelSummary, estimate, summarise};
pub use weight_cache::{CachedWeights, FileStamp};
