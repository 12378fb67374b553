//! What a run measured.

use crate::event_queue::Micros;
use crate::pooled_lru::PooledLru;
use crate::trace::Call;

/// Measurements of one run.
#[derive(Debug)]
pub struct Metrics {
    /// Prompt tokens of the calls that started.
    pub prompt_tokens: u64,
    /// Prompt tokens that were cached.
    pub cached_tokens: u64,
    /// Time from a call to its first token, in ms, one per call.
    pub first_token_ms: Vec<f64>,
    /// Longest time from a call to its start on a node, in ms.
    pub longest_wait_ms: f64,
    /// Model loads, including the first one of each node.
    pub loads: u64,
    /// Time of the last reply, in seconds.
    pub makespan_s: f64,
    /// The pooled cache, fed with the calls in the order of their arrival in this run.
    pub pooled: PooledLru,
}

impl Metrics {
    /// No measurements yet; the pooled cache has this size.
    pub fn new(pooled_tokens: u64) -> Self {
        Self {
            prompt_tokens: 0,
            cached_tokens: 0,
            first_token_ms: Vec::new(),
            longest_wait_ms: 0.0,
            loads: 0,
            makespan_s: 0.0,
            pooled: PooledLru::new(pooled_tokens),
        }
    }

    /// Records the start of a call on a node.
    pub fn started(&mut self, call: &Call, arrived: Micros, now: Micros, cached_tokens: u64) {
        self.prompt_tokens += call.prompt_tokens;
        self.cached_tokens += cached_tokens;
        self.longest_wait_ms = self.longest_wait_ms.max((now - arrived) as f64 / 1e3);
    }

    /// Records a first token.
    pub fn first_token(&mut self, arrived: Micros, at: Micros) {
        self.first_token_ms.push(at.saturating_sub(arrived) as f64 / 1e3);
    }

    /// Share of the prompt tokens that was cached.
    pub fn reuse(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Prefix reuse relative to that of the pooled cache.
    pub fn ratio_to_pooled(&self) -> f64 {
        self.reuse() / self.pooled.reuse().max(f64::MIN_POSITIVE)
    }

    /// The `p`-th percentile of the time to first token, in ms.
    pub fn first_token_percentile(&mut self, p: f64) -> f64 {
        self.first_token_ms.sort_by(f64::total_cmp);
        let index = (self.first_token_ms.len() as f64 * p / 100.0) as usize;
        self.first_token_ms.get(index.min(self.first_token_ms.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}
