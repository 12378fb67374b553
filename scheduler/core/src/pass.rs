//! One pass over the queue: compares the waiting jobs with the nodes, in the order of their keys.

mod load;
mod reserve;

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::ids::NodeId;
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;

use crate::candidates::{Candidates, accepts};
use crate::cost::{PlacementCost, placement_cost, slowest_end_ms};
use crate::effect::Effect;
use crate::job::Job;
use crate::model_loading::{NodeLoads, node_loads};
use crate::node::Node;
use crate::node_cost::node_cost;
use crate::occupancy::NodeOccupancy;
use crate::pending_reason::join_by_node;
use crate::placement_reason::placement_reason;
use crate::priority::OrderKey;
use crate::queue::{Blocked, ClassQueue};
use crate::request_class::RequestClass;
use crate::reservation::Reservation;
use crate::room_timeline::{Planned, expected_end_ms};
use crate::rooms::{Room, Rooms};
use crate::state::PlannerState;

/// The pass, and what remains on the nodes after the placements planned so far.
pub(crate) struct Pass<'a> {
    state: &'a PlannerState,
    now_ms: i64,
    rooms: Rooms,
    /// Occupancy of nodes where it is not that of the state.
    occupancies: BTreeMap<NodeId, NodeOccupancy>,
    planned: BTreeMap<(NodeId, ModelId), Vec<Planned>>,
    /// Nodes with models that take no new work until a load has got their memory.
    closed: BTreeSet<NodeId>,
    reservations: BTreeMap<ModelId, Reserved>,
    /// `None` if no job waits for a model to be loaded.
    loads: Option<BTreeMap<&'a NodeId, NodeLoads<'a>>>,
    /// Whether a class is compared only with the nodes that have changed since it was blocked.
    is_incremental: bool,
    effects: Vec<Effect>,
    blocked: Vec<(ModelId, RequestClass, Blocked)>,
    unsettled: BTreeSet<ModelId>,
    needs_load: bool,
}

/// A reservation, and the time by which a backfilled job has to end.
struct Reserved {
    reservation: Reservation,
    until_ms: i64,
}

/// What a pass decided.
pub(crate) struct PassResult {
    /// Placements, failures and loads, in the order of the jobs.
    pub effects: Vec<Effect>,
    /// The first job of each class that did not fit.
    pub blocked: Vec<(ModelId, RequestClass, Blocked)>,
    /// The reservation for each model whose jobs were all compared.
    pub reservations: BTreeMap<ModelId, Option<Reservation>>,
    /// Models with effects, and those that the pass did not reach.
    pub unsettled: BTreeSet<ModelId>,
    /// Nodes whose room the pass has changed.
    pub changed_nodes: BTreeSet<NodeId>,
    /// The rooms that remain.
    pub rooms: Rooms,
    /// A job waits for a model to be loaded.
    pub needs_load: bool,
    /// The pass ended early because of `max_effects`.
    pub is_cut: bool,
}

/// The cheapest node for a job. `reserved_tokens` of the cost is the number of tokens to reserve.
struct Choice<'a> {
    cost: PlacementCost,
    room: &'a Room,
}

enum Outcome {
    Effect(Effect),
    Blocked,
}

impl<'a> Pass<'a> {
    /// A pass that considers the memory of the nodes too, and compares each class with all nodes.
    pub fn full(state: &'a PlannerState, rooms: Rooms, now_ms: i64) -> Self {
        let loads = Some(node_loads(state));
        Self { loads, is_incremental: false, ..Self::incremental(state, rooms, now_ms) }
    }

    /// A pass that compares each class only with the nodes that have changed since it was blocked. The decisions for
    /// one model must not depend on the jobs of another.
    pub fn incremental(state: &'a PlannerState, rooms: Rooms, now_ms: i64) -> Self {
        Self {
            state,
            now_ms,
            rooms,
            occupancies: BTreeMap::new(),
            planned: BTreeMap::new(),
            closed: BTreeSet::new(),
            reservations: BTreeMap::new(),
            loads: None,
            is_incremental: true,
            effects: Vec::new(),
            blocked: Vec::new(),
            unsettled: BTreeSet::new(),
            needs_load: false,
        }
    }

