//! Stopping: signals of the operating system, and a stop flag inside a process.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// A signal that asks the process to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM.
    Terminate,
    /// SIGINT, as Ctrl-C sends it.
    Interrupt,
}

/// Receiver of SIGTERM and SIGINT. Once a receiver exists, these signals no longer end the process.
#[derive(Debug)]
pub struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// Starts to receive both signals.
    ///
    /// # Errors
    /// The operating system's error if the handlers cannot be installed.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.term.recv() => StopSignal::Terminate,
            _ = self.int.recv() => StopSignal::Interrupt,
        }
    }
}

/// Completes at the first SIGTERM or SIGINT.
pub async fn signalled() {
    match Signals::listen() {
        Ok(mut signals) => {
            signals.next().await;
        }
        Err(error) => {
            tracing::error!(%error, "cannot listen for signals; stop this process with SIGKILL");
            std::future::pending().await
        }
    }
}

/// Stop flag, which is raised once; every clone sees it. Dropping the [`Stopper`] raises it too.
#[derive(Debug, Clone)]
pub struct Stop(watch::Receiver<bool>);

/// Sender of a [`Stop`] flag.
#[derive(Debug)]
pub struct Stopper(watch::Sender<bool>);

/// Creates a stop flag.
pub fn channel() -> (Stopper, Stop) {
    let (sender, receiver) = watch::channel(false);
    (Stopper(sender), Stop(receiver))
}

impl Stopper {
    /// Raises the flag.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    /// Returns another receiver of the flag.
    pub fn subscribe(&self) -> Stop {
        Stop(self.0.subscribe())
    }
}

impl Stop {
    /// True once the flag is raised.
    pub fn is_raised(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the flag is raised.
    pub async fn raised(&mut self) {
        // An error means that the sender is gone, which counts as raised.
        if self.0.wait_for(|raised| *raised).await.is_err() {
            tracing::debug!("stopper dropped");
        }
    }
}
