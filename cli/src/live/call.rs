//! One call of a model, from the queue to its last token.
//!
//! Frames carry text, not tokens; while a model generates, tokens are told from bytes, as the scheduler does it, with the
//! ratio that this model showed in its finished calls. Such figures carry a `~`; the exact ones come with the call's end.

use std::time::Duration;

use cfq_proto::http::TokensData;
use cfq_proto::ids::JobId;
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;

use crate::output;

/// Bytes a token, before any call of a model has ended: common for English and code.
const BYTES_A_TOKEN: f64 = 4.0;
/// A rate over less than this says nothing.
const RATE_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct Call {
    pub job: JobId,
    pub role: Agent,
    pub model: ModelId,
    pub phase: Phase,
}

#[derive(Debug)]
pub enum Phase {
    Queued,
    Placed,
    Prefill,
    Decode {
        bytes: u64,
        /// When the first frame had come, and the bytes there were then.
        since: Duration,
        before: u64,
    },
}

impl Call {
    pub fn frame(&mut self, tokens: &TokensData, now: Duration) {
        let end = tokens.offset + tokens.text.len() as u64;
        match &mut self.phase {
            Phase::Decode { bytes, .. } if end >= *bytes => *bytes = end,
            // The first frame, or a new attempt that begins again.
            phase => *phase = Phase::Decode { bytes: end, since: now, before: end },
        }
    }

    /// Of the output so far.
    pub fn bytes(&self) -> u64 {
        match self.phase {
            Phase::Decode { bytes, .. } => bytes,
            Phase::Queued | Phase::Placed | Phase::Prefill => 0,
        }
    }

    /// The name a person calls the model by, without where it comes from: `qwen2.5-coder:14b`.
    pub fn name(&self) -> String {
        let name = self.model.as_str().split_once(':').map_or(self.model.as_str(), |(_, name)| name);
        name.rsplit('/').next().unwrap_or(name).to_owned()
    }

    /// What it is at; `waits` is why it is not placed, if that is known.
    pub fn words(&self, waits: &str, bytes_a_token: Option<f64>, now: Duration) -> String {
        match &self.phase {
            Phase::Queued if waits.is_empty() => "waiting for a node".to_owned(),
            Phase::Queued => waits.to_owned(),
            Phase::Placed => "waiting for the node".to_owned(),
            Phase::Prefill => "prefill".to_owned(),
            Phase::Decode { bytes, since, before } => {
                let ratio = bytes_a_token.unwrap_or(BYTES_A_TOKEN);
                let tokens = (*bytes as f64 / ratio).round() as usize;
                let mut text = format!("generating ~{}", output::count(tokens, "token"));
                let spent = now.saturating_sub(*since);
                if spent >= RATE_AFTER {
                    let rate = (bytes - before) as f64 / ratio / spent.as_secs_f64();
                    text += &format!(", {rate:.0}/s");
                }
                text
            }
        }
    }
}
