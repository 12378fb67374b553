//! The tasks at work, one per slot, and how they are reached.

use std::sync::Arc;

use cfq_proto::envelope::EnvelopeError;
use cfq_proto::ids::{LeaseId, TaskId};
use cfq_proto::messages::RunnerCommand;
use tokio::sync::{Notify, watch};

/// Why a task's driver is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The lease is somebody else's, or the task is over.
    Cancelled,
    /// This process stops: hand the task back.
    Drain,
}

/// A driver's ear.
#[derive(Debug, Clone)]
pub(super) struct Ear {
    /// Some job of the task changed.
    pub jobs: Arc<Notify>,
    pub end: watch::Receiver<Option<End>>,
    task: Arc<std::sync::OnceLock<TaskId>>,
}

impl Ear {
    /// From here on the task's own hints arrive too.
    pub fn listens_to(&self, task: TaskId) {
        if self.task.set(task).is_err() {
            tracing::debug!(%task, "listens already");
        }
    }
}

struct Occupied {
    lease: LeaseId,
    task: Arc<std::sync::OnceLock<TaskId>>,
    jobs: Arc<Notify>,
    end: watch::Sender<Option<End>>,
}

pub(super) struct Slots(Vec<Option<Occupied>>);

impl Slots {
    pub fn new(count: usize) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    pub fn has_room(&self) -> bool {
        self.0.iter().any(Option::is_none)
    }

    /// Puts a task into a free slot; `make` gets its ear and the worker's number, from 1.
    pub fn take<W>(&mut self, lease: LeaseId, make: impl FnOnce((usize, Ear)) -> W) -> (W, usize) {
        let slot = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
            // Never asked without room; a slot more is better than a lost lease.
            self.0.push(None);
            self.0.len() - 1
        });
        let (end, hears) = watch::channel(None);
        let (jobs, task) = (Arc::new(Notify::new()), Arc::new(std::sync::OnceLock::new()));
        self.0[slot] = Some(Occupied { lease, task: task.clone(), jobs: jobs.clone(), end });
        (make((slot + 1, Ear { jobs, end: hears, task })), slot)
    }

    pub fn free(&mut self, slot: usize) {
        if let Some(entry) = self.0.get_mut(slot) {
            *entry = None;
        }
    }

    /// Frees the slots whose driver is gone without a word.
    pub fn free_finished(&mut self) {
        for entry in &mut self.0 {
            if entry.as_ref().is_some_and(|o| o.end.is_closed()) {
                *entry = None;
            }
        }
    }

    pub fn drain(&self) {
        for occupied in self.0.iter().flatten() {
            occupied.end.send_replace(Some(End::Drain));
        }
    }

    pub fn command(&self, command: Result<RunnerCommand, EnvelopeError>) {
        match command {
            Ok(RunnerCommand::JobChanged { task, .. }) => {
                for occupied in self.0.iter().flatten().filter(|o| o.task.get() == Some(&task)) {
                    occupied.jobs.notify_one();
                }
            }
            Ok(RunnerCommand::Cancel { fence }) => {
                for occupied in self.0.iter().flatten().filter(|o| o.lease == fence.lease) {
                    occupied.end.send_replace(Some(End::Cancelled));
                }
            }
            Ok(RunnerCommand::WorkWaits) => {}
            Err(error) => tracing::warn!(%error, "a command that cannot be read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::JobId;
    use cfq_proto::messages::TaskFence;

    #[test]
    fn a_command_reaches_its_task_only() {
        let mut slots = Slots::new(2);
        let (one, two) = (LeaseId::fresh(), LeaseId::fresh());
        let (task_one, task_two) = (TaskId::fresh(), TaskId::fresh());
        let ((_, ear_one), slot) = slots.take(one, |ear| ear);
        let ((number, ear_two), _) = slots.take(two, |ear| ear);
        ear_one.listens_to(task_one);
        ear_two.listens_to(task_two);
        assert_eq!(number, 2);
        assert!(!slots.has_room());
        slots.command(Ok(RunnerCommand::Cancel { fence: TaskFence { task: task_two, attempt: 1, lease: two } }));
        assert_eq!((*ear_one.end.borrow(), *ear_two.end.borrow()), (None, Some(End::Cancelled)));
        slots.command(Ok(RunnerCommand::JobChanged { task: task_one, job: JobId::fresh() }));
        slots.drain();
        assert_eq!(*ear_one.end.borrow(), Some(End::Drain));
        slots.free(slot);
        assert!(slots.has_room());
    }

    #[test]
    fn a_driver_that_is_gone_frees_its_slot() {
        let mut slots = Slots::new(1);
        let (ear, _) = slots.take(LeaseId::fresh(), |ear| ear);
        slots.free_finished();
        assert!(!slots.has_room());
        drop(ear);
        slots.free_finished();
        assert!(slots.has_room());
    }
}
