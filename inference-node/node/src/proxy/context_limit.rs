//! The context of a model, and what a prompt and its reply need of it.

use cfq_proto::job::{JobFailure, Prompt};

use super::TOKENS_PER_BYTE;
use super::context_error::ContextExceeded;

/// Servers end a reply up to this number of tokens before the end of the context.
const CONTEXT_MARGIN_TOKENS: u64 = 16;

/// Numbers of tokens as the server counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportedUsage {
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) output_tokens: u32,
}

/// The context of a model, and an estimate of what a prompt and its reply need. The estimate is used only in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContextLimit {
    context_tokens: u64,
    reply_tokens: u64,
    prompt_tokens: u64,
}

impl ContextLimit {
    pub(super) fn of(prompt: &Prompt, context_tokens: u32) -> Self {
        let bytes: usize = prompt.messages.iter().map(|message| message.content.len()).sum();
        Self {
            context_tokens: context_tokens.into(),
            reply_tokens: prompt.sampling.max_tokens.into(),
            prompt_tokens: (bytes as f64 * TOKENS_PER_BYTE) as u64,
        }
    }

    /// Estimated usage of a reply of this size, for programs that report none.
    pub(super) fn estimate(self, reply_bytes: usize) -> ReportedUsage {
        let tokens = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let output_tokens = tokens((reply_bytes as f64 * TOKENS_PER_BYTE).ceil() as u64);
        ReportedUsage { prompt_tokens: tokens(self.prompt_tokens), cached_tokens: 0, output_tokens }
    }

    /// The failure of a reply with this usage that ended at its maximum length, if the context ended it before; `None` if
    /// it is as long as requested.
    pub(super) fn cut_reply(self, usage: ReportedUsage) -> Option<JobFailure> {
        let (prompt_tokens, output_tokens) = (u64::from(usage.prompt_tokens), u64::from(usage.output_tokens));
        let used = prompt_tokens + output_tokens;
        let is_cut = output_tokens < self.reply_tokens && used + CONTEXT_MARGIN_TOKENS >= self.context_tokens;
        let need = (prompt_tokens + self.reply_tokens).max(self.context_tokens + 1);
        is_cut.then_some(JobFailure::TooLong { need, have: self.context_tokens })
    }

    pub(super) fn failure(self, exceeded: ContextExceeded) -> JobFailure {
        let have = exceeded.context_tokens.unwrap_or(self.context_tokens);
        let need = exceeded.prompt_tokens.unwrap_or(self.prompt_tokens) + self.reply_tokens;
        JobFailure::TooLong { need: need.max(have + 1), have }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_that_the_context_cuts_is_too_long() {
        let context = ContextLimit { context_tokens: 16_384, reply_tokens: 2048, prompt_tokens: 0 };
        let cut = |prompt_tokens, output_tokens| {
            context.cut_reply(ReportedUsage { prompt_tokens, cached_tokens: 0, output_tokens })
        };
        assert_eq!(cut(15_900, 484), Some(JobFailure::TooLong { need: 17_948, have: 16_384 }));
        assert_eq!(cut(10_000, 2048), None, "it is as long as requested");
        assert_eq!(cut(10_000, 500), None, "the server has another limit");
    }
}
