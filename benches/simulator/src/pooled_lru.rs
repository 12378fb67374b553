//! Baseline for prefix reuse: one least recently used cache with the memory of all nodes together, in which every call
//! finds the blocks of all calls before it, wherever they ran.

use crate::engine::Lru;
use crate::trace::{BLOCK_TOKENS, Call};

/// Pooled cache, and the tokens counted so far.
#[derive(Debug, Default)]
pub struct PooledLru {
    capacity_blocks: u64,
    blocks: Lru,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl PooledLru {
    /// An empty cache of this size.
    pub fn new(capacity_tokens: u64) -> Self {
        Self { capacity_blocks: capacity_tokens / BLOCK_TOKENS, ..Self::default() }
    }

    /// Looks up and adds the prompt of a call.
    pub fn call(&mut self, call: &Call) {
        let cached = call.chain.iter().take_while(|block| self.blocks.contains(**block)).count() as u64;
        self.cached_tokens += (cached * BLOCK_TOKENS).min(call.prompt_tokens.saturating_sub(1));
        self.prompt_tokens += call.prompt_tokens;
        // The end of a prompt is evicted before its beginning, which more prompts share.
        call.chain.iter().rev().for_each(|block| self.blocks.touch(*block));
        while self.blocks.len() as u64 > self.capacity_blocks {
            self.blocks.pop_oldest();
        }
    }

    /// Share of the prompt tokens that was cached.
    pub fn reuse(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}
