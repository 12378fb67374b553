//! Runs the preparation of prompts on threads that may block, with limits on time and number.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::job::JobFailure;
use tokio::sync::Semaphore;

use crate::model::time_limit::TimeLimit;

/// Maximum time for the preparation of a prompt. A prompt of a million tokens takes some seconds, and so does the first
/// constrained prompt, which builds the tables of the grammars.
const MAX_PREPARE_TIME: Duration = Duration::from_secs(30);
/// Time after [`MAX_PREPARE_TIME`] in which the preparation notices that it has to stop.
const PREPARE_STOP_TIME: Duration = Duration::from_secs(5);
/// Maximum number of prompts of one model that are prepared at the same time. A preparation that does not stop keeps
/// its place, so a hostile model file occupies at most as many threads.
const MAX_PREPARING: usize = 4;

/// The preparations of one model's prompts.
#[derive(Debug, Clone)]
pub struct Preparations {
    places: Arc<Semaphore>,
}

impl Default for Preparations {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_PREPARING)) }
    }
}

impl Preparations {
    /// Runs `work` on a thread on which it may block. Its time is limited, and it is cancelled if this future is
    /// dropped. Must be called within a tokio runtime whose timers are enabled.
    ///
    /// # Errors
    /// [`JobFailure::Engine`] if `work` panics, or does not stop at its time limit.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&TimeLimit) -> T + Send + 'static,
    ) -> Result<T, JobFailure> {
        let limit = TimeLimit::new(MAX_PREPARE_TIME);
        let _cancel = limit.cancel_on_drop();
        let places = self.places.clone();
        let run = async move {
            let place = places.acquire_owned().await;
            let work = move || {
                let result = work(&limit);
                drop(place);
                result
            };
            tokio::task::spawn_blocking(work).await
        };
        let failed = |reason: String| JobFailure::Engine { reason };
        match tokio::time::timeout(MAX_PREPARE_TIME + PREPARE_STOP_TIME, run).await {
            Ok(result) => result.map_err(|panic| failed(format!("preparing the prompt failed: {panic}"))),
            Err(_) => Err(failed(format!("preparing the prompt takes longer than {} s", MAX_PREPARE_TIME.as_secs()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, sync_channel};

    /// Runs work that ends only when a message arrives, until its time is over.
    async fn run_stuck(preparations: &Preparations, until: Receiver<()>) -> JobFailure {
        let run = preparations.run(move |_| {
            let _ = until.recv();
        });
        let (result, ()) = tokio::join!(run, tokio::time::advance(MAX_PREPARE_TIME * 2));
        result.unwrap_err()
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_ignores_its_limit_fails_and_keeps_its_place() {
        let preparations = Preparations::default();
        let mut ends = Vec::new();
        for _ in 0..MAX_PREPARING {
            let (end, until) = sync_channel(1);
            ends.push(end);
            let error = run_stuck(&preparations, until).await;
            assert!(error.to_string().contains("longer than 30 s"), "{error}");
        }
        assert_eq!(preparations.places.available_permits(), 0);
        let (_end, until) = sync_channel(1);
        let error = run_stuck(&preparations, until).await;
        assert!(error.to_string().contains("longer than 30 s"), "no further thread is started: {error}");
        drop(ends);
        preparations.run(|_| ()).await.unwrap();
    }

    #[tokio::test]
    async fn dropped_preparation_is_cancelled() {
        let preparations = Preparations::default();
        let (started, mut wait) = tokio::sync::oneshot::channel();
        let work = move |limit: &TimeLimit| {
            let _ = started.send(());
            while limit.check().is_ok() {
                std::thread::yield_now();
            }
        };
        let mut run = Box::pin(preparations.run(work));
        tokio::select! {
            _ = &mut run => panic!("the work ends only when it is cancelled"),
            _ = &mut wait => {}
        }
        drop(run);
        let all = preparations.places.acquire_many(MAX_PREPARING as u32).await;
        assert!(all.is_ok(), "the work has ended");
    }
}
