//! The text that running jobs have generated so far, for feeds that are opened while a job runs: nodes publish each
//! part only once. Held in memory within limits; what is missing, for example after a restart, is visible as a gap.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::ids::TaskId;
use cfq_proto::messages::{JobFence, TokenFrame};

/// Maximum length of the text that is held of one job, in bytes. Of a longer text, the end is held.
const MAX_JOB_BYTES: usize = 256 << 10;
/// Part of a text that is dropped at a time when it becomes too long, in bytes.
const DROPPED_BYTES: usize = MAX_JOB_BYTES / 4;
/// Maximum size of all texts, in bytes. Above it, the texts that did not grow for the longest time are dropped.
const MAX_TOTAL_BYTES: usize = 16 << 20;
/// Assumed size of a text's entry without the text, in bytes.
const ENTRY_BYTES: usize = 512;

/// The texts, each that of the latest job of its task. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RunningTexts(Arc<Mutex<Texts>>);

#[derive(Debug, Default)]
struct Texts {
    of: HashMap<TaskId, Text>,
    /// The tasks, by the number of the frame that their text got last.
    by_last_frame: BTreeMap<u64, TaskId>,
    /// Size of all texts, in bytes.
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
    /// Adds a frame to the text of its task. A frame of a later job or attempt begins a new text, and so does a frame
    /// after a gap. A frame of an earlier job or attempt changes nothing.
    pub fn append(&self, frame: &TokenFrame) {
        if frame.text.is_empty() {
            return;
        }
        let mut texts = self.lock();
        texts.frames += 1;
        let number = texts.frames;
        let mut text = match texts.take(frame.task) {
            Some(text) if text.is_later_than(frame) => text,
            Some(mut text) if text.is_continued_by(frame) => {
                text.so_far.text.push_str(&frame.text);
                text
            }
            Some(_) | None => Text { so_far: frame.clone(), last_frame: number },
        };
        text.last_frame = number;
        text.shorten();
        texts.put(frame.task, text);
        while texts.total > MAX_TOTAL_BYTES
            && let Some((_, oldest)) = texts.by_last_frame.first_key_value()
        {
            let oldest = *oldest;
            drop(texts.take(oldest));
        }
    }

    /// What the latest job of the task has generated so far, as one frame; `None` if nothing is held of it.
    pub fn of(&self, task: TaskId) -> Option<TokenFrame> {
        self.lock().of.get(&task).map(|text| text.so_far.clone())
    }

    /// Drops the text of this attempt, which has ended.
    pub fn forget(&self, task: TaskId, fence: &JobFence) {
        let mut texts = self.lock();
        if texts.of.get(&task).is_some_and(|text| text.so_far.fence == *fence) {
            drop(texts.take(task));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Texts> {
        // Poisoning is ignored: a panic leaves at most a wrong total.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Texts {
    fn take(&mut self, task: TaskId) -> Option<Text> {
        let text = self.of.remove(&task)?;
        self.by_last_frame.remove(&text.last_frame);
        self.total -= text.size();
        Some(text)
    }

    fn put(&mut self, task: TaskId, text: Text) {
        self.total += text.size();
        self.by_last_frame.insert(text.last_frame, task);
        self.of.insert(task, text);
    }
}

impl Text {
    fn size(&self) -> usize {
        ENTRY_BYTES + self.so_far.text.capacity()
    }

    /// Ids of jobs sort by the time of their creation.
    fn is_later_than(&self, frame: &TokenFrame) -> bool {
        let (held, new) = (&self.so_far.fence, &frame.fence);
        (held.job, held.attempt) > (new.job, new.attempt)
    }

    fn is_continued_by(&self, frame: &TokenFrame) -> bool {
        self.so_far.fence == frame.fence
            && self.so_far.offset.saturating_add(self.so_far.text.len() as u64) == frame.offset
    }

    fn shorten(&mut self) {
        let text = &mut self.so_far.text;
        if text.len() <= MAX_JOB_BYTES {
            return;
        }
        let from = text.ceil_char_boundary(text.len() - MAX_JOB_BYTES + DROPPED_BYTES);
        self.so_far.offset = self.so_far.offset.saturating_add(from as u64);
        text.drain(..from);
        text.shrink_to(MAX_JOB_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::{JobId, LeaseId};
    use cfq_proto::job::JobRole;

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
        texts.append(&frame(task, second, 3, "d"));
        texts.forget(task, &second);
        assert_eq!(held(&texts, task), Some((0, "r".to_owned())), "a late frame of the first job");
        texts.forget(task, &review);
        assert_eq!(held(&texts, task), None);
        let texts = texts.lock();
        assert_eq!((texts.total, texts.by_last_frame.len()), (0, 0));
    }

    #[test]
    fn long_texts_lose_their_beginning_and_old_texts_are_dropped() {
        let texts = RunningTexts::default();
        let (long, fence) = (TaskId::fresh(), attempt(JobId::fresh(), 1));
        texts.append(&frame(long, fence, 0, &"é".repeat(MAX_JOB_BYTES / 2)));
        texts.append(&frame(long, fence, MAX_JOB_BYTES as u64, "x"));
        let (offset, text) = held(&texts, long).unwrap();
        assert_eq!(offset + text.len() as u64, MAX_JOB_BYTES as u64 + 1);
        assert!(text.starts_with('é') && text.len() <= MAX_JOB_BYTES - DROPPED_BYTES, "{}", text.len());
        let others: Vec<TaskId> = (0..MAX_TOTAL_BYTES / MAX_JOB_BYTES - 1).map(|_| TaskId::fresh()).collect();
        for task in &others {
            texts.append(&frame(*task, attempt(JobId::fresh(), 1), 0, &"y".repeat(MAX_JOB_BYTES)));
        }
        assert!(others.iter().all(|task| held(&texts, *task).is_some()));
        texts.append(&frame(TaskId::fresh(), attempt(JobId::fresh(), 1), 0, &"y".repeat(MAX_JOB_BYTES)));
        assert_eq!(held(&texts, long), None);
    }

    /// A node can send frames of attempts that do not exist.
    #[test]
    fn frames_of_many_attempts_take_limited_memory() {
        let texts = RunningTexts::default();
        for n in 0..100_000 {
            texts.append(&frame(TaskId::fresh(), attempt(JobId::fresh(), 1), 0, if n % 2 == 0 { "" } else { "x" }));
        }
        let texts = texts.lock();
        assert!(
            texts.total <= MAX_TOTAL_BYTES && texts.of.len() <= MAX_TOTAL_BYTES / ENTRY_BYTES,
            "{}",
            texts.of.len()
        );
        assert_eq!(texts.by_last_frame.len(), texts.of.len());
    }
}