    /// Compares the waiting jobs of the models with the nodes.
    pub fn run(mut self, models: impl Iterator<Item = &'a ModelId>, max_effects: usize) -> PassResult {
        let mut heads: BTreeMap<OrderKey, (&'a ModelId, &'a RequestClass, &'a ClassQueue)> = BTreeMap::new();
        let mut compared = BTreeSet::new();
        for model in models {
            compared.insert(model);
            let classes = self.state.queue.classes(model);
            heads.extend(classes.filter_map(|(class, queue)| Some((queue.first()?, (model, class, queue)))));
        }
        let mut is_cut = false;
        while let Some((key, (model, class, queue))) = heads.pop_first() {
            if is_cut || self.effects.len() >= max_effects {
                is_cut = true;
                self.unsettled.insert(model.clone());
                compared.remove(model);
                continue;
            }
            let Some(job) = self.state.jobs.get(&key.job()) else { continue };
            match self.place(job, queue.blocked) {
                Outcome::Effect(effect) => {
                    self.effects.push(effect);
                    self.unsettled.insert(model.clone());
                    heads.extend(queue.next_after(key).map(|next| (next, (model, class, queue))));
                }
                Outcome::Blocked => {
                    if queue.first() == Some(key) {
                        let blocked = Blocked { head: job.id, version: self.rooms.version() };
                        self.blocked.push((model.clone(), class.clone(), blocked));
                    }
                    // A job that can never start does not stop the others of its class.
                    let next = queue.next_after(key).filter(|_| self.rooms.count(model) > 0);
                    heads.extend(next.filter(|_| !self.can_ever_start(job)).map(|next| (next, (model, class, queue))));
                }
            }
            if self.needs_load && self.loads.is_none() {
                // The caller starts a full pass instead.
                break;
            }
        }
        self.finish(&compared, is_cut)
    }

    fn finish(mut self, compared: &BTreeSet<&ModelId>, is_cut: bool) -> PassResult {
        let loads = self.loads.take().into_iter().flatten();
        let loads = loads.flat_map(|(node, loads)| loads.planned.into_iter().map(move |load| (node, load)));
        for (node, load) in loads.filter(|(n, load)| !self.state.load_requested_recently(n, load.model, self.now_ms)) {
            let Some(boot) = self.state.nodes.get(node).map(|node| node.boot) else { continue };
            let (node, model) = (node.clone(), load.model.clone());
            self.effects.push(Effect::Load { job: load.job, node, boot, model, reason: load.reason });
        }
        let reservation = |model: &ModelId| self.reservations.get(model).map(|reserved| reserved.reservation.clone());
        PassResult {
            // Each placement changes the occupancy of its node.
            changed_nodes: self.occupancies.keys().chain(&self.closed).cloned().collect(),
            effects: self.effects,
            blocked: self.blocked,
            reservations: compared.iter().map(|model| ((*model).clone(), reservation(model))).collect(),
            unsettled: self.unsettled,
            rooms: self.rooms,
            needs_load: self.needs_load,
            is_cut,
        }
    }

    /// Decides about the first job of a class; `before` is what the last pass found for the class.
    fn place(&mut self, job: &'a Job, before: Option<Blocked>) -> Outcome {
        let is_unchanged =
            |blocked: &Blocked| blocked.head == job.id && blocked.version >= self.rooms.structure(&job.model);
        let since = before.filter(|blocked| self.is_incremental && is_unchanged(blocked)).map(|b| b.version);
        if !job.refused_by.is_empty() && Candidates::of(self.state, job, self.now_ms).all_refused {
            let reason = format!("no node can run it: {}", join_by_node(&job.refused_by));
            let failure = JobFailure::Rejected { reason };
            return Outcome::Effect(Effect::Fail { job: job.id, attempt: job.attempt, failure });
        }
        if let Some((Choice { cost, room }, next)) = self.two_cheapest(job, since) {
            let (node, capacity) = (room.node.clone(), room.capacity);
            let end_ms = expected_end_ms(job, room.model(), self.now_ms);
            let next = next.map(|next| (&next.room.node.id, next.cost));
            let reason = placement_reason(&cost, &node, capacity, self.rooms.count(&job.model), next);
            self.admit(job, &node, Planned { end_ms, tokens: cost.reserved_tokens, prefill_ms: cost.prefill_ms });
            return Outcome::Effect(Effect::Place {
                job: job.id,
                attempt: job.attempt + 1,
                node: node.id.clone(),
                boot: node.boot,
                reason,
            });
        }
        if job.may_be_poison() {
            self.reserve_whole_node(job);
        } else {
            self.reserve(job);
        }
        if since.is_none() {
            self.request_load(job);
        }
        Outcome::Blocked
    }

    /// Returns the cheapest node with enough room (the first on ties) among those that have changed since the version,
    /// and the next one.
    fn two_cheapest(&self, job: &Job, since: Option<u64>) -> Option<(Choice<'_>, Option<Choice<'_>>)> {
        let reserved = self.reservations.get(&job.model);
        let (mut best, mut next): (Option<Choice<'_>>, Option<Choice<'_>>) = (None, None);
        for room in self.rooms.changed_since(&job.model, since) {
            let (node, model) = (&*room.node, room.model());
            if job.refused_by.contains_key(&node.id)
                || room.held_jobs > 0 && job.may_be_poison()
                || !accepts(self.state, job, node, self.now_ms)
            {
                continue;
            }
            let uncached = placement_cost(job, model, room.capacity.concurrent, 0);
            let Some(reserved_tokens) = room.capacity.reservation_for(&uncached) else { continue };
            let precedes = |cost: &PlacementCost, other: &Option<Choice<'_>>| {
                let other = other.as_ref().map(|other| (other.cost.total_ms(), &other.room.node.id));
                other.is_none_or(|other| (cost.total_ms(), &node.id) < other)
            };
            let all_cached = placement_cost(job, model, room.capacity.concurrent, job.prefix.len() as u64);
            if !precedes(&all_cached, &next) {
                continue;
            }
            let cost = self.cost(job, room);
            let end_ms = self.now_ms.saturating_add(slowest_end_ms(&cost, room.capacity.concurrent) as i64);
            if reserved.is_some_and(|r| r.reservation.node == node.id && end_ms > r.until_ms) {
                continue;
            }
            let choice = Choice { cost: PlacementCost { reserved_tokens, ..cost }, room };
            if precedes(&cost, &best) {
                next = best.replace(choice);
            } else if precedes(&cost, &next) {
                next = Some(choice);
            }
        }
        best.map(|best| (best, next))
    }

