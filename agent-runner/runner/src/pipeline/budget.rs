//! Budget of a prompt: maximum bytes of each part. The runner has no tokenizer, so the first budget suits a common
//! context length. If a model reports that its context is smaller, all parts shrink in proportion and the job is
//! requested again.

/// Assumed bytes per token, a low estimate. Used only to divide a budget, never to refuse a prompt.
const PROMPT_BYTES_PER_TOKEN: u64 = 3;
/// Tokens of the prompt templates without the values inserted into them.
const PROMPT_TEMPLATE_TOKENS: u64 = 350;

/// Maximum sizes of the parts of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Maximum size of all files of the base commit that the prompt shows, with the policies, in bytes.
    pub context: usize,
    /// Maximum size of all files of the artifact under revision or review together, in bytes. In a review, the diff
    /// gets half of it; in that of a change which the loop did not make, what it needs.
    pub artifact: usize,
    /// Whether the map of the repository may be shown.
    pub map: bool,
    /// Maximum size of the findings of the checks and of the review together, in bytes.
    pub feedback: usize,
    /// Maximum reply length, in tokens.
    pub reply_tokens: u32,
}

impl Budget {
    /// First budget of a job; it fits a context of 32K tokens.
    pub fn first(reply_tokens: u32) -> Self {
        Self { context: 32 * 1024, map: true, artifact: 40 * 1024, feedback: 8 * 1024, reply_tokens }
    }

    /// First budget of the review of a change that the loop did not make, which may be longer than a result of the loop.
    pub fn first_of_change(reply_tokens: u32) -> Self {
        Self { artifact: 160 * 1024, ..Self::first(reply_tokens) }
    }

    /// Maximum size of all policies together, in bytes. They are a part of the context.
    pub(super) fn policies(self) -> usize {
        self.context / 4
    }

    /// Returns the budget for the next try after a model reported that prompt and reply need more than its context of
    /// `have` tokens.
    pub fn shrunk(self, have: u64) -> Self {
        // At most a third of the context is for the reply; the rest, less the templates, is for the files and findings.
        let reply = u64::from(self.reply_tokens).min(have / 3).max(64);
        let tokens = have.saturating_sub(reply + PROMPT_TEMPLATE_TOKENS);
        let available = usize::try_from(tokens * PROMPT_BYTES_PER_TOKEN).unwrap_or(usize::MAX);
        let total = self.context + self.artifact + self.feedback;
        // Each part is at least halved, so that the number of tries is bounded.
        let part = |bytes: usize| (bytes.saturating_mul(available.min(total / 2)) / total.max(1)).min(bytes);
        Self {
            context: part(self.context),
            map: false,
            artifact: part(self.artifact),
            feedback: part(self.feedback),
            reply_tokens: u32::try_from(reply).unwrap_or(u32::MAX),
        }
    }
}

/// Returns at most `bytes` of a text, cut at the end of a line, with a note of how much is omitted.
pub(super) fn truncate(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let mut end = bytes;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let end = text[..end].rfind('\n').map_or(end, |i| i + 1);
    format!("{}[... {} more bytes omitted ...]\n", &text[..end], text.len() - end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_context_shrinks_all_parts() {
        let small = Budget::first(2048).shrunk(2048);
        assert_eq!(small.reply_tokens, 682);
        assert!((small.context + small.artifact + small.feedback) as u64 / PROMPT_BYTES_PER_TOKEN + 682 < 2048);
    }

    #[test]
    fn truncated_text_states_the_omitted_bytes() {
        assert_eq!(truncate("a\nb\n", 10), "a\nb\n");
        assert_eq!(truncate("aaa\nbbb\n", 5), "aaa\n[... 4 more bytes omitted ...]\n");
        assert!(truncate("äöü", 3).starts_with('ä'));
    }

    proptest! {
        #[test]
        fn shrunk_budget_is_at_most_half(have in 0u64..1_000_000, reply in 1u32..100_000) {
            let before = Budget::first(reply);
            let after = before.shrunk(have);
            prop_assert!(after.context <= before.context / 2 && after.artifact <= before.artifact / 2);
            prop_assert!(after.reply_tokens <= reply.max(64));
        }
    }
}
