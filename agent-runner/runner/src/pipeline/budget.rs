//! How many bytes each part of a prompt may have. The runner has no tokenizer: it begins with what a common context takes,
//! and where a model says its context is smaller, with the exact figures, everything shrinks in proportion and the job is
//! asked for anew.

/// Bytes a token stands for, on the careful side; only for a part of a budget, never for a decision to refuse.
const BYTES_PER_TOKEN: u64 = 3;
/// What the words of the templates themselves take, in tokens.
const TEMPLATE_TOKENS: u64 = 350;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Context files of the task, together.
    pub context: usize,
    /// The artifact under revision or review, together; half of it for the diff.
    pub artifact: usize,
    /// What checks and critic said.
    pub feedback: usize,
    /// Longest reply, in tokens.
    pub reply_tokens: u32,
}

impl Budget {
    /// Fits a context of 32K tokens.
    pub fn first(reply_tokens: u32) -> Self {
        Self { context: 32 * 1024, artifact: 40 * 1024, feedback: 8 * 1024, reply_tokens }
    }

    /// After a model said that a prompt and its reply would need more than the `have` tokens its context has.
    pub fn shrunk(self, have: u64) -> Self {
        // A third of the context for the reply, the rest for what is shown, less the templates.
        let reply = u64::from(self.reply_tokens).min(have / 3).max(64);
        let tokens = have.saturating_sub(reply + TEMPLATE_TOKENS);
        let room = usize::try_from(tokens * BYTES_PER_TOKEN).unwrap_or(usize::MAX);
        let now = self.context + self.artifact + self.feedback;
        // At least a halving, so that asking again ends.
        let part = |bytes: usize| (bytes.saturating_mul(room.min(now / 2)) / now.max(1)).min(bytes);
        Self {
            context: part(self.context),
            artifact: part(self.artifact),
            feedback: part(self.feedback),
            reply_tokens: u32::try_from(reply).unwrap_or(u32::MAX),
        }
    }
}

/// At most `bytes` of a text, cut at a line; says so where something is missing.
pub(super) fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let mut end = bytes;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let end = text[..end].rfind('\n').map_or(end, |i| i + 1);
    format!("{}[... {} more bytes are left out ...]\n", &text[..end], text.len() - end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_context_shrinks_everything() {
        let small = Budget::first(2048).shrunk(2048);
        assert_eq!(small.reply_tokens, 682);
        assert!((small.context + small.artifact + small.feedback) as u64 / BYTES_PER_TOKEN + 682 < 2048);
    }

    #[test]
    fn a_cut_text_says_what_is_missing() {
        assert_eq!(cut("a\nb\n", 10), "a\nb\n");
        assert_eq!(cut("aaa\nbbb\n", 5), "aaa\n[... 4 more bytes are left out ...]\n");
        assert!(cut("äöü", 3).starts_with('ä'));
    }

    proptest! {
        #[test]
        fn shrinking_never_grows_and_always_halves(have in 0u64..1_000_000, reply in 1u32..100_000) {
            let before = Budget::first(reply);
            let after = before.shrunk(have);
            prop_assert!(after.context <= before.context / 2 && after.artifact <= before.artifact / 2);
            prop_assert!(after.reply_tokens <= reply.max(64));
        }
    }
}
