//! The incremental planner: decides which effects come next, and looks only at what has changed since the last step.
//!
//! Only the models are compared whose queue has changed, or for which a node has got room; and each request class only
//! with the nodes that have changed since its first job did not fit. If decisions for one model may depend on the jobs
//! of another (see [`Changes::is_coupled`]), all request classes are compared in each step. A property test compares
//! the steps with the full plan.

use std::collections::BTreeSet;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::model::ModelId;

use crate::acceptance::{acceptance_due_ms, overdue_acceptance};
use crate::candidates::Candidates;
use crate::changes::Changes;
use crate::effect::Effect;
use crate::job::JobPhase;
use crate::pass::{Pass, PassResult};
use crate::pending::{is_plainly_waiting, next_check_ms, pending_effect};
use crate::state::PlannerState;
use crate::timers::Timer;

/// Maximum number of jobs in one step whose pending reasons are checked.
const MAX_CHECKS: usize = 64;

/// The effects to carry out next.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The effects, in the order of [`plan()`](crate::plan()).
    pub effects: Vec<Effect>,
    /// Whether another step is needed at once, because this one reached a limit.
    pub is_cut: bool,
}

/// Returns the next effects, at most `max_effects` of each kind (acceptances, placements, records). They are the same as
/// those of [`plan()`](crate::plan()). The caller feeds back the rows that result; an effect that changes nothing is
/// proposed again in the next step.
pub fn plan_step(state: &mut PlannerState, now_ms: i64, max_effects: usize) -> Step {
    state.look_at_due(now_ms);
    let mut effects = overdue_acceptances(state, now_ms, max_effects);
    let mut is_cut = effects.len() >= max_effects;
    let pass = run_pass(state, now_ms, max_effects);
    let decided =
        pass.effects.iter().filter(|effect| !matches!(effect, Effect::Load { .. })).map(Effect::job).collect();
    is_cut |= pass.is_cut;
    effects.extend(take_over(state, pass));
    if !is_cut {
        let (records, is_more) = pending_effects(state, now_ms, max_effects, &decided);
        effects.extend(records);
        is_cut = is_more;
    }
    // The sort is stable: jobs keep their order.
    effects.sort_by_key(Effect::is_record);
    Step { effects, is_cut }
}

fn overdue_acceptances(state: &mut PlannerState, now_ms: i64, max_effects: usize) -> Vec<Effect> {
    let mut effects = Vec::new();
    for id in std::mem::take(&mut state.changes.placed) {
        let Some(job) = state.jobs.get(&id) else { continue };
        let effect = if effects.len() < max_effects { overdue_acceptance(state, job, now_ms) } else { None };
        if effect.is_some() || effects.len() >= max_effects {
            state.changes.placed.insert(id);
        } else {
            let due_ms = acceptance_due_ms(state, job);
            state.changes.timers.set(Timer::Job(id), due_ms);
        }
        effects.extend(effect);
    }
    effects
}

/// Compares the queued jobs of the models that have changed, or of all models, with the nodes.
fn run_pass(state: &mut PlannerState, now_ms: i64, max_effects: usize) -> PassResult {
    let models = std::mem::take(&mut state.changes.models);
    if !state.changes.is_coupled && !state.queue.has_isolated() {
        let rooms = std::mem::take(&mut state.rooms);
        let pass = Pass::incremental(state, rooms, now_ms).run(models.iter(), max_effects);
        if !pass.needs_load {
            return pass;
        }
        state.rooms = pass.rooms;
        pass.changed_nodes.iter().for_each(|node| state.refresh_rooms(node));
    }
    let rooms = std::mem::take(&mut state.rooms);
    let pass = Pass::full(state, rooms, now_ms).run(state.queue.models(), max_effects);
    state.changes.is_coupled = pass.needs_load || state.queue.has_isolated();
    pass
}

/// Stores what the pass found and returns its effects.
fn take_over(state: &mut PlannerState, pass: PassResult) -> Vec<Effect> {
    state.rooms = pass.rooms;
    for (model, class, blocked) in pass.blocked {
        state.queue.set_blocked(&model, &class, (!state.changes.is_coupled).then_some(blocked));
    }
    for (model, reservation) in pass.reservations {
        let before = match &reservation {
            Some(reservation) => state.reservations.insert(model, reservation.clone()),
            None => state.reservations.remove(&model),
        };
        if before != reservation {
            state.changes.queued.extend([before, reservation].into_iter().flatten().map(|reservation| reservation.job));
        }
    }
    pass.changed_nodes.iter().for_each(|node| state.refresh_rooms(node));
    state.changes.models.extend(pass.unsettled);
    pass.effects
}

