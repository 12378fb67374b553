//! Request classes: jobs of one model that need about the same of a node. If the first job of a class does not fit, the
//! others are not compared with the nodes in the same pass.

use std::collections::BTreeSet;

use cfq_proto::ids::{JobId, NodeId};

use crate::job::Job;

/// Bytes of a prompt per token, for the size of a class only.
const BYTES_PER_TOKEN: u64 = 4;

/// What the jobs of a class have in common, apart from their model.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestClass {
    /// Number of tokens, as the exponent of a power of two, rounded down.
    size: u32,
    /// Nodes that can never run the jobs.
    refused_by: BTreeSet<NodeId>,
    /// Whether the jobs may be poison, so that each needs a node of its own.
    isolated: bool,
    /// The job itself if an attempt of it failed, because each such job has its own backoff.
    failed: Option<JobId>,
}

impl RequestClass {
    pub fn of(job: &Job) -> Self {
        let estimate = || (job.prompt_bytes / BYTES_PER_TOKEN).saturating_add(u64::from(job.max_tokens));
        Self {
            size: job.counted_tokens.unwrap_or_else(estimate).max(1).ilog2(),
            refused_by: job.refused_by.keys().cloned().collect(),
            isolated: job.may_be_poison(),
            failed: (!job.node_failures.0.is_empty()).then_some(job.id),
        }
    }

    /// Whether the jobs of the class may be poison.
    pub fn is_isolated(&self) -> bool {
        self.isolated
    }
}
