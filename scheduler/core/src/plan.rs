//! The planner: decides which effects come next. Intended properties, checked by the property tests in `tests`:
//!
//! - a node never gets more than its last ledger admits, in tokens and in sequences;
//! - a plan that was carried out leaves nothing to do: planning twice changes nothing;
//! - a job passes a higher-ranked one with the same model only where that one does not fit; the first job that fits
//!   nowhere reserves a node, which a later job uses only if it ends before the reserving job can start, so no job
//!   starves;
//! - a node loads the model of the highest-ranked job that needs a load there, and no other model is evicted for it
//!   while a job of higher rank waits on the node: two models on a node with memory for one take turns, and neither is
//!   evicted before it has served a call;
//! - a job that may be poison (it may have stopped more than one node) runs alone on its node, and while it waits, one
//!   node is reserved for it.

use std::collections::BTreeMap;

use cfq_proto::ids::JobId;

use crate::acceptance::overdue_acceptance;
use crate::candidates::Candidates;
use crate::effect::Effect;
use crate::pass::Pass;
use crate::pending::pending_effect;
use crate::request_class::RequestClass;
use crate::rooms::Rooms;
use crate::state::PlannerState;

/// Returns the effects to carry out next, in order: first those that jobs and nodes wait for, then those that only
/// record why jobs wait. So a caller that stops early, because there are many, delays no placement. A pure function: the
/// same state and time give the same effects.
///
/// It looks at everything, whatever has changed; [`plan_step()`](crate::plan_step()) gives the same effects and looks
/// only at what has changed.
pub fn plan(state: &PlannerState, now_ms: i64) -> Vec<Effect> {
    let overdue = state.jobs.values().filter_map(|job| overdue_acceptance(state, job, now_ms));
    let mut rooms = Rooms::default();
    for node in state.nodes.values() {
        for (model, room) in state.rooms_of(node) {
            rooms.set(&node.id, model, room);
        }
    }
    let pass = Pass::full(state, rooms, now_ms).run(state.queue.models(), usize::MAX);
    let decided: BTreeMap<JobId, &Effect> =
        pass.effects.iter().filter(|effect| !matches!(effect, Effect::Load { .. })).map(|e| (e.job(), e)).collect();
    let mut records = Vec::new();
    for model in state.queue.models() {
        let reservation = pass.reservations.get(model).and_then(Option::as_ref);
        let mut of_class: Option<(&RequestClass, Candidates<'_>)> = None;
        for (class, key) in state.queue.jobs_after(model, None) {
            let Some(job) = state.jobs.get(&key.job()).filter(|job| !decided.contains_key(&job.id)) else { continue };
            let (_, candidates) = match of_class.take_if(|(of, _)| *of == class) {
                Some(known) => of_class.insert(known),
                None => of_class.insert((class, Candidates::of(state, job, now_ms))),
            };
            records.extend(pending_effect(state, job, candidates, reservation, now_ms));
        }
    }
    let mut effects: Vec<Effect> = overdue.chain(pass.effects).chain(records).collect();
    // The sort is stable: jobs keep their order.
    effects.sort_by_key(Effect::is_record);
    effects
}
