//! Compares the waits of queued jobs with their estimates. A job gets an estimate when it could not be placed at once,
//! and another one whenever a user asks for it; the last one is compared with the time until its placement.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use cfq_proto::http::JobPlan;
use cfq_proto::ids::JobId;
use cfq_scheduler_core::{PlannerState, queue_estimates};

/// Minimum interval between two updates.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// The interval is at least this many times as long as the last update took, so that estimates never take more than a
/// small part of the leader's time.
const MIN_INTERVAL_UPDATES: u32 = 20;
/// Maximum number of models in one update.
const MAX_MODELS_PER_UPDATE: usize = 64;
/// Shorter estimated waits, in ms, are not compared: their error says nothing about the estimate.
const MIN_WAIT_MS: i64 = 100;

#[derive(Debug, Clone, Copy)]
struct Estimated {
    /// Time of the estimate, in ms of the database's clock.
    at_ms: i64,
    wait_ms: i64,
}

/// The last estimates of the queued jobs.
#[derive(Debug)]
pub struct WaitEstimates {
    estimates: HashMap<JobId, Estimated>,
    next_update: Instant,
}

impl WaitEstimates {
    pub fn new() -> Self {
        Self { estimates: HashMap::new(), next_update: Instant::now() }
    }

    /// Estimates the waits of the first queued jobs of each model that have no estimate. Does nothing until the next
    /// update is due.
    pub fn update(&mut self, state: &PlannerState, now_ms: i64) {
        let began = Instant::now();
        if began < self.next_update {
            return;
        }
        for model in state.models_with_queued_jobs().take(MAX_MODELS_PER_UPDATE) {
            for (job, estimate) in queue_estimates(state, model, now_ms) {
                if !self.estimates.contains_key(&job) {
                    self.record(job, now_ms, estimate.start_ms.saturating_sub(now_ms));
                }
            }
        }
        self.next_update = Instant::now() + MIN_INTERVAL.max(began.elapsed() * MIN_INTERVAL_UPDATES);
    }

    /// Records the estimate that a user was shown.
    pub fn on_explained(&mut self, job: JobId, plan: &JobPlan, now_ms: i64) {
        if let (Some(_), Some(estimate)) = (&plan.position, &plan.estimate) {
            self.record(job, now_ms, i64::try_from(estimate.start_in_ms).unwrap_or(i64::MAX));
        }
    }

    fn record(&mut self, job: JobId, at_ms: i64, wait_ms: i64) {
        if wait_ms >= MIN_WAIT_MS {
            self.estimates.insert(job, Estimated { at_ms, wait_ms });
        }
    }

    /// Returns the ratio of the actual to the estimated wait of a job that is placed now; `None` if it had no estimate.
    pub fn on_placed(&mut self, job: JobId, now_ms: i64) -> Option<f64> {
        let Estimated { at_ms, wait_ms } = self.estimates.remove(&job)?;
        Some(now_ms.saturating_sub(at_ms).max(0) as f64 / wait_ms as f64)
    }

    pub fn on_ended(&mut self, job: JobId) {
        self.estimates.remove(&job);
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::http::{JobEstimate, QueuePosition};

    use super::*;

    fn shown(start_in_ms: u64) -> JobPlan {
        let node = "den".parse().unwrap();
        let estimate = JobEstimate { node, start_in_ms, end_in_ms: start_in_ms + 1, is_certain: true };
        let position = QueuePosition { before: 0, queued: 1 };
        JobPlan { position: Some(position), estimate: Some(estimate), ..JobPlan::default() }
    }

    #[test]
    fn last_estimate_is_compared_with_the_actual_wait() {
        let (mut waits, job) = (WaitEstimates::new(), JobId::fresh());
        assert_eq!(waits.on_placed(job, 0), None);
        waits.on_explained(job, &shown(50_000), 0);
        waits.on_explained(job, &shown(10_000), 30_000);
        waits.on_explained(job, &shown(99), 40_000);
        assert_eq!(waits.on_placed(job, 50_000), Some(2.0), "20 s of 10 s");
        assert_eq!(waits.on_placed(job, 50_000), None, "compared once");
        waits.on_explained(job, &shown(10_000), 60_000);
        waits.on_ended(job);
        assert_eq!(waits.on_placed(job, 70_000), None);
    }
}
