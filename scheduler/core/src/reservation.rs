//! A node that is reserved for a large job.

use cfq_proto::ids::{BootId, JobId, NodeId};

/// The first job of a model that fits on no node, although a slot is free somewhere, reserves the node where it can
/// start first. It keeps this node until it is placed or the node can no longer run it. A job behind it uses the node
/// only if it is expected to end before the reserving job can start (backfill). The other nodes serve all jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub job: JobId,
    pub node: NodeId,
    pub boot: BootId,
    /// Time of the reservation, in ms.
    pub since_ms: i64,
    /// Time by which the job was expected to start when the node was reserved, in ms. It is not extended: if the
    /// reservation is late, nothing more is backfilled.
    pub start_ms: i64,
}
