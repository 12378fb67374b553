//! Maintenance of the mirrors in the background, in one thread of the runner's process.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use crate::workstream::{MaintenanceLimits, maintain_mirrors};

/// Wait between two rounds. A round in which nothing has to be done reads some folders.
const ROUND_INTERVAL: Duration = Duration::from_secs(10);

/// The maintenance thread; it ends after its current round when this is dropped. The process may end during a round.
pub(super) struct Maintenance {
    _stop: SyncSender<()>,
}

impl Maintenance {
    /// Starts the maintenance of all mirrors below `data_dir`.
    pub fn start(data_dir: PathBuf) -> Self {
        let (stop, stopped) = sync_channel(1);
        let limits = MaintenanceLimits::default();
        let thread = thread::Builder::new().name("maintenance".to_owned()).spawn(move || {
            while stopped.recv_timeout(ROUND_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                maintain_mirrors(&data_dir, &limits);
            }
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start the maintenance of the mirrors, they are not packed");
        }
        Self { _stop: stop }
    }
}
