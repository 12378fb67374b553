//! Which model a node should load, where a queued job wants one that is on its disk.
//!
//! A load is asked for where no node has the model ready or is loading it. What fits beside the others is loaded at once.
//! What does not fit makes another model give way, and that is for the job that ranks first on that node alone: while a
//! job of higher rank waits there for room, or something is being loaded, or an order was not taken up yet, nothing else
//! has to go. Otherwise two jobs with room for one model would have each other's model thrown out before it served.
//!
//! Until there is room, jobs of lower rank keep off the models that have to go for it, or it would never come. A node lets
//! idle models go first: where those are enough, the busy ones take work as ever. So do endpoints, which hold no memory.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::held::Held;
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

/// A job waits until other models on a node have given this many bytes back.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    pub node: &'a Node,
    pub bytes: u64,
}

impl<'a> Claim<'a> {
    fn of(node: &'a Node, model: &ModelState, free: u64) -> Option<Self> {
        let leaving = node.ledger.models.iter().filter(|m| is_leaving(m));
        let coming = leaving.fold(0u64, |sum, m| sum.saturating_add(m.need_bytes));
        let bytes = model.need_bytes.saturating_sub(free).saturating_sub(coming);
        (bytes > 0).then_some(Self { node, bytes })
    }

    /// The models that have to go for it: the idle ones where they are enough, otherwise whatever holds memory.
    pub fn on(self, is_idle: impl Fn(&ModelState) -> bool) -> Vec<&'a ModelState> {
        let models = self.node.ledger.models.iter();
        let holding: Vec<_> =
            models.filter(|m| matches!(m.residency, Residency::Resident) && m.need_bytes > 0).collect();
        let idle: Vec<_> = holding.iter().copied().filter(|m| is_idle(m)).collect();
        let enough = idle.iter().fold(0u64, |sum, m| sum.saturating_add(m.need_bytes)) >= self.bytes;
        if enough { idle } else { holding }
    }
}

