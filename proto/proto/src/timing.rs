//! All waits, timeouts and lease durations of the system in one place, so that tests can scale them and users can see
//! them.

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::time::Duration;

/// Deserializes a [`Timing`] of another version of cfq: keys that this version does not know are left out. In a configuration
/// file, they are an error.
///
/// # Errors
/// A known key with a wrong value.
pub fn known_keys<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timing, D::Error> {
    let mut given = serde_json::Map::deserialize(deserializer)?;
    let known = serde_json::to_value(Timing::default()).map_err(D::Error::custom)?;
    given.retain(|key, _| known.get(key).is_some());
    serde_json::from_value(given.into()).map_err(D::Error::custom)
}

/// The `[timing]` table of the configuration. All values are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// Interval of heartbeats.
    #[serde(alias = "beat_ms")]
    pub heartbeat_ms: u64,
    /// Duration of a lease after a confirmed heartbeat.
    pub lease_ttl_ms: u64,
    /// Safety margin of a lease: its holder stops acting this long before the scheduler could consider the lease
    /// expired.
    pub lease_margin_ms: u64,
    /// Time that a node has to accept a placed job; after this time, the job is sent again or placed elsewhere.
    #[serde(alias = "accept_ms")]
    pub accept_timeout_ms: u64,
    /// Time that a node has to prepare the prompt of a placed job, also if the prompt waits for others. While the node
    /// reports that it does so, its time to accept the job starts again.
    pub prepare_timeout_ms: u64,
    /// Interval at which the leader renews its row in Postgres.
    #[serde(alias = "leader_beat_ms")]
    pub leader_renewal_ms: u64,
    /// Time from the last renewal of the leader's row until the row expires.
    pub leader_ttl_ms: u64,
    /// Interval at which the sweeper checks for expired leases.
    pub sweep_ms: u64,
    /// Interval at which an idle runner asks for a lease, in addition to hints.
    pub poll_ms: u64,
    /// Time without a step (a new token or prefill chunk) after which a generation counts as stuck, even if heartbeats
    /// arrive.
    #[serde(alias = "job_step_ms")]
    pub job_step_timeout_ms: u64,
    /// Time without a completed step after which a runner loses its task.
    #[serde(alias = "task_step_ms")]
    pub task_step_timeout_ms: u64,
    /// Time that a task's job may wait for placement before the runner releases the task and uses the free slot for a
    /// task that can proceed.
    pub slot_wait_ms: u64,
    /// First wait after a failed call to an endpoint; it doubles with each further failure.
    pub backoff_base_ms: u64,
    /// Maximum single wait between two calls to an endpoint.
    pub backoff_cap_ms: u64,
    /// Retry ceiling: a task fails if its model has not answered for this long, for example because an endpoint is
    /// down.
    pub retry_ceiling_ms: u64,
    /// Timeout of one request over NATS.
    #[serde(alias = "request_ms")]
    pub request_timeout_ms: u64,
    /// Time a stopping process may take to release its work.
    #[serde(alias = "drain_ms")]
    pub drain_timeout_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_ms: 2_000,
            lease_ttl_ms: 6_000,
            lease_margin_ms: 1_000,
            accept_timeout_ms: 3_000,
            prepare_timeout_ms: 50_000,
            leader_renewal_ms: 1_000,
            leader_ttl_ms: 3_000,
            sweep_ms: 1_000,
            poll_ms: 2_000,
            // Covers the first token of a long prompt on a slow machine: prefill chunks count as steps too.
            job_step_timeout_ms: 120_000,
            // The longest single step is a clone of a large repository; waiting for a model counts as steps.
            task_step_timeout_ms: 600_000,
            slot_wait_ms: 60_000,
            backoff_base_ms: 1_000,
            backoff_cap_ms: 256_000,
            retry_ceiling_ms: 600_000,
            request_timeout_ms: 5_000,
            drain_timeout_ms: 10_000,
        }
    }
}

macro_rules! durations {
    ($($field:ident => $name:ident),* $(,)?) => {
        impl Timing {
            $(#[doc = concat!("[`Self::", stringify!($field), "`] as a [`Duration`].")]
            pub fn $name(&self) -> Duration {
                Duration::from_millis(self.$field)
            })*
        }
    };
}

durations! {
    heartbeat_ms => heartbeat,
    lease_ttl_ms => lease_ttl,
    lease_margin_ms => lease_margin,
    accept_timeout_ms => accept_timeout,
    prepare_timeout_ms => prepare_timeout,
    leader_renewal_ms => leader_renewal,
    leader_ttl_ms => leader_ttl,
    sweep_ms => sweep,
    poll_ms => poll,
    job_step_timeout_ms => job_step_timeout,
    task_step_timeout_ms => task_step_timeout,
    slot_wait_ms => slot_wait,
    backoff_base_ms => backoff_base,
    backoff_cap_ms => backoff_cap,
    retry_ceiling_ms => retry_ceiling,
    request_timeout_ms => request_timeout,
    drain_timeout_ms => drain_timeout,
}

impl Timing {
    /// Divides all values except the request timeout by `factor`, for tests; no divided value becomes less than 20 ms.
    pub fn faster(&self, factor: u64) -> Self {
        let f = |v: u64| (v / factor.max(1)).max(20);
        Self {
            heartbeat_ms: f(self.heartbeat_ms),
            lease_ttl_ms: f(self.lease_ttl_ms),
            lease_margin_ms: f(self.lease_margin_ms),
            accept_timeout_ms: f(self.accept_timeout_ms),
            prepare_timeout_ms: f(self.prepare_timeout_ms),
            leader_renewal_ms: f(self.leader_renewal_ms),
            leader_ttl_ms: f(self.leader_ttl_ms),
            sweep_ms: f(self.sweep_ms),
            poll_ms: f(self.poll_ms),
            job_step_timeout_ms: f(self.job_step_timeout_ms),
            task_step_timeout_ms: f(self.task_step_timeout_ms),
            slot_wait_ms: f(self.slot_wait_ms),
            backoff_base_ms: f(self.backoff_base_ms),
            backoff_cap_ms: f(self.backoff_cap_ms),
            retry_ceiling_ms: f(self.retry_ceiling_ms),
            request_timeout_ms: self.request_timeout_ms,
            drain_timeout_ms: f(self.drain_timeout_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_0_1_still_load() {
        let json = r#"{
            "beat_ms": 1, "leader_beat_ms": 2, "accept_ms": 3, "request_ms": 4, "drain_ms": 5, "job_step_ms": 6,
            "task_step_ms": 7
        }"#;
        let timing: Timing = serde_json::from_str(json).unwrap();
        assert_eq!((timing.heartbeat_ms, timing.leader_renewal_ms), (1, 2));
        let timeouts = (timing.accept_timeout_ms, timing.request_timeout_ms, timing.drain_timeout_ms);
        assert_eq!(timeouts, (3, 4, 5));
        assert_eq!((timing.job_step_timeout_ms, timing.task_step_timeout_ms), (6, 7));
    }
}