    /// Cost of the job on a node with room.
    fn cost(&self, job: &Job, room: &Room) -> PlacementCost {
        let node = &*room.node;
        let planned = self.planned.get(&(node.id.clone(), job.model.clone())).into_iter().flatten();
        let cost = node_cost(self.state, job, node, room.model(), room.capacity.concurrent, self.now_ms);
        PlacementCost { wait_ms: cost.wait_ms + planned.map(|planned| planned.prefill_ms).sum::<f64>(), ..cost }
    }

    /// Records that the job is placed on the node.
    fn admit(&mut self, job: &Job, node: &Node, planned: Planned) {
        self.rooms.admit(&node.id, &job.model, planned.tokens);
        self.rooms.add_held_job(node);
        let mut occupancy = self.occupancy(&node.id);
        occupancy.add(job);
        self.set_occupancy(&node.id, occupancy);
        self.planned.entry((node.id.clone(), job.model.clone())).or_default().push(planned);
        if let Some(loads) = self.loads.as_mut().and_then(|loads| loads.get_mut(&node.id)) {
            loads.eviction_blocked = true;
        }
        // The node that was reserved for the job is free for the jobs behind it.
        if let Some(released) = self.state.reservations.get(&job.model).filter(|r| r.job == job.id) {
            self.rooms.touch(&released.node, &job.model);
        }
    }

    fn occupancy(&self, node: &NodeId) -> NodeOccupancy {
        self.occupancies.get(node).copied().unwrap_or_else(|| self.state.occupancy(node))
    }

    fn set_occupancy(&mut self, node: &NodeId, occupancy: NodeOccupancy) {
        self.occupancies.insert(node.clone(), occupancy);
        if occupancy.exclusive
            && let Some(row) = self.state.nodes.get(node)
        {
            row.ledger.models.iter().for_each(|model| drop(self.rooms.remove(node, &model.model)));
        }
    }
}
