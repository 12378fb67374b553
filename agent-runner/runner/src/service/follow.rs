//! Follows a job's token stream and publishes prefill hints. A hint is the beginning of the next call's prompt, as far
//! as the text generated so far determines it. Delivery is best effort: token frames and hints may be lost.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::blob::MAX_INLINE_BYTES;
use cfq_proto::ids::JobId;
use cfq_proto::messages::{PrefillHint, TokenFrame};
use cfq_proto::subject;
use tokio::time::Instant;

use super::RunnerContext;
use crate::driver::PrefillPredictor;

/// Minimum new text before another hint, in bytes: about the content of four KV blocks.
const MIN_NEW_TEXT_BYTES: usize = 512;
/// Minimum time between two hints, because each hint contains a whole prompt, which may be long.
const MIN_HINT_INTERVAL: Duration = Duration::from_millis(500);

/// Follows `job` and publishes hints. Runs until the caller aborts this future or the subscription ends.
pub(super) async fn follow_tokens(context: Arc<RunnerContext>, job: JobId, predictor: PrefillPredictor) {
    let mut frames = match context.session.subscribe::<TokenFrame>(&subject::tokens_of(&job.to_string())).await {
        Ok(frames) => frames,
        Err(error) => return tracing::debug!(%job, %error, "cannot follow the token stream"),
    };
    // Flushed, so that the NATS server has the subscription before the first frame is published.
    if let Err(error) = context.session.flush().await {
        return tracing::debug!(%job, %error, "cannot follow the token stream");
    }
    let mut text = FollowedText::default();
    let mut last_hint = publish_hint(&context, &predictor, String::new(), None).await;
    let mut next_hint = Instant::now() + MIN_HINT_INTERVAL;
    loop {
        tokio::select! {
            frame = frames.next() => match frame {
                Some(frame) => frame.body.map_or((), |frame| text.append(frame)),
                None => return,
            },
            () = tokio::time::sleep_until(next_hint), if text.has_enough_new_text() => {
                last_hint = publish_hint(&context, &predictor, text.take_snapshot(), last_hint).await;
                next_hint = Instant::now() + MIN_HINT_INTERVAL;
            }
        }
    }
}

/// Publishes the hint for `text`, unless it equals `last_hint`. Returns the most recently published hint.
async fn publish_hint(
    context: &RunnerContext,
    predictor: &PrefillPredictor,
    text: String,
    last_hint: Option<PrefillHint>,
) -> Option<PrefillHint> {
    let predictor = predictor.clone();
    let hint = match tokio::task::spawn_blocking(move || predictor(&text)).await {
        Ok(Some(hint)) if last_hint.as_ref() != Some(&hint) => hint,
        Ok(_) | Err(_) => return last_hint,
    };
    // A larger hint would need a blob, which costs more than a hint is worth.
    if hint.messages.iter().map(|message| message.content.len()).sum::<usize>() > MAX_INLINE_BYTES {
        return last_hint;
    }
    if let Err(error) = context.session.publish(&subject::runner(&context.config.runner, "prefill_hint"), &hint).await {
        tracing::debug!(%error, "prefill hint not published");
    }
    Some(hint)
}

/// Text of a job's current attempt, up to the first missing frame.
#[derive(Default)]
struct FollowedText {
    text: String,
    /// Length of the text at the last hint, in bytes.
    hinted_bytes: usize,
}

impl FollowedText {
    /// Appends a frame that continues the text; a frame with offset 0 starts a new attempt; other frames are ignored, and
    /// those of a text that is too long for a hint.
    fn append(&mut self, frame: TokenFrame) {
        if frame.offset == 0 {
            *self = Self::default();
        }
        if frame.offset == self.text.len() as u64 && self.text.len() + frame.text.len() <= MAX_INLINE_BYTES {
            self.text.push_str(&frame.text);
        }
    }

    fn has_enough_new_text(&self) -> bool {
        self.text.len() >= self.hinted_bytes + MIN_NEW_TEXT_BYTES
    }

    /// Returns the text, for a hint, and records its length in `hinted_bytes`.
    fn take_snapshot(&mut self) -> String {
        self.hinted_bytes = self.text.len();
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{LeaseId, TaskId};
    use cfq_proto::job::JobRole;
    use cfq_proto::messages::JobFence;

    use super::*;

    #[test]
    fn text_stops_at_a_gap_and_restarts_with_a_new_attempt() {
        let (task, job) = (TaskId::fresh(), JobId::fresh());
        let frame = |attempt, offset, text: &str| {
            let fence = JobFence { job, attempt, lease: LeaseId::fresh() };
            TokenFrame { task, fence, role: JobRole::Alpha, offset, text: text.to_owned() }
        };
        let mut followed = FollowedText::default();
        let long = "x".repeat(MIN_NEW_TEXT_BYTES);
        followed.append(frame(1, 0, &long));
        assert!(followed.has_enough_new_text());
        assert_eq!(followed.take_snapshot(), long);
        followed.append(frame(1, MIN_NEW_TEXT_BYTES as u64 + 1, &long));
        assert!(!followed.has_enough_new_text(), "a byte is missing");
        followed.append(frame(2, 0, "new"));
        followed.append(frame(2, 3, " text"));
        assert_eq!((followed.text.as_str(), followed.hinted_bytes), ("new text", 0));
        for _ in 0..3 {
            followed.append(frame(2, followed.text.len() as u64, &"x".repeat(MAX_INLINE_BYTES / 2)));
        }
        assert!(followed.text.len() <= MAX_INLINE_BYTES, "{}", followed.text.len());
    }
}
