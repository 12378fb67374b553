//! Decides which nodes should load a model from disk because a queued job needs it.
//!
//! A load is requested only if no node has the model resident or is loading it. A node whose load takes longer than the
//! retry ceiling does not count: its load may never end. A model that fits into the node's free
//! memory is loaded at once. A model that does not fit requires an eviction, and only the highest-ranked job on the
//! node may cause one: nothing is evicted while a job of higher rank waits there for capacity, while a load is in
//! progress, or while the node has not accepted a placement yet. Otherwise two jobs with different models, on a node
//! with memory for one of them, would evict each other's model before it served a call.
//!
//! Until the memory is free, lower-ranked jobs are not placed on the models that have to be evicted, because otherwise
//! these models would never become idle. A node evicts idle models first: if they free enough memory, the busy models
//! continue to take work. Models behind endpoints also continue to take work, because they hold no memory.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::candidates::Candidate;
use crate::cost::{load_ms, placement_cost};
use crate::job::{Job, JobPhase};
use crate::node::Node;
use crate::prefix_index::PrefixIndex;
use crate::state::PlannerState;

/// Loads of one node in the plan that is being computed.
#[derive(Debug, Default)]
pub struct NodeLoads<'a> {
    /// Free memory of the node in bytes, less the memory reserved for planned loads.
    free_bytes: u64,
    /// True if no model may be evicted for another load now.
    pub eviction_blocked: bool,
    pub planned: Vec<PlannedLoad<'a>>,
}

/// A load that the plan will request.
#[derive(Debug)]
pub struct PlannedLoad<'a> {
    pub job: JobId,
    pub model: &'a ModelId,
    pub reason: String,
}

impl NodeLoads<'_> {
    fn of(node: &Node) -> Self {
        let is_loading = node.ledger.models.iter().any(|m| m.residency == Residency::Loading || is_unloading(m));
        Self { free_bytes: node.ledger.free_bytes, eviction_blocked: is_loading, planned: Vec::new() }
    }
}

/// Returns the free memory of each node, and whether evictions are blocked there. They are blocked while the node loads
/// or unloads a model, or has not yet accepted a placement.
pub fn node_loads(state: &PlannerState) -> BTreeMap<&NodeId, NodeLoads<'_>> {
    let mut loads: BTreeMap<&NodeId, NodeLoads<'_>> =
        state.nodes.iter().map(|(id, n)| (id, NodeLoads::of(n))).collect();
    let held = state.held.keys().flat_map(|node| state.held_jobs(node));
    for job in held.filter(|job| matches!(job.phase, JobPhase::Placed { .. })) {
        if let Some(loads) = job.holder().and_then(|(node, _)| loads.get_mut(node)) {
            loads.eviction_blocked = true;
        }
    }
    loads
}

/// Returns whether the model is being unloaded: it is no longer resident, but sequences still run on it.
fn is_unloading(model: &ModelState) -> bool {
    model.residency == Residency::Available && model.running > 0
}

/// A requested load that needs memory which other models on the node have to free first.
#[derive(Debug, Clone, Copy)]
pub struct LoadRequest<'a> {
    pub node: &'a Node,
    pub missing_bytes: u64,
}

impl<'a> LoadRequest<'a> {
    /// Returns the request for a load of `model`; `None` if the free memory, together with the memory of models that
    /// are being unloaded, is enough for it.
    fn of(node: &'a Node, model: &ModelState, free_bytes: u64) -> Option<Self> {
        let unloading = node.ledger.models.iter().filter(|m| is_unloading(m));
        let soon_free = unloading.fold(0u64, |sum, m| sum.saturating_add(m.need_bytes));
        let missing_bytes = model.need_bytes.saturating_sub(free_bytes).saturating_sub(soon_free);
        (missing_bytes > 0).then_some(Self { node, missing_bytes })
    }

    /// Returns the models to evict: the idle ones if they free enough memory, otherwise all resident models that hold
    /// memory.
    pub fn models_to_evict(self, is_idle: impl Fn(&ModelState) -> bool) -> Vec<&'a ModelState> {
        let models = self.node.ledger.models.iter();
        let holding: Vec<_> =
            models.filter(|m| matches!(m.residency, Residency::Resident) && m.need_bytes > 0).collect();
        let idle: Vec<_> = holding.iter().copied().filter(|m| is_idle(m)).collect();
        let idle_bytes = idle.iter().fold(0u64, |sum, m| sum.saturating_add(m.need_bytes));
        if idle_bytes >= self.missing_bytes { idle } else { holding }
    }
}

