//! The text of a call that was sent to its client.
//!
//! Token frames may be lost, and a new attempt may begin again or continue after an earlier one. What was sent cannot be
//! taken back, so only text that continues it is sent. The result has the whole text; what is missing is sent with it.

use cfq_proto::messages::TokenFrame;

/// The text sent so far, and the text of the current attempt.
#[derive(Debug, Default)]
pub struct StreamedText {
    sent: String,
    attempt: i32,
    /// Text of the attempt up to the first missing frame.
    text: String,
    /// Whether the attempt's text differs from what was sent. Nothing more of it is sent.
    diverged: bool,
}

/// The whole text does not begin with the text that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the generation was interrupted after {sent} characters and could not be continued from there: send the request again"
)]
pub struct Interrupted {
    /// Number of characters that were sent.
    pub sent: usize,
}

impl StreamedText {
    /// Adds the text of a frame, if it continues what was sent.
    pub fn append(&mut self, frame: &TokenFrame) {
        if frame.fence.attempt < self.attempt {
            return;
        }
        if frame.fence.attempt > self.attempt {
            self.attempt = frame.fence.attempt;
            self.diverged = false;
            // An attempt that continues after an earlier one begins with the earlier text.
            let offset = usize::try_from(frame.offset).unwrap_or(usize::MAX);
            self.text = self.sent.get(..offset).unwrap_or_default().to_owned();
        }
        if frame.offset == self.text.len() as u64 {
            self.text.push_str(&frame.text);
        }
        self.advance();
    }

    /// The text sent so far.
    pub fn sent(&self) -> &str {
        &self.sent
    }

    /// Whether the whole text continues what was sent.
    pub fn check(&self, whole: &str) -> Result<(), Interrupted> {
        if whole.starts_with(&self.sent) {
            return Ok(());
        }
        Err(Interrupted { sent: self.sent.chars().count() })
    }

    fn advance(&mut self) {
        if self.diverged || self.text.len() <= self.sent.len() {
            self.diverged |= !self.sent.starts_with(&self.text);
            return;
        }
        match self.text.strip_prefix(self.sent.as_str()) {
            Some(rest) => self.sent.push_str(rest),
            None => self.diverged = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{JobId, LeaseId, TaskId};
    use cfq_proto::job::JobRole;
    use cfq_proto::messages::JobFence;
    use proptest::prelude::*;

    use super::*;

    fn frame(attempt: i32, offset: usize, text: &str) -> TokenFrame {
        let fence = JobFence { job: JobId::fresh(), attempt, lease: LeaseId::fresh() };
        let (offset, text) = (offset as u64, text.to_owned());
        TokenFrame { task: TaskId::fresh(), fence, role: JobRole::Client, offset, text }
    }

    #[test]
    fn text_after_a_lost_frame_comes_with_the_result() {
        let mut text = StreamedText::default();
        text.append(&frame(1, 0, "ab"));
        text.append(&frame(1, 3, "d"));
        assert_eq!(text.sent(), "ab", "c is missing");
        assert_eq!(text.check("abcde"), Ok(()));
    }

    #[test]
    fn later_attempt_continues_what_was_sent_or_ends_with_an_error() {
        let mut text = StreamedText::default();
        for (attempt, offset, part, sent) in [
            (1, 0, "abc", "abc"),
            (2, 0, "ab", "abc"),
            (1, 3, "late", "abc"),
            (2, 2, "cd", "abcd"),
            (3, 3, "de", "abcde"),
            (4, 0, "aX", "abcde"),
            (4, 2, "cdef", "abcde"),
        ] {
            text.append(&frame(attempt, offset, part));
            assert_eq!(text.sent(), sent, "attempt {attempt} at {offset}: {part}");
        }
        assert_eq!(text.check("aXcdef"), Err(Interrupted { sent: 5 }));
        text.append(&frame(5, 0, "abcdef"));
        assert_eq!((text.sent(), text.check("abcdef")), ("abcdef", Ok(())), "the next attempt is like the first");
    }

    proptest! {
        /// Whatever is lost, repeated or begun again: what is sent is a beginning of the whole text, and never shrinks.
        #[test]
        fn sent_text_is_a_beginning_of_the_whole_text(
            whole in "[ab\u{e9}]{0,40}",
            frames in proptest::collection::vec((1i32..4, 0usize..40, 0usize..10), 0..40),
        ) {
            let mut text = StreamedText::default();
            let floor = |at: usize| (0..=at.min(whole.len())).rev().find(|at| whole.is_char_boundary(*at)).unwrap();
            for (attempt, from, length) in frames {
                let (from, to, before) = (floor(from), floor(from + length), text.sent().len());
                text.append(&frame(attempt, from, &whole[from.min(to)..to]));
                prop_assert!(whole.starts_with(text.sent()) && text.sent().len() >= before);
            }
            prop_assert_eq!(text.check(&whole), Ok(()));
        }
    }
}
