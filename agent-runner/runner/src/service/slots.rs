//! Slots of the runner, one per task in progress, and delivery of commands to their drivers.

use std::sync::Arc;

use cfq_proto::envelope::EnvelopeError;
use cfq_proto::ids::{LeaseId, TaskId};
use cfq_proto::messages::RunnerCommand;
use tokio::sync::{Notify, watch};

/// Reason why the driver of a task must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskStop {
    /// The scheduler withdrew the lease, or the task has ended.
    Cancelled,
    /// The runner process is stopping: release the task.
    Drain,
}

/// Receiving side of a slot, for the driver of its task.
#[derive(Debug, Clone)]
pub(super) struct SlotSignals {
    /// Notified when a job of the task changed.
    pub job_changed: Arc<Notify>,
    /// Set when the driver must stop.
    pub stop: watch::Receiver<Option<TaskStop>>,
    task: Arc<std::sync::OnceLock<TaskId>>,
}

impl SlotSignals {
    /// Sets the task of the slot, so that changes of the task's jobs are delivered. Until then only the slot's lease is
    /// known.
    pub fn set_task(&self, task: TaskId) {
        if self.task.set(task).is_err() {
            tracing::debug!(%task, "slot already has a task");
        }
    }
}

/// Sending side of a slot in use.
struct OccupiedSlot {
    lease: LeaseId,
    task: Arc<std::sync::OnceLock<TaskId>>,
    job_changed: Arc<Notify>,
    stop: watch::Sender<Option<TaskStop>>,
}

/// All slots of the runner; `None` is a free slot.
pub(super) struct TaskSlots(Vec<Option<OccupiedSlot>>);

impl TaskSlots {
    pub fn new(count: usize) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    /// True if a slot is free.
    pub fn has_free(&self) -> bool {
        self.0.iter().any(Option::is_none)
    }

    /// Occupies a free slot for `lease`. `make` gets the worker number (from 1) and the slot's signals. Returns the
    /// result of `make` and the slot's index.
    pub fn occupy<W>(&mut self, lease: LeaseId, make: impl FnOnce((usize, SlotSignals)) -> W) -> (W, usize) {
        let slot = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
            // A lease is requested only while a slot is free. If no slot is free anyway, an extra slot is better than a
            // lost lease.
            self.0.push(None);
            self.0.len() - 1
        });
        let (stop, stop_receiver) = watch::channel(None);
        let (job_changed, task) = (Arc::new(Notify::new()), Arc::new(std::sync::OnceLock::new()));
        self.0[slot] = Some(OccupiedSlot { lease, task: task.clone(), job_changed: job_changed.clone(), stop });
        (make((slot + 1, SlotSignals { job_changed, stop: stop_receiver, task })), slot)
    }

    /// Frees the slot at this index.
    pub fn free(&mut self, slot: usize) {
        if let Some(entry) = self.0.get_mut(slot) {
            *entry = None;
        }
    }

    /// Frees the slots whose driver ended without reporting it: a driver that panics drops its receiver.
    pub fn free_finished(&mut self) {
        for entry in &mut self.0 {
            if entry.as_ref().is_some_and(|o| o.stop.is_closed()) {
                *entry = None;
            }
        }
    }

    /// Signals every driver to release its task and stop.
    pub fn drain(&self) {
        for occupied in self.0.iter().flatten() {
            occupied.stop.send_replace(Some(TaskStop::Drain));
        }
    }

    /// Delivers a command of the scheduler to the task that it names.
    pub fn on_command(&self, command: Result<RunnerCommand, EnvelopeError>) {
        match command {
            Ok(RunnerCommand::JobChanged { task, .. }) => {
                for occupied in self.0.iter().flatten().filter(|o| o.task.get() == Some(&task)) {
                    occupied.job_changed.notify_one();
                }
            }
            Ok(RunnerCommand::Cancel { fence }) => {
                for occupied in self.0.iter().flatten().filter(|o| o.lease == fence.lease) {
                    occupied.stop.send_replace(Some(TaskStop::Cancelled));
                }
            }
            Ok(RunnerCommand::TaskReady) => {}
            Err(error) => tracing::warn!(%error, "unreadable command ignored"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::JobId;
    use cfq_proto::messages::TaskFence;

    #[test]
    fn command_reaches_only_its_task() {
        let mut slots = TaskSlots::new(2);
        let (one, two) = (LeaseId::fresh(), LeaseId::fresh());
        let (task_one, task_two) = (TaskId::fresh(), TaskId::fresh());
        let ((_, signals_one), slot) = slots.occupy(one, |signals| signals);
        let ((number, signals_two), _) = slots.occupy(two, |signals| signals);
        signals_one.set_task(task_one);
        signals_two.set_task(task_two);
        assert_eq!(number, 2);
        assert!(!slots.has_free());
        slots.on_command(Ok(RunnerCommand::Cancel { fence: TaskFence { task: task_two, attempt: 1, lease: two } }));
        assert_eq!((*signals_one.stop.borrow(), *signals_two.stop.borrow()), (None, Some(TaskStop::Cancelled)));
        slots.on_command(Ok(RunnerCommand::JobChanged { task: task_one, job: JobId::fresh() }));
        slots.drain();
        assert_eq!(*signals_one.stop.borrow(), Some(TaskStop::Drain));
        slots.free(slot);
        assert!(slots.has_free());
    }

    #[test]
    fn dropped_driver_frees_its_slot() {
        let mut slots = TaskSlots::new(1);
        let (signals, _) = slots.occupy(LeaseId::fresh(), |signals| signals);
        slots.free_finished();
        assert!(!slots.has_free());
        drop(signals);
        slots.free_finished();
        assert!(slots.has_free());
    }
}
