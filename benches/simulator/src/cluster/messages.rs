//! Messages between scheduler and nodes.

use std::collections::BTreeMap;

use cfq_proto::node::Ledger;

/// Fence of one attempt: job, attempt and lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence {
    /// Index of the job's call in the workload.
    pub job: usize,
    /// Number of the attempt.
    pub attempt: i32,
    /// Number of the lease; every placement has another.
    pub lease: u64,
}

/// How an attempt ended on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptResult {
    /// The reply is complete.
    Done,
    /// The attempt failed; a retry may help.
    Failed,
}

/// A message to the scheduler. It names the sender's boot.
#[derive(Debug, Clone)]
pub enum ToScheduler {
    Register {
        ledger: Ledger,
    },
    Accept(Fence),
    Refuse {
        fence: Fence,
        ledger_version: u64,
    },
    FirstToken(Fence),
    Result {
        fence: Fence,
        result: AttemptResult,
    },
    /// `number` identifies the heartbeat in the reply.
    Heartbeat {
        number: u64,
        ledger: Ledger,
        held: Vec<Fence>,
    },
}

/// A message to a node. It names the boot that it is for.
#[derive(Debug, Clone)]
pub enum ToNode {
    Order(Fence),
    Load {
        model: usize,
    },
    /// Reply to `Accept` and `Result`: whether the attempt is the current one.
    Fenced {
        fence: Fence,
        is_result: bool,
        is_current: bool,
    },
    HeartbeatReply {
        number: u64,
        kept: BTreeMap<u64, bool>,
        register_again: bool,
    },
    Registered,
}
