//! Being told to stop.

use tokio::sync::watch;

/// Completes at the first SIGTERM or SIGINT.
pub async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("cannot listen for signals; stop this process with SIGKILL");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
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
