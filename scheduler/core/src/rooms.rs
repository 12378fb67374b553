//! The nodes with free capacity, by model. A node that has none is not listed, so when all nodes are full, a waiting job
//! is compared with no node.
//!
//! Each change of a node gets a version. A job that did not fit is compared again only with the nodes that have changed
//! since.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use crate::capacity::ModelCapacity;
use crate::node::Node;

/// Free capacity of a resident model on a node that does not drain, yield, or run a job that needs it alone. Whether the
/// node is live and accepts work depends on the time, and is not considered here.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Room {
    pub node: Arc<Node>,
    /// Index of the model in the node's ledger.
    pub model: usize,
    /// At least one slot is free.
    pub capacity: ModelCapacity,
    /// Number of jobs placed or running on the node.
    pub held_jobs: u32,
}

impl Room {
    pub fn model(&self) -> &ModelState {
        &self.node.ledger.models[self.model]
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Rooms {
    version: u64,
    models: BTreeMap<ModelId, ModelRooms>,
}

#[derive(Debug, Clone, PartialEq, Default)]
struct ModelRooms {
    by_node: BTreeMap<NodeId, (u64, Room)>,
    by_version: BTreeMap<u64, NodeId>,
    /// Version of the last change of which nodes can serve the model.
    structure: u64,
}

impl Rooms {
    /// Version of the last change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Version of the last change of which nodes can serve the model.
    pub fn structure(&self, model: &ModelId) -> u64 {
        self.models.get(model).map_or(0, |rooms| rooms.structure)
    }

    /// Records that other nodes than before can serve the model: all its jobs are compared with all nodes again.
    pub fn on_structure_changed(&mut self, model: &ModelId) {
        self.version += 1;
        self.models.entry(model.clone()).or_default().structure = self.version;
    }

    /// Number of nodes with room for the model.
    pub fn count(&self, model: &ModelId) -> usize {
        self.models.get(model).map_or(0, |rooms| rooms.by_node.len())
    }

    /// The nodes with room for the model that have changed since `version`; all of them if it is `None`.
    pub fn changed_since(&self, model: &ModelId, version: Option<u64>) -> impl Iterator<Item = &Room> {
        let rooms = self.models.get(model);
        let all = rooms.filter(|_| version.is_none()).into_iter().flat_map(|rooms| rooms.by_node.values());
        let changed = rooms.zip(version).into_iter().flat_map(|(rooms, version)| {
            let changed = rooms.by_version.range((Bound::Excluded(version), Bound::Unbounded));
            changed.filter_map(|(_, node)| rooms.by_node.get(node))
        });
        all.chain(changed).map(|(_, room)| room)
    }

    /// Stores what room a node has for the model.
    pub fn set(&mut self, node: &NodeId, model: &ModelId, room: Option<Room>) {
        self.remove(node, model);
        let Some(room) = room else { return };
        self.version += 1;
        let rooms = self.models.entry(model.clone()).or_default();
        rooms.by_version.insert(self.version, node.clone());
        rooms.by_node.insert(node.clone(), (self.version, room));
    }

    pub fn remove(&mut self, node: &NodeId, model: &ModelId) -> Option<Room> {
        let rooms = self.models.get_mut(model)?;
        let (version, room) = rooms.by_node.remove(node)?;
        rooms.by_version.remove(&version);
        Some(room)
    }

    /// Marks the node as changed, so that all waiting jobs of the model are compared with it again.
    pub fn touch(&mut self, node: &NodeId, model: &ModelId) {
        if let Some(room) = self.remove(node, model) {
            self.set(node, model, Some(room));
        }
    }

    /// Subtracts a sequence that reserves `tokens`. A node that has less room than before does not count as changed.
    pub fn admit(&mut self, node: &NodeId, model: &ModelId, tokens: u64) {
        let Some(rooms) = self.models.get_mut(model) else { return };
        let Some((_, room)) = rooms.by_node.get_mut(node) else { return };
        room.capacity = room.capacity.after_admitting(tokens);
        if room.capacity.slots == 0 {
            self.remove(node, model);
        }
    }

    /// Counts one more job on the node.
    pub fn add_held_job(&mut self, node: &Node) {
        for model in &node.ledger.models {
            if let Some((_, room)) = self.models.get_mut(&model.model).and_then(|rooms| rooms.by_node.get_mut(&node.id))
            {
                room.held_jobs += 1;
            }
        }
    }
}
