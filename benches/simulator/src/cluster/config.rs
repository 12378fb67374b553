//! Settings of a simulated cluster.

use crate::engine::EngineConfig;

/// Durations in ms, as in the configuration table `[timing]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Interval of a node's heartbeats.
    pub heartbeat_ms: u64,
    /// Duration of a lease after a confirmed heartbeat.
    pub lease_ttl_ms: u64,
    /// A holder stops this long before its lease could expire.
    pub lease_margin_ms: u64,
    /// Time that a node has to accept a placed job.
    pub accept_timeout_ms: u64,
    /// Time without an answer after which a job fails.
    pub retry_ceiling_ms: u64,
    /// Interval of the sweep, and of a plan without another cause.
    pub sweep_ms: u64,
    /// Interval at which a node repeats a report that was not answered.
    pub report_retry_ms: u64,
    /// Interval at which the leader compares its cache with the tables.
    pub resync_ms: u64,
    /// Time during which changes are collected for one plan.
    pub plan_delay_ms: u64,
    /// Time from the loss of a leader until the next one plans.
    pub leader_ttl_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_ms: 2_000,
            lease_ttl_ms: 6_000,
            lease_margin_ms: 1_000,
            accept_timeout_ms: 3_000,
            retry_ceiling_ms: 600_000,
            sweep_ms: 1_000,
            report_retry_ms: 1_000,
            resync_ms: 5_000,
            plan_delay_ms: 1,
            leader_ttl_ms: 3_000,
        }
    }
}

/// Random faults. Probabilities are per message, call or attempt; the times are means of exponential distributions, and
/// 0 turns the fault off.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// Probability that a message is lost.
    pub loss: f64,
    /// Probability that a message arrives twice.
    pub duplication: f64,
    /// Mean of an additional delay, in ms. Messages overtake each other.
    pub delay_ms: f64,
    /// Probability that the leader does not learn of a changed row before its next resync.
    pub hint_loss: f64,
    /// Largest relative error of the rate of a node's clock.
    pub clock_rate_error: f64,
    /// Largest error of the leader's reading of the database's clock, in ms.
    pub clock_reading_error_ms: u64,
    /// Time between two crashes of a node, in s.
    pub crash_interval_s: f64,
    /// Time that a node is down after a crash, in s.
    pub down_s: f64,
    /// Time between two disconnections of a node, in s.
    pub partition_interval_s: f64,
    /// Time that a node is disconnected, in s.
    pub partition_s: f64,
    /// Time between two changes of the leader, in s.
    pub leader_interval_s: f64,
    /// Time between two outages of the database, in s.
    pub database_interval_s: f64,
    /// Time that the database is down, in s.
    pub database_down_s: f64,
    /// Probability that an attempt fails in a way that is retried.
    pub failure: f64,
    /// Probability that a call is cancelled before its end.
    pub cancel: f64,
    /// Probability that a call ends the process of the node that starts it.
    pub poison: f64,
    /// Probability that a plan is stopped before all its effects are carried out.
    pub plan_stop: f64,
    /// Time at which the faults stop, in s.
    pub until_s: f64,
}

impl Faults {
    /// Many faults of all kinds.
    pub fn harsh(until_s: f64) -> Self {
        Self {
            loss: 0.02,
            duplication: 0.02,
            delay_ms: 50.0,
            hint_loss: 0.02,
            clock_rate_error: 0.01,
            clock_reading_error_ms: 100,
            crash_interval_s: 600.0,
            down_s: 20.0,
            partition_interval_s: 600.0,
            partition_s: 8.0,
            leader_interval_s: 120.0,
            database_interval_s: 600.0,
            database_down_s: 5.0,
            failure: 0.02,
            cancel: 0.02,
            poison: 0.001,
            plan_stop: 0.02,
            until_s,
        }
    }

    /// Faults as they are in a large, old cluster: each node crashes and is disconnected once a day.
    pub fn daily(until_s: f64) -> Self {
        let day_s = 86_400.0;
        Self {
            loss: 0.001,
            duplication: 0.001,
            delay_ms: 5.0,
            hint_loss: 0.001,
            clock_rate_error: 0.001,
            clock_reading_error_ms: 50,
            crash_interval_s: day_s,
            down_s: 60.0,
            partition_interval_s: day_s,
            partition_s: 10.0,
            leader_interval_s: 3_600.0,
            database_interval_s: 4.0 * 3_600.0,
            database_down_s: 10.0,
            failure: 0.001,
            cancel: 0.005,
            poison: 0.000_1,
            plan_stop: 0.001,
            until_s,
        }
    }
}

/// A simulated cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterConfig {
    /// Number of nodes.
    pub nodes: usize,
    /// Properties of each node.
    pub engine: EngineConfig,
    /// Waits and leases.
    pub timing: Timing,
    /// Faults to inject.
    pub faults: Faults,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Whether the jobs have random priority classes. Otherwise all have the same.
    pub random_priorities: bool,
    /// One of this number of plans is carried out twice, to check that the second time changes nothing,
    /// and compared with a plan that looks at everything; 0: none.
    pub repeat_one_plan_in: u64,
}
