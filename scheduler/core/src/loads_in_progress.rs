//! Since when each node reports that it loads a model.
//!
//! A load that takes longer than the retry ceiling is overdue: it may be a long download, or may never end. Until it
//! ends, its node is treated as one that cannot load models, so that other nodes load them. The times are only cached: a
//! new leader counts from the first ledger that it reads.

use std::collections::BTreeMap;

use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;

use crate::node::Node;

/// For each node, the models that it loads, with the time of the first ledger that listed the load, in ms.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct LoadsInProgress(BTreeMap<NodeId, BTreeMap<ModelId, i64>>);

impl LoadsInProgress {
    /// Reads the ledger of a node. `former` is its row before.
    pub fn on_ledger(&mut self, node: &Node, former: Option<&Node>) {
        // Another boot starts another load. If the database's clock was set back, the count restarts.
        let continues = former.is_some_and(|former| former.boot == node.boot && former.seen_ms <= node.seen_ms);
        let before = self.0.remove(&node.id).filter(|_| continues).unwrap_or_default();
        let loading = node.ledger.models.iter().filter(|model| model.residency == Residency::Loading);
        let since_ms = |model: &ModelId| before.get(model).copied().unwrap_or(node.seen_ms);
        let loads: BTreeMap<_, _> = loading.map(|model| (model.model.clone(), since_ms(&model.model))).collect();
        if !loads.is_empty() {
            self.0.insert(node.id.clone(), loads);
        }
    }

    /// Forgets a node.
    pub fn forget(&mut self, node: &NodeId) {
        self.0.remove(node);
    }

    /// Excludes a jump of the clock ahead, to `now_ms`, from the times of all loads.
    pub fn on_clock_jump(&mut self, jump_ms: i64, now_ms: i64) {
        for since_ms in self.0.values_mut().flat_map(BTreeMap::values_mut) {
            *since_ms = since_ms.saturating_add(jump_ms).min(now_ms);
        }
    }

    /// Time at which the node's load of the model is overdue, in ms; `None` if the node does not load it.
    pub fn overdue_ms(&self, node: &NodeId, model: &ModelId, limit_ms: u64) -> Option<i64> {
        let since_ms = self.0.get(node)?.get(model)?;
        Some(since_ms.saturating_add_unsigned(limit_ms))
    }

    /// Returns whether any load of the node is overdue.
    pub fn is_any_overdue(&self, node: &NodeId, limit_ms: u64, now_ms: i64) -> bool {
        let mut loads = self.0.get(node).into_iter().flat_map(BTreeMap::values);
        loads.any(|since_ms| now_ms >= since_ms.saturating_add_unsigned(limit_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{model, model_id, new_id, node};

    #[test]
    fn time_counts_from_the_first_ledger_of_a_boot_that_lists_the_load() {
        let mut loads = LoadsInProgress::default();
        let mut n = node("a", vec![model(1, 1)], 100);
        let overdue = |loads: &LoadsInProgress, n: &Node| loads.overdue_ms(&n.id, &model_id(), 1000);
        loads.on_ledger(&n, None);
        assert_eq!(overdue(&loads, &n), None);
        n.ledger.models[0].residency = Residency::Loading;
        for seen_ms in [200, 300] {
            let former = n.clone();
            n.seen_ms = seen_ms;
            loads.on_ledger(&n, Some(&former));
            assert_eq!(overdue(&loads, &n), Some(1200));
        }
        assert!(!loads.is_any_overdue(&n.id, 1000, 1199) && loads.is_any_overdue(&n.id, 1000, 1200));
        // The machine was suspended. The row is read again before the node's next heartbeat.
        loads.on_clock_jump(3_600_000, 3_600_300);
        loads.on_ledger(&n, Some(&n));
        assert_eq!(overdue(&loads, &n), Some(3_601_200));
        let former = n.clone();
        (n.boot, n.seen_ms) = (new_id(), 3_600_400);
        loads.on_ledger(&n, Some(&former));
        assert_eq!(overdue(&loads, &n), Some(3_601_400), "another boot starts another load");
        let former = n.clone();
        n.seen_ms = 50;
        loads.on_ledger(&n, Some(&former));
        assert_eq!(overdue(&loads, &n), Some(1050), "the clock was set back");
        n.ledger.models[0].residency = Residency::Resident;
        loads.on_ledger(&n, Some(&n));
        assert_eq!((overdue(&loads, &n), loads), (None, LoadsInProgress::default()));
    }
}
