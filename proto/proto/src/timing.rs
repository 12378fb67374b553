//! Every wait, limit and lease of the system in one place, so that tests can scale them and a user can see them.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The `[timing]` table of the configuration. All values in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// A holder reports what it holds this often.
    pub beat_ms: u64,
    /// A confirmed beat extends a lease by this.
    pub lease_ttl_ms: u64,
    /// A holder stops acting this long before its lease could be swept.
    pub lease_margin_ms: u64,
    /// Placed but not accepted for this long: sent again or placed elsewhere.
    pub accept_ms: u64,
    /// The leader row is renewed this often.
    pub leader_beat_ms: u64,
    /// The leader row lives this long without renewal.
    pub leader_ttl_ms: u64,
    /// The sweeper looks for expired leases this often.
    pub sweep_ms: u64,
    /// A runner without work asks this often, besides being hinted.
    pub poll_ms: u64,
    /// A generation that made no token for this long is not alive, whatever the heartbeat says.
    pub job_step_ms: u64,
    /// A task whose runner completed nothing for this long is taken from it.
    pub task_step_ms: u64,
    /// A runner lets go of a task whose job waits for a place for this long: its slot is for work.
    pub slot_wait_ms: u64,
    /// First wait after a failed call to an endpoint; it doubles with each further one.
    pub backoff_base_ms: u64,
    /// Longest single wait between two calls to an endpoint.
    pub backoff_cap_ms: u64,
    /// An endpoint that stays down for this long fails the task.
    pub retry_ceiling_ms: u64,
    /// One request over NATS waits this long for its answer.
    pub request_ms: u64,
    /// A stopping process may take this long to hand over its work.
    pub drain_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            beat_ms: 2_000,
            lease_ttl_ms: 6_000,
            lease_margin_ms: 1_000,
            accept_ms: 3_000,
            leader_beat_ms: 1_000,
            leader_ttl_ms: 3_000,
            sweep_ms: 1_000,
            poll_ms: 2_000,
            // The first token of a long prompt on a slow machine: prefill reports progress as steps too.
            job_step_ms: 120_000,
            // The longest single step is a clone of a large repository; waiting for a model counts as steps.
            task_step_ms: 600_000,
            slot_wait_ms: 60_000,
            backoff_base_ms: 1_000,
            backoff_cap_ms: 256_000,
            retry_ceiling_ms: 600_000,
            request_ms: 5_000,
            drain_ms: 10_000,
        }
    }
}

macro_rules! durations {
    ($($field:ident => $name:ident),* $(,)?) => {
        impl Timing {
            $(pub fn $name(&self) -> Duration {
                Duration::from_millis(self.$field)
            })*
        }
    };
}

durations! {
    beat_ms => beat, lease_ttl_ms => lease_ttl, lease_margin_ms => lease_margin, accept_ms => accept,
    leader_beat_ms => leader_beat, leader_ttl_ms => leader_ttl, sweep_ms => sweep, poll_ms => poll,
    job_step_ms => job_step, task_step_ms => task_step, slot_wait_ms => slot_wait, backoff_base_ms => backoff_base, backoff_cap_ms => backoff_cap,
    retry_ceiling_ms => retry_ceiling, request_ms => request, drain_ms => drain,
}

impl Timing {
    /// The same proportions, `factor` times as fast; for tests.
    pub fn faster(&self, factor: u64) -> Self {
        let f = |v: u64| (v / factor.max(1)).max(20);
        Self {
            beat_ms: f(self.beat_ms),
            lease_ttl_ms: f(self.lease_ttl_ms),
            lease_margin_ms: f(self.lease_margin_ms),
            accept_ms: f(self.accept_ms),
            leader_beat_ms: f(self.leader_beat_ms),
            leader_ttl_ms: f(self.leader_ttl_ms),
            sweep_ms: f(self.sweep_ms),
            poll_ms: f(self.poll_ms),
            job_step_ms: f(self.job_step_ms),
            task_step_ms: f(self.task_step_ms),
            slot_wait_ms: f(self.slot_wait_ms),
            backoff_base_ms: f(self.backoff_base_ms),
            backoff_cap_ms: f(self.backoff_cap_ms),
            retry_ceiling_ms: f(self.retry_ceiling_ms),
            request_ms: self.request_ms,
            drain_ms: f(self.drain_ms),
        }
    }
}
