//! Which model a node should load, where a queued job wants one that is on its disk.
//!
//! A load is asked for where no node has the model ready or is loading it. What fits beside the others is loaded at once.
//! What does not fit makes another model give way, and that is for the job that ranks first on that node alone: while a
//! job of higher rank waits there for room, or something is being loaded, or an order was not taken up yet, nothing else
//! has to go. Otherwise two jobs with room for one model would have each other's model thrown out before it served.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::job::Job;
use crate::node::Node;
use crate::price::{load_ms, price};

/// What one node is to load in this plan.
#[derive(Debug, Default)]
pub struct Loads<'a> {
    /// Bytes that are free beside what is loaded, and what was promised of them.
    free: u64,
    /// No other model may give way now.
    pub kept: bool,
    pub wanted: Vec<Load<'a>>,
}

#[derive(Debug)]
pub struct Load<'a> {
    pub job: JobId,
    pub model: &'a ModelId,
    pub reason: String,
}

impl Loads<'_> {
    pub fn of(node: &Node) -> Self {
        let loading = node.ledger.models.iter().any(|m| m.residency == Residency::Loading || is_leaving(m));
        Self { free: node.ledger.free_bytes, kept: loading, wanted: Vec::new() }
    }
}

/// On its way out: sequences still run on it.
fn is_leaving(model: &ModelState) -> bool {
    model.residency == Residency::Available && model.running > 0
}