/// Effects of queued jobs that are not placed, and whether some are left to be checked.
fn pending_effects(
    state: &mut PlannerState,
    now_ms: i64,
    max_effects: usize,
    decided: &BTreeSet<JobId>,
) -> (Vec<Effect>, bool) {
    let mut checks = Checks { effects: Vec::new(), left: MAX_CHECKS, max_effects, now_ms };
    for job in std::mem::take(&mut state.changes.queued) {
        if decided.contains(&job) || checks.is_full() || checks.check(state, job) {
            state.changes.queued.insert(job);
        }
    }
    while !checks.is_full()
        && let Some((model, cursor)) = state.changes.stale.pop_first()
    {
        let next = state.queue.jobs_after(&model, cursor.as_ref()).take(checks.left);
        let next: Vec<_> = next.map(|(class, key)| (class.clone(), key)).collect();
        for (class, key) in next {
            if checks.is_full() {
                break;
            }
            let job = key.job();
            let is_known = state.changes.queued.contains(&job);
            if !is_known && (decided.contains(&job) || checks.check(state, job)) {
                state.changes.queued.insert(job);
            }
            state.changes.stale.insert(model.clone(), Some((class, key)));
        }
    }
    let is_cut = checks.is_full();
    (checks.effects, is_cut)
}

/// Checks of pending reasons in one step.
struct Checks {
    effects: Vec<Effect>,
    left: usize,
    max_effects: usize,
    now_ms: i64,
}

impl Checks {
    fn is_full(&self) -> bool {
        self.left == 0 || self.effects.len() >= self.max_effects
    }

    /// Checks a job. Returns whether there is an effect; the job is then checked again in the next step.
    fn check(&mut self, state: &mut PlannerState, id: JobId) -> bool {
        let Some(job) = state.jobs.get(&id).filter(|job| matches!(job.phase, JobPhase::Queued)) else { return false };
        self.left -= 1;
        let reservation = state.reservations.get(&job.model);
        if is_plainly_waiting(state, job, reservation, self.now_ms) {
            return false;
        }
        let candidates = Candidates::of(state, job, self.now_ms);
        let effect = pending_effect(state, job, &candidates, reservation, self.now_ms);
        let due_ms = next_check_ms(state, job, reservation, self.now_ms);
        state.changes.timers.set(Timer::Job(id), due_ms);
        let has_effect = effect.is_some();
        self.effects.extend(effect);
        has_effect
    }
}

impl PlannerState {
    /// Looks at everything in the next step, whatever has changed.
    pub fn look_at_all(&mut self) {
        self.changes.all = true;
    }

    /// Records what the time alone has changed.
    fn look_at_due(&mut self, now_ms: i64) {
        if self.changes.all || now_ms < self.changes.last_ms {
            // Times that were computed with a clock that was set back since are wrong.
            self.changes = Changes {
                models: self.queue.models().cloned().collect(),
                nodes: self.nodes.keys().cloned().collect(),
                placed: self.held.values().flatten().copied().collect(),
                stale: self.queue.models().map(|model| (model.clone(), None)).collect(),
                all: false,
                ..Changes::default()
            };
            self.queue.forget_blocked();
        }
        self.changes.last_ms = now_ms;
        while let Some(timer) = self.changes.timers.pop_due(now_ms) {
            match timer {
                Timer::Job(job) => self.look_at_job(job),
                Timer::Node(node) => {
                    self.on_structure_changed(&node);
                    self.changes.nodes.insert(node);
                }
            }
        }
        for node in std::mem::take(&mut self.changes.nodes) {
            self.look_at_node(&node, now_ms);
        }
    }

    fn look_at_job(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        match job.phase {
            JobPhase::Queued => {
                // Its backoff may have ended.
                self.queue.insert(job);
                self.changes.models.insert(job.model.clone());
                self.changes.queued.insert(id);
            }
            JobPhase::Placed { .. } => drop(self.changes.placed.insert(id)),
            JobPhase::Running { .. } => {}
        }
    }

    /// Finds out whether the node is live, and when this changes without an event.
    fn look_at_node(&mut self, id: &NodeId, now_ms: i64) {
        let ttl_ms = self.timing.lease_ttl_ms;
        let node = self.nodes.get(id).cloned();
        let is_live = node.as_ref().is_some_and(|node| node.alive(now_ms, ttl_ms));
        let was_any_live = !self.changes.live.is_empty();
        let is_changed = if is_live { self.changes.live.insert(id.clone()) } else { self.changes.live.remove(id) };
        if is_changed {
            self.on_structure_changed(id);
            self.check_placements_on(id);
        }
        if was_any_live == self.changes.live.is_empty() {
            let models: Vec<ModelId> = self.queue.models().cloned().collect();
            self.changes.stale.extend(models.into_iter().map(|model| (model, None)));
        }
        let due_ms = node.and_then(|node| {
            let unresponsive = self.unresponsive.get(id).map(|(_, exclusion)| exclusion);
            let exclusions = node.exclusions.values().chain(unresponsive).map(|exclusion| exclusion.at_ms);
            let around = |at_ms: i64, ms: u64| [at_ms.saturating_sub_unsigned(ms), at_ms.saturating_add_unsigned(ms)];
            let times = exclusions.flat_map(|at_ms| around(at_ms, self.max_exclusion_ms()));
            // The bounds of these times belong to them.
            let times = times.chain(around(node.seen_ms, ttl_ms)).flat_map(|at_ms| [at_ms, at_ms.saturating_add(1)]);
            times.filter(|at_ms| *at_ms > now_ms).min()
        });
        self.changes.timers.set(Timer::Node(id.clone()), due_ms);
    }
}
