//! A continuous-batching inference engine for GGUF and safetensors models on consumer hardware.
//!
//! One [`LocalEngine`] runs one model: it admits a sequence if the KV pool has enough free tokens, computes all running
//! sequences in one forward pass per step, and streams their tokens. [`Engine`] is the trait that other implementations
//! (a proxy to a model server) share. The crate does not depend on the network, the cluster or a model hub; its input
//! is the path of a model file.
//!
//! | module               | contents                                                                            |
//! |----------------------|-------------------------------------------------------------------------------------|
//! | `engine.rs`          | the trait [`Engine`]: admission, state, speculative prefill                         |
//! | `builder.rs`         | [`EngineBuilder`]: load, calibrate and start a model                                |
//! | `local_engine.rs`    | [`LocalEngine`]: the engine that runs one model in this process                     |
//! | `prompts.rs`         | [`PromptTokenizer`]: from messages to tokens, in this process or another one        |
//! | `generation.rs`      | [`Generation`] and [`Outbox`]: the reader's and the engine's half of one generation |
//! | `memory_estimate.rs` | memory estimate on the CPU, from a model's header                                   |
//! | `weight_cache.rs`    | [`CachedWeights`]: weights of unloaded models in host memory                        |
//! | `load_error.rs`      | limits and errors of a load                                                         |
//! | `engine_failure.rs`  | failures that end an engine                                                         |
//! | `model/`             | model files and headers, tokenizer, chat template, architecture, RoPE scaling       |
//! | `backend/`           | forward passes: `cpu`, `cuda` (candle tensors, paged KV), `candle_transformers`     |
//! | `kv/`                | the KV cache in blocks: sharing, eviction, offload to host memory                   |
//! | `batch/`             | continuous batching, admission, chunked prefill, prompt lookup, preemption          |
//! | `sampling/`          | sampling, constrained decoding, stop strings                                        |
//! | `check/`             | the engine's self-check                                                             |
//!
//! The types of prompts and results are cfq-proto's, re-exported here for programs that use this crate alone.

#![warn(missing_docs)]

mod backend;
mod batch;
mod builder;
pub mod check;
mod engine;
mod engine_failure;
#[cfg(test)]
#[path = "../tests/fixtures/models.rs"]
mod fixtures;
mod generation;
mod kv;
mod load_error;
mod local_engine;
mod memory_estimate;
mod model;
#[cfg(test)]
mod parity;
mod prompts;
mod sampling;
mod weight_cache;

pub use backend::cuda;
pub use batch::admission::StateChanged;
pub use batch::batcher::StepHook;
pub use batch::speculative_prefill::{PrefillProgress, SpeculativePrompt};
pub use builder::EngineBuilder;
pub use cfq_proto::job::{
    ChatMessage, ChatRole, Completion, FinishReason, GeneratedTokens, JobFailure, OutputFormat, Prompt, Sampling, Usage,
};
pub use cfq_proto::model::ModelId;
pub use cfq_proto::node::ModelState;
pub use engine::{AdmitError, Admitted, Engine, ExpectedPrompt};
pub use engine_failure::EngineFailure;
pub use generation::{Generation, GenerationError, GenerationEvent, Outbox};
pub use kv::{HostKvCache, KV_BLOCK_TOKENS, KvOffloadFormat};
pub use load_error::{EngineLimits, LoadError};
pub use local_engine::LocalEngine;
pub use memory_estimate::{ModelSummary, estimate_memory, summarize_model};
pub use model::file::ModelFile;
pub use model::gguf::{GgufHeader, HeaderError};
pub use model::time_limit::TimeLimit;
pub use model::tokenizer::Vocabulary;
pub use prompts::{ModelFacts, PROMPT_STACK_BYTES, PromptModel, PromptRequest, PromptTokenizer, PromptTokens};
pub use sampling::text::TextStream;
pub use weight_cache::{CachedWeights, FileStamp};

/// Internals that the tests, benchmarks and fuzz targets of this workspace use; not part of the public interface.
#[doc(hidden)]
pub mod testing {
    pub use crate::model::chat_template::ChatTemplate;
    pub use crate::model::random::random_matrix;
    pub use crate::model::tokenizer::vocabulary_size;
    pub use crate::sampling::grammar::Grammars;
}
