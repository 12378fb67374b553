//! Being told to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Which it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// SIGTERM.
    Terminate,
    /// SIGINT, as Ctrl-C sends it.
    Interrupt,
}

/// SIGTERM and SIGINT. From the moment it is made they do not end the process any more.
#[derive(Debug)]
pub struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// Completes at the next one.
    pub async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.term.recv() => Told::Terminate,
            _ = self.int.recv() => Told::Interrupt,
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

/// Raised once; every clone sees it. Dropping the [`Stopper`] raises it too.
#[derive(Debug, Clone)]
pub struct Stop(watch::Receiver<bool>);

#[derive(Debug)]
pub struct Stopper(watch::Sender<bool>);

pub fn pair() -> (Stopper, Stop) {
    let (sender, receiver) = watch::channel(false);
    (Stopper(sender), Stop(receiver))
}

impl Stopper {
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    pub fn subscribe(&self) -> Stop {
        Stop(self.0.subscribe())
    }
}

impl Stop {
    pub fn is_raised(&self) -> bool {
        *self.0.borrow()
    }

    pub async fn raised(&mut self) {
        // An error means the sender is gone, which is the same word.
        if self.0.wait_for(|raised| *raised).await.is_err() {
            tracing::debug!("stopper dropped");
        }
    }
}
