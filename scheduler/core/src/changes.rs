//! What has changed since the last step, and so has to be looked at in the next one.

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;

use crate::priority::OrderKey;
use crate::request_class::RequestClass;
use crate::timers::Timers;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Changes {
    /// Everything has to be looked at.
    pub all: bool,
    /// Models whose queued jobs have to be compared with the nodes.
    pub models: BTreeSet<ModelId>,
    /// Nodes for which it is not known whether they are live.
    pub nodes: BTreeSet<NodeId>,
    /// Placed jobs whose acceptance has to be checked.
    pub placed: BTreeSet<JobId>,
    /// Queued jobs whose pending reason has to be checked.
    pub queued: BTreeSet<JobId>,
    /// Models for which the pending reasons of all queued jobs have to be checked, and the last job that was.
    pub stale: BTreeMap<ModelId, Option<(RequestClass, OrderKey)>>,
    pub timers: Timers,
    /// Nodes that were live at the last step.
    pub live: BTreeSet<NodeId>,
    /// Time of the last step, in ms.
    pub last_ms: i64,
    /// Whether the decisions for one model may depend on the jobs of another: a job that may be poison is queued, or a
    /// job waits for a model to be loaded. All models are then compared in each step.
    pub is_coupled: bool,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            all: true,
            models: BTreeSet::new(),
            nodes: BTreeSet::new(),
            placed: BTreeSet::new(),
            queued: BTreeSet::new(),
            stale: BTreeMap::new(),
            timers: Timers::default(),
            live: BTreeSet::new(),
            last_ms: i64::MIN,
            is_coupled: true,
        }
    }
}
