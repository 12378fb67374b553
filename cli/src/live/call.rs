//! The state of one model call, from the queue to its last token.
//!
//! Frames carry text, not tokens. While a model generates, the number of tokens is estimated: the number of bytes,
//! divided by the bytes per token of this model's finished calls. Estimates are marked with `~`; the exact numbers are
//! known when the call has finished.

use std::time::Duration;

use cfq_proto::http::TokensData;
use cfq_proto::ids::JobId;
use cfq_proto::job::JobRole;
use cfq_proto::model::ModelId;

use crate::output;

/// Assumed bytes per token before any call of the model has finished: typical for English and code.
const DEFAULT_BYTES_PER_TOKEN: f64 = 4.0;
/// Minimum generation time before a rate is shown: over a shorter time a rate is not meaningful.
const MIN_RATE_TIME: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct ModelCall {
    pub job: JobId,
    pub role: JobRole,
    pub model: ModelId,
    pub phase: Phase,
}

/// Phase of a model call.
#[derive(Debug)]
pub enum Phase {
    Queued,
    Placed,
    Prefill,
    Decode {
        /// Bytes generated so far.
        bytes: u64,
        /// Time at which the first frame arrived, counted from the start of the watch.
        since: Duration,
        /// Bytes generated up to and including the first frame.
        before: u64,
    },
}

impl ModelCall {
    pub fn on_frame(&mut self, tokens: &TokensData, now: Duration) {
        let end = tokens.offset + tokens.text.len() as u64;
        match &mut self.phase {
            Phase::Decode { bytes, .. } if end >= *bytes => *bytes = end,
            // The first frame, or a new attempt that starts from the beginning.
            phase => *phase = Phase::Decode { bytes: end, since: now, before: end },
        }
    }

    /// Bytes generated so far.
    pub fn bytes(&self) -> u64 {
        match self.phase {
            Phase::Decode { bytes, .. } => bytes,
            Phase::Queued | Phase::Placed | Phase::Prefill => 0,
        }
    }

    /// The short name of the model, without its source: `qwen2.5-coder:14b`.
    pub fn model_name(&self) -> String {
        let name = self.model.as_str().split_once(':').map_or(self.model.as_str(), |(_, name)| name);
        name.rsplit('/').next().unwrap_or(name).to_owned()
    }

    /// The current phase, for display. `pending_reason` is the reason why the call is not placed; empty if unknown.
    pub fn describe(&self, pending_reason: &str, bytes_per_token: Option<f64>, now: Duration) -> String {
        match &self.phase {
            Phase::Queued if pending_reason.is_empty() => "waiting for a node".to_owned(),
            Phase::Queued => pending_reason.to_owned(),
            Phase::Placed => "starting on the node".to_owned(),
            Phase::Prefill => "prefill".to_owned(),
            Phase::Decode { bytes, since, before } => {
                let ratio = bytes_per_token.unwrap_or(DEFAULT_BYTES_PER_TOKEN);
                let tokens = (*bytes as f64 / ratio).round() as usize;
                let mut text = format!("generating ~{}", output::count(tokens, "token"));
                let elapsed = now.saturating_sub(*since);
                if elapsed >= MIN_RATE_TIME {
                    let rate = (bytes - before) as f64 / ratio / elapsed.as_secs_f64();
                    text += &format!(", {rate:.0}/s");
                }
                text
            }
        }
    }
}