/// `able` have the model and may run the job; `takers` are those of them that would take work now. The node that must
/// become free for it, so that jobs of lower rank keep out.
pub fn want<'a>(
    job: &'a Job,
    able: &[(&Node, &ModelState)],
    takers: Vec<(&'a Node, &'a ModelState)>,
    loads: &mut BTreeMap<&'a NodeId, Loads<'a>>,
) -> Option<&'a NodeId> {
    if able.iter().any(|(_, m)| m.residency == Residency::Loading) {
        return None;
    }
    if loads.values().any(|l| l.wanted.iter().any(|load| *load.model == job.model)) {
        return None;
    }
    let on_disk: Vec<_> =
        takers.into_iter().filter(|(_, m)| m.residency == Residency::Available && m.running == 0).collect();
    let cost = |model: &ModelState| load_ms(model) + price(job, model, 0).total_ms();
    let may =
        |(node, m): &&(&Node, &ModelState)| loads.get(&node.id).is_some_and(|l| m.need_bytes <= l.free || !l.kept);
    let cheapest = |a: &&(&Node, &ModelState), b: &&(&Node, &ModelState)| cost(a.1).total_cmp(&cost(b.1));
    let Some((node, model)) = on_disk.iter().filter(may).min_by(cheapest) else {
        return on_disk.iter().min_by(cheapest).map(|(node, _)| &node.id);
    };
    let loads = loads.entry(&node.id).or_default();
    let beside = model.need_bytes <= loads.free;
    loads.free = loads.free.saturating_sub(model.need_bytes);
    // Whoever ranks lower does not push it out again.
    loads.kept = true;
    let how = if beside { "beside what is loaded" } else { "another gives way where nothing runs on it" };
    let reason = format!(
        "{} loads {} in about {:.0} s: needs {} bytes, {how}",
        node.id,
        model.model,
        load_ms(model) / 1000.0,
        model.need_bytes
    );
    loads.wanted.push(Load { job: job.id, model: &job.model, reason });
    (!beside).then_some(&node.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{carry_out, job, model, model_id, node, placed, state};
    use crate::{Effect, Phase, plan};
    use cfq_proto::task::Priority;

    fn other() -> ModelId {
        "path:/other.gguf".parse().unwrap()
    }

    fn on_disk(id: ModelId, need_bytes: u64) -> ModelState {
        ModelState { model: id, residency: Residency::Available, need_bytes, ..model(4096, 1) }
    }

    fn asked(effects: &[Effect]) -> Vec<(NodeId, ModelId)> {
        effects
            .iter()
            .filter_map(|e| match e {
                Effect::Load { node, model, .. } => Some((node.clone(), model.clone())),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn what_lies_on_disk_is_loaded_once_and_asked_for_again_only_after_a_while() {
        let n = node("a", vec![on_disk(model_id(), 5)], 0);
        let mut s = state(vec![n.clone()], vec![job(Priority::P2, 0), job(Priority::P2, 1)]);
        let effects = plan(&s, 0);
        assert_eq!(asked(&effects), [(n.id.clone(), model_id())], "one load for two jobs");
        carry_out(&mut s, &effects, 0);
        assert_eq!(plan(&s, 1), vec![], "planning twice changes nothing");
        assert_eq!(asked(&plan(&s, 3_000)).len(), 1, "the message may be lost");
        let mut loading = n.clone();
        loading.ledger.models[0].residency = Residency::Loading;
        s.node(loading);
        assert_eq!(asked(&plan(&s, 3_000)), []);
        s.node(Node { ledger: cfq_proto::node::Ledger { models: vec![model(4096, 1)], ..n.ledger.clone() }, ..n });
        assert_eq!(placed(&plan(&s, 3_000)).len(), 1);
    }

    #[test]
    fn another_node_is_not_asked_while_one_has_it() {
        let (has, lacks) = (node("a", vec![model(4096, 1)], 0), node("b", vec![on_disk(model_id(), 5)], 0));
        let effects = plan(&state(vec![has, lacks], vec![job(Priority::P2, 0), job(Priority::P2, 0)]), 0);
        assert_eq!((placed(&effects).len(), asked(&effects).len()), (1, 0));
    }

    #[test]
    fn the_cheapest_of_two_loads() {
        let (mut slow, mut fast) = (on_disk(model_id(), 1 << 30), on_disk(model_id(), 1 << 30));
        (slow.load_rate, fast.load_rate) = (1e7, 1e9);
        let nodes = vec![node("a", vec![slow], 0), node("b", vec![fast], 0)];
        let effects = plan(&state(nodes, vec![job(Priority::P2, 0)]), 0);
        assert_eq!(asked(&effects)[0].0.as_str(), "b");
    }

    /// Room for one model: nobody's model goes before the first in rank was served.
    #[test]
    fn two_models_with_room_for_one_take_turns() {
        let first = job(Priority::P1, 0);
        let second = Job { model: other(), ..job(Priority::P2, 0) };
        let mut n = node("a", vec![on_disk(model_id(), 5), on_disk(other(), 5)], 0);
        let mut s = state(vec![n.clone()], vec![first.clone(), second.clone()]);
        assert_eq!(asked(&plan(&s, 0)), [(n.id.clone(), model_id())], "the first in rank alone");
        n.ledger.models[0] = model(4096, 1);
        n.seen_ms = 10_000;
        s.node(n.clone());
        let effects = plan(&s, 10_000);
        assert_eq!(placed(&effects), [(first.id, n.id.clone())]);
        carry_out(&mut s, &effects, 10_000);
        assert_eq!(asked(&plan(&s, 10_001)), [], "the order is not taken up yet");
        let phase = Phase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 10_002 };
        s.job(Job { attempt: 1, phase, ..first }, 10_002);
        assert_eq!(asked(&plan(&s, 10_003)), [(n.id.clone(), other())], "now it may go when it has ended");
        // Who ranks lower does not keep the model busy that is to go.
        s.job(Job { model: model_id(), ..job(Priority::P3, 0) }, 10_003);
        n.ledger.models[0].max_sequences = 4;
        s.node(n.clone());
        assert_eq!(placed(&plan(&s, 10_003)), []);
        // Where there is room for one more it is loaded beside the other, and only the one after it has to wait.
        n.ledger.free_bytes = 5;
        n.ledger.models[0] = on_disk(model_id(), 5);
        let jobs = vec![job(Priority::P1, 0), second];
        assert_eq!(asked(&plan(&state(vec![n], jobs), 10_000)).len(), 1, "the second no longer fits beside the first");
    }

    #[test]
    fn a_model_on_its_way_out_is_left_alone() {
        let mut leaving = on_disk(model_id(), 5);
        (leaving.running, leaving.max_sequences) = (1, 0);
        assert_eq!(asked(&plan(&state(vec![node("a", vec![leaving], 0)], vec![job(Priority::P2, 0)]), 0)), []);
    }
}