/// Plans a load of the job's model on the node where the load is cheapest, unless such a load is planned already. If
/// other models have to free memory for the load, returns a request with the missing bytes, even if the load cannot be
/// planned because evictions are blocked now. Otherwise returns `None`.
///
/// `loaders` are the live nodes that have the model, may run the job, take work now and have no overdue load. No other
/// node may be loading the model, unless its load is overdue.
pub fn request_load<'a>(
    job: &'a Job,
    loaders: Vec<Candidate<'a>>,
    prefix_index: &PrefixIndex,
    loads: &mut BTreeMap<&'a NodeId, NodeLoads<'a>>,
) -> Option<LoadRequest<'a>> {
    if loads.values().any(|l| l.planned.iter().any(|load| *load.model == job.model)) {
        return None;
    }
    let on_disk: Vec<_> =
        loaders.into_iter().filter(|(_, m)| m.residency == Residency::Available && m.running == 0).collect();
    let cost_ms = |(node, model): &Candidate<'_>| {
        let cached_blocks = prefix_index.cached_blocks(node, model, &job.prefix);
        load_ms(model) + placement_cost(job, model, 0, cached_blocks).total_ms()
    };
    let may_load = |(node, m): &&Candidate<'_>| {
        loads.get(&node.id).is_some_and(|l| m.need_bytes <= l.free_bytes || !l.eviction_blocked)
    };
    let by_cost = |a: &&Candidate<'_>, b: &&Candidate<'_>| cost_ms(a).total_cmp(&cost_ms(b));
    let Some((node, model)) = on_disk.iter().filter(may_load).min_by(by_cost) else {
        let (node, model) = on_disk.into_iter().min_by(|a, b| by_cost(&a, &b))?;
        return LoadRequest::of(node, model, loads.get(&node.id).map_or(0, |l| l.free_bytes));
    };
    let loads = loads.entry(&node.id).or_default();
    let fits = model.need_bytes <= loads.free_bytes;
    let request = LoadRequest::of(node, model, loads.free_bytes);
    loads.free_bytes = loads.free_bytes.saturating_sub(model.need_bytes);
    // A lower-ranked job must not evict this model again.
    loads.eviction_blocked = true;
    let how = if fits { "fits into free memory" } else { "idle models are evicted for it" };
    let reason = format!(
        "{} loads {} in about {:.0} s: needs {} bytes, {how}",
        node.id,
        model.model,
        load_ms(model) / 1000.0,
        model.need_bytes
    );
    loads.planned.push(PlannedLoad { job: job.id, model: &job.model, reason });
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{TIMING, carry_out, job, model, model_id, new_id, node, placements, state};
    use crate::{Effect, plan};
    use cfq_proto::task::Priority;
    use proptest::prelude::*;

    fn other() -> ModelId {
        "path:/other.gguf".parse().unwrap()
    }

    fn on_disk(id: ModelId, need_bytes: u64) -> ModelState {
        ModelState { model: id, residency: Residency::Available, need_bytes, ..model(4096, 1) }
    }

    fn load_requests(effects: &[Effect]) -> Vec<(NodeId, ModelId)> {
        effects
            .iter()
            .filter_map(|e| match e {
                Effect::Load { node, model, .. } => Some((node.clone(), model.clone())),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn load_is_requested_once_and_repeated_after_the_accept_time() {
        let n = node("a", vec![on_disk(model_id(), 5)], 0);
        let mut s = state(vec![n.clone()], vec![job(Priority::P2, 0), job(Priority::P2, 1)]);
        let effects = plan(&s, 0);
        assert_eq!(load_requests(&effects), [(n.id.clone(), model_id())], "one load for two jobs");
        carry_out(&mut s, &effects, 0);
        assert_eq!(plan(&s, 1), vec![], "planning twice changes nothing");
        assert_eq!(load_requests(&plan(&s, 3_000)).len(), 1, "the message may be lost");
        let mut loading = n.clone();
        loading.ledger.models[0].residency = Residency::Loading;
        s.on_node_row(loading);
        assert_eq!(load_requests(&plan(&s, 3_000)), []);
        let mut loaded = n;
        loaded.ledger.models = vec![model(4096, 1)];
        s.on_node_row(loaded);
        assert_eq!(placements(&plan(&s, 3_000)).len(), 1);
    }

    /// The load on node `a` never ends.
    #[test]
    fn load_that_takes_too_long_does_not_block_other_nodes() {
        let mut a = node("a", vec![on_disk(model_id(), 5), on_disk(other(), 5)], 0);
        a.ledger.models[0].residency = Residency::Loading;
        let mut b = node("b", vec![on_disk(model_id(), 5), on_disk(other(), 5)], 0);
        (a.ledger.free_bytes, b.ledger.free_bytes) = (5, 5);
        (a.ledger.models[1].load_rate, b.ledger.models[1].load_rate) = (1e3, 1.0);
        let ceiling_ms = TIMING.retry_ceiling_ms as i64;
        let waits_for_it = job(Priority::P2, 0);
        let waits_behind_it = Job { model: other(), ..job(Priority::P2, 0) };
        let mut states = [waits_for_it, waits_behind_it].map(|job| state(vec![a.clone(), b.clone()], vec![job]));
        (a.seen_ms, b.seen_ms) = (ceiling_ms, ceiling_ms);
        for state in &mut states {
            [&a, &b].into_iter().for_each(|node| state.on_node_row(node.clone()));
        }
        let requests = |states: &[PlannerState], now_ms| -> Vec<Vec<_>> {
            states.iter().map(|state| load_requests(&plan(state, now_ms))).collect()
        };
        let before = requests(&states, ceiling_ms - 1);
        assert_eq!(before, [vec![], vec![(a.id.clone(), other())]], "the load may still end");
        let after = requests(&states, ceiling_ms);
        assert_eq!(after, [vec![(b.id.clone(), model_id())], vec![(b.id.clone(), other())]]);
        // The jobs wait for the load on b now.
        b.ledger.models.iter_mut().for_each(|model| model.residency = Residency::Loading);
        states.iter_mut().for_each(|state| state.on_node_row(b.clone()));
        assert_eq!(requests(&states, ceiling_ms), [vec![], vec![]]);
        // Another boot starts another load.
        let [mut state, _] = states;
        a.boot = new_id();
        state.on_node_row(a);
        b.ledger.models[0].residency = Residency::Available;
        state.on_node_row(b);
        assert_eq!(load_requests(&plan(&state, ceiling_ms)), []);
    }

    #[test]
    fn no_load_is_requested_while_a_node_has_the_model() {
        let (has, lacks) = (node("a", vec![model(4096, 1)], 0), node("b", vec![on_disk(model_id(), 5)], 0));
        let effects = plan(&state(vec![has, lacks], vec![job(Priority::P2, 0), job(Priority::P2, 0)]), 0);
        assert_eq!((placements(&effects).len(), load_requests(&effects).len()), (1, 0));
    }

    #[test]
    fn the_cheaper_of_two_loads_is_requested() {
        let (mut slow, mut fast) = (on_disk(model_id(), 1 << 30), on_disk(model_id(), 1 << 30));
        (slow.load_rate, fast.load_rate) = (1e7, 1e9);
        let nodes = vec![node("a", vec![slow], 0), node("b", vec![fast], 0)];
        let effects = plan(&state(nodes, vec![job(Priority::P2, 0)]), 0);
        assert_eq!(load_requests(&effects)[0].0.as_str(), "b");
    }

    /// Two models, but memory for only one: no model is evicted before the highest-ranked job is served.
    #[test]
    fn two_models_with_memory_for_one_take_turns() {
        let first = job(Priority::P1, 0);
        let second = Job { model: other(), ..job(Priority::P2, 0) };
        let mut n = node("a", vec![on_disk(model_id(), 5), on_disk(other(), 5)], 0);
        let mut s = state(vec![n.clone()], vec![first.clone(), second.clone()]);
        assert_eq!(load_requests(&plan(&s, 0)), [(n.id.clone(), model_id())], "only the highest-ranked");
        n.ledger.models[0] = model(4096, 1);
        n.seen_ms = 10_000;
        s.on_node_row(n.clone());
        let effects = plan(&s, 10_000);
        assert_eq!(placements(&effects), [(first.id, n.id.clone())]);
        carry_out(&mut s, &effects, 10_000);
        assert_eq!(load_requests(&plan(&s, 10_001)), [], "the placement is not accepted yet");
        let phase = JobPhase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 10_002 };
        s.on_job_row(Job { attempt: 1, phase, ..first }, 10_002);
        let requests = load_requests(&plan(&s, 10_003));
        assert_eq!(requests, [(n.id.clone(), other())], "the first model is evicted once its job has ended");
        // No lower-ranked job is placed on the model that is to be evicted, because it would keep that model busy.
        s.on_job_row(Job { model: model_id(), ..job(Priority::P3, 0) }, 10_003);
        n.ledger.models[0].max_sequences = 4;
        s.on_node_row(n.clone());
        assert_eq!(placements(&plan(&s, 10_003)), []);
        // With free memory for one more model, the first model is loaded without an eviction, and only the next load
        // has to wait.
        n.ledger.free_bytes = 5;
        n.ledger.models[0] = on_disk(model_id(), 5);
        let jobs = vec![job(Priority::P1, 0), second];
        let requests = load_requests(&plan(&state(vec![n], jobs), 10_000));
        assert_eq!(requests.len(), 1, "the second no longer fits together with the first");
    }

    /// A resident model with four slots.
    fn resident(id: &str, need_bytes: u64, running: u32) -> ModelState {
        ModelState { model: id.parse().unwrap(), need_bytes, running, ..model(100_000, 4) }
    }

    fn job_for(id: &str, priority: Priority) -> Job {
        Job { model: id.parse().unwrap(), ..job(priority, 0) }
    }

    #[test]
    fn only_models_to_evict_take_no_new_work() {
        let waits = Job { model: other(), ..job(Priority::P0, 0) };
        let behind: Vec<Job> =
            ["path:/idle", "path:/busy", "path:/endpoint"].map(|id| job_for(id, Priority::P2)).into();
        let placed = |need_bytes: u64, unloading: u64| {
            let mut models = vec![
                on_disk(other(), need_bytes),
                resident("path:/idle", 5, 0),
                resident("path:/busy", 5, 1),
                resident("path:/endpoint", 0, 1),
            ];
            if unloading > 0 {
                models.push(ModelState { running: 1, ..on_disk("path:/unloading".parse().unwrap(), unloading) });
            }
            let jobs = [vec![waits.clone()], behind.clone()].concat();
            let placed = placements(&plan(&state(vec![node("a", models, 0)], jobs), 0));
            behind.iter().map(|b| placed.iter().any(|(job, _)| *job == b.id)).collect::<Vec<_>>()
        };
        assert_eq!(placed(5, 0), [false, true, true], "the idle one is enough");
        assert_eq!(placed(6, 0), [false, false, true], "the busy one has to be evicted too");
        assert_eq!(placed(5, 5), [true, true, true], "enough memory is being freed");
        assert_eq!(placed(6, 5), [false, true, true], "only a part of it is being freed");
    }

    proptest! {
        /// A job that waits for a load does not affect the placement of jobs whose models stay resident.
        #[test]
        fn waiting_for_a_load_blocks_only_models_to_evict(
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
                .map(|(i, p)| job_for(&names[i % names.len()], Priority::try_from(*p).unwrap())).collect();
            let without = placements(&plan(&state(vec![n.clone()], jobs.clone()), 0));
            let waits = Job { model: other(), ..job(Priority::P0, -1) };
            let with = placements(&plan(&state(vec![n], [jobs.clone(), vec![waits]].concat()), 0));
            let idle: u64 = others.iter().filter(|(_, running)| *running == 0).map(|(bytes, _)| bytes).sum();
            let is_evicted =
                |bytes: u64, running: u32| bytes > 0 && need > free && (running == 0 || idle < need - free);
            for (id, on) in &without {
                let job = jobs.iter().find(|j| j.id == *id).unwrap();
                let (bytes, running) = others[names.iter().position(|name| *name == job.model.to_string()).unwrap()];
                prop_assert_eq!(with.contains(&(*id, on.clone())), !is_evicted(bytes, running));
            }
            prop_assert_eq!(with.iter().filter(|p| !without.contains(p)).count(), 0);
        }
    }

    #[test]
    fn model_being_unloaded_is_not_loaded_again_yet() {
        let mut unloading = on_disk(model_id(), 5);
        (unloading.running, unloading.max_sequences) = (1, 0);
        let effects = plan(&state(vec![node("a", vec![unloading], 0)], vec![job(Priority::P2, 0)]), 0);
        assert_eq!(load_requests(&effects), []);
    }
}
