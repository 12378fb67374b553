//! The text that running jobs have generated so far, for feeds that are opened while a job runs: nodes publish each part
//! only once. Held in memory within limits; what is missing, for example after a restart, is visible as a gap.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::messages::TokenFrame;

/// Maximum length of the text that is held of one job, in bytes. Of a longer text, the end is held.
const MAX_JOB_BYTES: usize = 256 << 10;
/// Maximum length of all texts, in bytes. Above it, the texts that did not grow for the longest time are dropped.
const MAX_TOTAL_BYTES: usize = 16 << 20;

/// The texts, each that of the latest job of its task. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RunningTexts(Arc<Mutex<Texts>>);

#[derive(Debug, Default)]
struct Texts {
    of: HashMap<TaskId, Text>,
    /// Length of all texts, in bytes.
    total: usize,
    /// Number of frames so far.
    frames: u64,
}

#[derive(Debug)]
struct Text {
    /// All parts that are held, as one frame.
    so_far: TokenFrame,
    /// Number of the frame that was added last.
    last_frame: u64,
}

impl RunningTexts {
    /// Adds a frame to the text of its task. A frame of another job or of a later attempt begins a new text, and so does
    /// a frame after a gap. A frame of an earlier attempt changes nothing.
    pub fn append(&self, frame: &TokenFrame) {
        let mut texts = self.lock();
        texts.frames += 1;
        let number = texts.frames;
        let before = texts.of.remove(&frame.task);
        texts.total -= before.as_ref().map_or(0, Text::len);
        let mut text = match before {
            Some(text) if text.is_later_than(frame) => text,
            Some(mut text) if text.is_continued_by(frame) => {
                text.so_far.text.push_str(&frame.text);
                text
            }
            Some(_) | None => Text { so_far: frame.clone(), last_frame: number },
        };
        text.last_frame = number;
        text.shorten();
        texts.total += text.len();
        texts.of.insert(frame.task, text);
        texts.drop_oldest();
    }

    /// What the latest job of the task has generated so far, as one frame; `None` if nothing is held of it.
    pub fn of(&self, task: TaskId) -> Option<TokenFrame> {
        self.lock().of.get(&task).map(|text| text.so_far.clone())
    }

    /// Drops the text of this job, which has ended.
    pub fn forget(&self, task: TaskId, job: JobId) {
        let mut texts = self.lock();
        if texts.of.get(&task).is_some_and(|text| text.so_far.fence.job == job)
            && let Some(text) = texts.of.remove(&task)
        {
            texts.total -= text.len();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Texts> {
        // Poisoning is ignored: a panic leaves at most a wrong total.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Texts {
    fn drop_oldest(&mut self) {
        while self.total > MAX_TOTAL_BYTES {
            let oldest = self.of.iter().min_by_key(|(_, text)| text.last_frame).map(|(task, _)| *task);
            let Some(text) = oldest.and_then(|task| self.of.remove(&task)) else { return };
            self.total -= text.len();
        }
    }
}

impl Text {
    fn len(&self) -> usize {
        self.so_far.text.len()
    }

    fn is_later_than(&self, frame: &TokenFrame) -> bool {
        self.so_far.fence.job == frame.fence.job && self.so_far.fence.attempt > frame.fence.attempt
    }

    fn is_continued_by(&self, frame: &TokenFrame) -> bool {
        self.so_far.fence == frame.fence && self.so_far.offset + self.len() as u64 == frame.offset
    }

    fn shorten(&mut self) {
        let text = &mut self.so_far.text;
        let from = text.ceil_char_boundary(text.len().saturating_sub(MAX_JOB_BYTES));
        self.so_far.offset += from as u64;
        text.drain(..from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::LeaseId;
    use cfq_proto::job::JobRole;
    use cfq_proto::messages::JobFence;

    fn frame(task: TaskId, fence: JobFence, offset: u64, text: &str) -> TokenFrame {
        TokenFrame { task, fence, role: JobRole::Alpha, offset, text: text.to_owned() }
    }

    fn attempt(job: JobId, attempt: i32) -> JobFence {
        JobFence { job, attempt, lease: LeaseId::fresh() }
    }

    /// The offset and the text that are held of the task.
    fn held(texts: &RunningTexts, task: TaskId) -> Option<(u64, String)> {
        texts.of(task).map(|frame| (frame.offset, frame.text))
    }

    #[test]
    fn text_of_the_latest_attempt_is_held_from_its_last_gap() {
        let (texts, task, job) = (RunningTexts::default(), TaskId::fresh(), JobId::fresh());
        let (first, second) = (attempt(job, 1), attempt(job, 2));
        for (offset, text) in [(0, "ab"), (2, "c"), (3, "d")] {
            texts.append(&frame(task, first, offset, text));
        }
        assert_eq!(held(&texts, task), Some((0, "abcd".to_owned())));
        texts.append(&frame(task, first, 7, "h"));
        assert_eq!(held(&texts, task), Some((7, "h".to_owned())), "what is missing is a gap");
        texts.append(&frame(task, second, 0, "abc"));
        texts.append(&frame(task, first, 8, "i"));
        assert_eq!(held(&texts, task), Some((0, "abc".to_owned())), "a late frame of the first attempt");
        let review = attempt(JobId::fresh(), 1);
        texts.append(&frame(task, review, 0, "r"));
        texts.forget(task, job);
        assert_eq!(held(&texts, task), Some((0, "r".to_owned())));
        texts.forget(task, review.job);
        assert_eq!((held(&texts, task), texts.lock().total), (None, 0));
    }

    #[test]
    fn long_texts_lose_their_beginning_and_old_texts_are_dropped() {
        let texts = RunningTexts::default();
        let (long, fence) = (TaskId::fresh(), attempt(JobId::fresh(), 1));
        texts.append(&frame(long, fence, 0, "é"));
        texts.append(&frame(long, fence, 2, &"x".repeat(MAX_JOB_BYTES - 1)));
        let (offset, text) = held(&texts, long).unwrap();
        assert_eq!((offset, text.len()), (2, MAX_JOB_BYTES - 1), "no character is cut");
        let others: Vec<TaskId> = (0..MAX_TOTAL_BYTES / MAX_JOB_BYTES).map(|_| TaskId::fresh()).collect();
        for task in &others {
            texts.append(&frame(*task, attempt(JobId::fresh(), 1), 0, &"y".repeat(MAX_JOB_BYTES)));
        }
        assert_eq!(held(&texts, long), None);
        assert!(others.iter().all(|task| held(&texts, *task).is_some()));
        assert_eq!(texts.lock().total, MAX_TOTAL_BYTES);
    }
}
