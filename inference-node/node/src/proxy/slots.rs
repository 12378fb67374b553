//! Request slots: the limit of concurrent requests to a server or of concurrent runs of a program.

use std::sync::Arc;

use cfq_engine::StateChanged;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The slots of one server or program.
pub(super) struct RequestSlots {
    free: Arc<Semaphore>,
    max: u32,
    changes: Arc<StateChanged>,
}

impl RequestSlots {
    /// `max` free slots. `changes` is notified when a slot is taken or freed.
    pub(super) fn new(max: u32, changes: Arc<StateChanged>) -> Self {
        Self { free: Arc::new(Semaphore::new(max as usize)), max, changes }
    }

    /// Number of slots, free or taken.
    pub(super) fn max(&self) -> u32 {
        self.max
    }

    /// Number of free slots.
    pub(super) fn free(&self) -> u32 {
        self.free.available_permits() as u32
    }

    /// A slot for one request; `None` if all are taken.
    pub(super) fn try_take(&self) -> Option<RequestSlot> {
        let permit = self.free.clone().try_acquire_owned().ok()?;
        self.changes.send_replace(());
        Some(RequestSlot { permit: Some(permit), changes: self.changes.clone() })
    }
}

/// A slot for one request. Dropping it frees the slot and notifies of the change.
pub(super) struct RequestSlot {
    permit: Option<OwnedSemaphorePermit>,
    changes: Arc<StateChanged>,
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.permit.take();
        self.changes.send_replace(());
    }
}
