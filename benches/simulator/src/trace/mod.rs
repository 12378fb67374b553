//! A workload: model calls with their prompts, read from a trace file or generated.
//!
//! Prompts are sequences of blocks of [`BLOCK_TOKENS`] tokens. Two formats are read, told apart by their first line: the
//! one of the Mooncake traces (`timestamp`, `input_length`, `output_length`, `hash_ids`), and the agentic one, whose
//! calls also name a model and the calls they wait for (`dependencies`).

mod read;
mod synthetic;

use crate::rng::mix;

pub use read::{TraceError, TraceOptions, read};
pub use synthetic::{TaskLoad, alternating, task_loops};

/// Tokens per block of a prompt.
pub const BLOCK_TOKENS: u64 = 512;

/// One model call.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Index of the model.
    pub model: usize,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Length of the reply, in tokens. The simulated client asks for exactly this many.
    pub output_tokens: u32,
    /// Prefix hash chain: one link for each whole block of the prompt. The chains of two models share no link.
    pub chain: Vec<u64>,
    /// When the call is made.
    pub arrival: Arrival,
}

/// When a call is made.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrival {
    /// At a time since the start of the trace, in ms.
    At(f64),
    /// After the end of these earlier calls of the workload (indices), each with a delay in ms.
    After(Vec<(usize, f64)>),
}

/// Calls in the order of the trace, and the names of their models.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Workload {
    /// The calls.
    pub calls: Vec<Call>,
    /// Names of the models; [`Call::model`] is an index into it.
    pub models: Vec<String>,
}

impl Workload {
    /// Number of prompt tokens of all calls.
    pub fn prompt_tokens(&self) -> u64 {
        self.calls.iter().map(|call| call.prompt_tokens).sum()
    }
}

/// Prefix hash chain of blocks: each link depends on the model, the block and all blocks before it.
pub fn chain(model: usize, blocks: &[u64]) -> Vec<u64> {
    let mut link = mix(model as u64 + 1);
    blocks
        .iter()
        .map(|block| {
            link = mix(link ^ mix(block.wrapping_add(0x5851_f42d_4c95_7f2d)));
            link
        })
        .collect()
}
