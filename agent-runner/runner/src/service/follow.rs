//! Reads along a job's tokens and says what can be foreseen from them. Frames may be lost, and so may what is said here:
//! both are hints.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::blob::INLINE_LIMIT;
use cfq_proto::ids::JobId;
use cfq_proto::messages::{TokenFrame, WarmUp};
use cfq_proto::subject;
use tokio::time::Instant;

use super::Shared;
use crate::driver::Foresee;

/// Text worth a word, in bytes: about as much as four blocks of keys and values hold.
const STRETCH: usize = 512;
/// A word holds all of a prompt, so it is said at most this often.
const PAUSE: Duration = Duration::from_millis(500);

/// Until it is aborted.
pub(super) async fn follow(shared: Arc<Shared>, job: JobId, foresee: Foresee) {
    let mut frames = match shared.session.subscribe::<TokenFrame>(&subject::tokens_of(&job.to_string())).await {
        Ok(frames) => frames,
        Err(error) => return tracing::debug!(%job, %error, "not reading along"),
    };
    // The server knows of it before anything more is done: the first frame may be on its way.
    if let Err(error) = shared.session.flush().await {
        return tracing::debug!(%job, %error, "not reading along");
    }
    let mut written = Written::default();
    let mut said = say(&shared, &foresee, String::new(), None).await;
    let mut next = Instant::now() + PAUSE;
    loop {
        tokio::select! {
            frame = frames.next() => match frame {
                Some(frame) => frame.body.map_or((), |frame| written.take(frame)),
                None => return,
            },
            () = tokio::time::sleep_until(next), if written.is_worth_a_word() => {
                said = say(&shared, &foresee, written.read(), said).await;
                next = Instant::now() + PAUSE;
            }
        }
    }
}

/// Returns what was said last.
async fn say(shared: &Shared, foresee: &Foresee, written: String, before: Option<WarmUp>) -> Option<WarmUp> {
    let foresee = foresee.clone();
    let ahead = match tokio::task::spawn_blocking(move || foresee(&written)).await {
        Ok(Some(ahead)) if before.as_ref() != Some(&ahead) => ahead,
        Ok(_) | Err(_) => return before,
    };
    // What is larger would have to travel as a blob: more than a hint is worth.
    if ahead.messages.iter().map(|message| message.content.len()).sum::<usize>() > INLINE_LIMIT {
        return before;
    }
    if let Err(error) = shared.session.publish(&subject::runner(&shared.config.runner, "warm"), &ahead).await {
        tracing::debug!(%error, "what is foreseen was not sent");
    }
    Some(ahead)
}

/// The text of a job's current attempt, as far as its frames came without a gap.
#[derive(Default)]
struct Written {
    text: String,
    /// Bytes of it that something was said about.
    read: usize,
}

impl Written {
    fn take(&mut self, frame: TokenFrame) {
        if frame.offset == 0 {
            *self = Self::default();
        }
        if frame.offset == self.text.len() as u64 {
            self.text.push_str(&frame.text);
        }
    }

    fn is_worth_a_word(&self) -> bool {
        self.text.len() >= self.read + STRETCH
    }

    fn read(&mut self) -> String {
        self.read = self.text.len();
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{LeaseId, TaskId};
    use cfq_proto::messages::JobFence;
    use cfq_proto::task::Agent;

    use super::*;

    #[test]
    fn a_gap_ends_the_reading_and_a_new_attempt_begins_it_anew() {
        let (task, job) = (TaskId::fresh(), JobId::fresh());
        let frame = |attempt, offset, text: &str| {
            let fence = JobFence { job, attempt, lease: LeaseId::fresh() };
            TokenFrame { task, fence, role: Agent::Alpha, offset, text: text.to_owned() }
        };
        let mut written = Written::default();
        let long = "x".repeat(STRETCH);
        written.take(frame(1, 0, &long));
        assert!(written.is_worth_a_word());
        assert_eq!(written.read(), long);
        written.take(frame(1, STRETCH as u64 + 1, &long));
        assert!(!written.is_worth_a_word(), "a byte is missing");
        written.take(frame(2, 0, "new"));
        written.take(frame(2, 3, " text"));
        assert_eq!((written.text.as_str(), written.read), ("new text", 0));
    }
}
