//! The reply to one chat completion, as it arrives.

use std::time::Instant;

use cfq_engine::{Outbox, TextStream};
use cfq_proto::job::{Completion, FinishReason, JobFailure, Usage};

use super::context_limit::ReportedUsage;
use super::control_names::Unescape;
use super::peer::Peer;

/// What one part of a reply contained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartContent {
    /// Whether the model made progress: text, other output, a finish reason, or the usage of more tokens.
    pub(super) is_progress: bool,
    /// Whether it is the last part.
    pub(super) is_last: bool,
}

/// The reply so far.
pub(super) struct Reply<'a> {
    peer: &'a Peer<'a>,
    outbox: &'a Outbox,
    started: Instant,
    unescape: Unescape,
    stream: TextStream,
    text: String,
    finish: Option<FinishReason>,
    /// Number of parts with text.
    text_parts: u32,
    first_token_ms: Option<u64>,
    usage: Option<ReportedUsage>,
    /// Maximum size of the text, in bytes.
    max_text_bytes: usize,
}

impl<'a> Reply<'a> {
    /// An empty reply, whose text is sent to `outbox`; `escaped`: whether the prompt has invisible characters.
    pub(super) fn new(
        (peer, outbox, started): (&'a Peer<'a>, &'a Outbox, Instant),
        stop: &[String],
        escaped: bool,
        max_text_bytes: usize,
    ) -> Self {
        Self {
            peer,
            outbox,
            started,
            unescape: Unescape::new(escaped),
            stream: TextStream::new(stop),
            text: String::new(),
            finish: None,
            text_parts: 0,
            first_token_ms: None,
            usage: None,
            max_text_bytes,
        }
    }

    /// The server, for error messages.
    pub(super) fn peer(&self) -> &'a Peer<'a> {
        self.peer
    }

    /// Why the reply ended; `None` if it has not ended yet.
    pub(super) fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Whether the reply has any text.
    pub(super) fn has_text(&self) -> bool {
        self.text_parts > 0
    }

    /// Size of the text, in bytes.
    pub(super) fn text_bytes(&self) -> usize {
        self.text.len()
    }

    /// Sets why the reply ended. Returns whether it had not ended before.
    pub(super) fn set_finish(&mut self, finish: FinishReason) -> bool {
        self.finish.replace(finish).is_none()
    }

    /// Sets the usage. Returns whether it counts more tokens of the reply than the last one.
    pub(super) fn set_usage(&mut self, usage: ReportedUsage) -> bool {
        self.usage.replace(usage).is_none_or(|last| last.output_tokens < usage.output_tokens)
    }

    /// Adds text to the reply and reports it as a step. Returns whether there was any. If a stop string is found, the
    /// reply ends.
    pub(super) fn push_text(&mut self, text: String) -> Result<bool, JobFailure> {
        let text = self.unescape.push(text);
        if text.is_empty() {
            return Ok(false);
        }
        self.text_parts += 1;
        self.first_token_ms.get_or_insert(self.started.elapsed().as_millis() as u64);
        let piece = self.stream.push(text.as_bytes());
        self.text.push_str(&piece.text);
        self.outbox.report_step(&piece.text);
        if piece.stopped {
            self.finish = Some(FinishReason::Stop);
        } else if self.text.len() > self.max_text_bytes {
            let limit = format!("its text is longer than {} bytes", self.max_text_bytes);
            return Err(self.peer.invalid_reply(&limit));
        }
        Ok(true)
    }

    /// Reports progress without text as a step.
    pub(super) fn report_progress(&self) {
        self.outbox.report_step("");
    }

    /// Whether a stop string was found in the text; the server may still be generating.
    pub(super) fn is_stopped(&mut self) -> bool {
        self.finish.is_some() && self.stream.push(&[]).stopped
    }

    /// The completion; fails if the reply has not ended.
    pub(super) fn into_completion(mut self) -> Result<Completion, JobFailure> {
        let Some(finish) = self.finish else {
            let reason = format!("{} broke off in the middle of its reply", self.peer.name);
            return Err(JobFailure::Unavailable { reason });
        };
        if finish == FinishReason::Length
            && let Some(failure) = self.usage.and_then(|usage| self.peer.context?.cut_reply(usage))
        {
            return Err(failure);
        }
        let rest = self.stream.finish();
        self.outbox.report_step(&rest);
        self.text.push_str(&rest);
        let total_ms = self.started.elapsed().as_millis() as u64;
        let usage = Usage {
            prompt_tokens: self.usage.map_or(0, |u| u.prompt_tokens),
            cached_tokens: self.usage.map_or(0, |u| u.cached_tokens),
            output_tokens: self.usage.map_or(self.text_parts, |u| u.output_tokens),
            first_token_ms: self.first_token_ms.unwrap_or(total_ms),
            total_ms,
            ..Usage::default()
        };
        Ok(Completion { text: self.text, finish, usage, logprobs: Vec::new() })
    }
}