/// `able` have the model and may run the job; `takers` are those of them that would take work now.
pub fn want<'a>(
    job: &'a Job,
    able: &[(&Node, &ModelState)],
    takers: Vec<(&'a Node, &'a ModelState)>,
    held: &Held,
    loads: &mut BTreeMap<&'a NodeId, Loads<'a>>,
) -> Option<Claim<'a>> {
    if able.iter().any(|(_, m)| m.residency == Residency::Loading) {
        return None;
    }
    if loads.values().any(|l| l.wanted.iter().any(|load| *load.model == job.model)) {
        return None;
    }
    let on_disk: Vec<_> =
        takers.into_iter().filter(|(_, m)| m.residency == Residency::Available && m.running == 0).collect();
    let cost = |(node, model): &(&Node, &ModelState)| {
        load_ms(model) + price(job, model, 0, held.shared(node, model, &job.prefix)).total_ms()
    };
    let may =
        |(node, m): &&(&Node, &ModelState)| loads.get(&node.id).is_some_and(|l| m.need_bytes <= l.free || !l.kept);
    let cheapest = |a: &&(&Node, &ModelState), b: &&(&Node, &ModelState)| cost(a).total_cmp(&cost(b));
    let Some((node, model)) = on_disk.iter().filter(may).min_by(cheapest) else {
        let (node, model) = on_disk.into_iter().min_by(|a, b| cheapest(&a, &b))?;
        return Claim::of(node, model, loads.get(&node.id).map_or(0, |l| l.free));
    };
    let loads = loads.entry(&node.id).or_default();
    let beside = model.need_bytes <= loads.free;
    let claim = Claim::of(node, model, loads.free);
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
    claim
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{carry_out, job, model, model_id, node, placed, state};
    use crate::{Effect, Phase, plan};
    use cfq_proto::task::Priority;
    use proptest::prelude::*;

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

    /// A resident model with four places, by its id.
    fn resident(id: &str, need_bytes: u64, running: u32) -> ModelState {
        ModelState { model: id.parse().unwrap(), need_bytes, running, ..model(100_000, 4) }
    }

    fn of_model(id: &str, priority: Priority) -> Job {
        Job { model: id.parse().unwrap(), ..job(priority, 0) }
    }

    #[test]
    fn only_what_has_to_go_is_kept_free() {
        let waits = Job { model: other(), ..job(Priority::P0, 0) };
        let behind: Vec<Job> =
            ["path:/idle", "path:/busy", "path:/endpoint"].map(|id| of_model(id, Priority::P2)).into();
        let served = |need_bytes: u64, leaving: u64| {
            let mut models = vec![
                on_disk(other(), need_bytes),
                resident("path:/idle", 5, 0),
                resident("path:/busy", 5, 1),
                resident("path:/endpoint", 0, 1),
            ];
            if leaving > 0 {
                models.push(ModelState { running: 1, ..on_disk("path:/leaving".parse().unwrap(), leaving) });
            }
            let jobs = [vec![waits.clone()], behind.clone()].concat();
            let placed = placed(&plan(&state(vec![node("a", models, 0)], jobs), 0));
            behind.iter().map(|b| placed.iter().any(|(job, _)| *job == b.id)).collect::<Vec<_>>()
        };
        assert_eq!(served(5, 0), [false, true, true], "the idle one is enough");
        assert_eq!(served(6, 0), [false, false, true], "the busy one has to go too");
        assert_eq!(served(5, 5), [true, true, true], "room for it is coming");
        assert_eq!(served(6, 5), [false, true, true], "not all of it");
    }

    proptest! {
        /// Somebody who waits for a model stands in nobody's way on a model that stays.
        #[test]
        fn who_waits_for_a_load_takes_nothing_from_models_that_stay(
            need in 1u64..30, free in 0u64..30, others in prop::collection::vec((0u64..10, 0u32..2), 1..5),
            priorities in prop::collection::vec(0i16..4, 1..12),
        ) {
            let names: Vec<String> = (0..others.len()).map(|i| format!("path:/{i}")).collect();
            let mut models: Vec<ModelState> =
                names.iter().zip(&others).map(|(id, (bytes, running))| resident(id, *bytes, *running)).collect();
            models.push(on_disk(other(), need));
            let mut n = node("a", models, 0);
            n.ledger.free_bytes = free;
            let jobs: Vec<Job> = priorities.iter().enumerate()
                .map(|(i, p)| of_model(&names[i % names.len()], Priority::try_from(*p).unwrap())).collect();
            let without = placed(&plan(&state(vec![n.clone()], jobs.clone()), 0));
            let waits = Job { model: other(), ..job(Priority::P0, -1) };
            let with = placed(&plan(&state(vec![n], [jobs.clone(), vec![waits]].concat()), 0));
            let idle: u64 = others.iter().filter(|(_, running)| *running == 0).map(|(bytes, _)| bytes).sum();
            let goes = |bytes: u64, running: u32| bytes > 0 && need > free && (running == 0 || idle < need - free);
            for (id, on) in &without {
                let job = jobs.iter().find(|j| j.id == *id).unwrap();
                let (bytes, running) = others[names.iter().position(|name| *name == job.model.to_string()).unwrap()];
                prop_assert_eq!(with.contains(&(*id, on.clone())), !goes(bytes, running));
            }
            prop_assert_eq!(with.iter().filter(|p| !without.contains(p)).count(), 0);
        }
    }

    #[test]
    fn a_model_on_its_way_out_is_left_alone() {
        let mut leaving = on_disk(model_id(), 5);
        (leaving.running, leaving.max_sequences) = (1, 0);
        assert_eq!(asked(&plan(&state(vec![node("a", vec![leaving], 0)], vec![job(Priority::P2, 0)]), 0)), []);
    }
}
