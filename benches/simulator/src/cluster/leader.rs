//! The leader: feeds the planner's cache and carries out its effects. No other file uses the planner's interface.

use std::collections::HashMap;

use cfq_proto::ids::NodeId;
use cfq_scheduler_core::{
    Effect, Job, PlannerState, PlannerTiming, Step, UnplaceReason, UnreportedEnd, plan, plan_step,
};

use super::checks::Violations;
use super::config::Timing;
use super::messages::{Fence, ToNode};
use super::tables::{Tables, job_id, job_index, lease_number};

/// What a plan sends: a message to the node with this index.
pub type Outgoing = Vec<(usize, ToNode)>;

/// A scheduler that leads, or led until it was replaced.
#[derive(Debug)]
pub struct Leader {
    term: u64,
    state: PlannerState,
    versions: HashMap<usize, u64>,
    looked_at_all_ms: i64,
    /// Whether a database outage or an election was a moment ago, so that the ends of placements say nothing.
    pub is_grace: bool,
    /// Error of the leader's reading of the database's clock, in ms.
    pub clock_error_ms: i64,
}

/// Maximum number of effects of each kind in one step, as in the scheduler.
const MAX_EFFECTS_PER_STEP: usize = 256;
/// Time after which the planner looks at all jobs and nodes, as in the scheduler.
const LOOK_AT_ALL_INTERVAL_MS: i64 = 60_000;

impl Leader {
    /// A leader whose cache is built from the rows.
    pub fn new(term: u64, timing: &Timing, tables: &Tables) -> Self {
        let state = PlannerState::new(PlannerTiming {
            lease_ttl_ms: timing.lease_ttl_ms,
            accept_timeout_ms: timing.accept_timeout_ms,
            // Simulated nodes prepare prompts at once.
            prepare_timeout_ms: 0,
            retry_ceiling_ms: timing.retry_ceiling_ms,
        });
        let mut leader = Self {
            term,
            state,
            versions: HashMap::new(),
            looked_at_all_ms: tables.now_ms,
            is_grace: true,
            clock_error_ms: 0,
        };
        leader.resync(tables);
        leader
    }

    /// Reads one job's row.
    pub fn read_job(&mut self, tables: &Tables, job: usize) {
        match tables.jobs.get(&job) {
            Some(row) => {
                self.versions.insert(job, row.version);
                self.state.on_job_row(row.job.clone(), row.changed_ms);
            }
            None => {
                self.versions.remove(&job);
                let ended_ms = tables.ended.get(&job).map_or(0, |ended| ended.ended_ms);
                self.state.on_job_ended(job_id(job), ended_ms);
            }
        }
    }

    /// Reads one node's row.
    pub fn read_node(&mut self, tables: &Tables, node: usize) {
        if let Some(row) = &tables.nodes[node] {
            self.state.on_node_row(row.clone());
        }
    }

    /// Reads all rows that changed since they were last read.
    pub fn resync(&mut self, tables: &Tables) {
        let mut stale: Vec<usize> = tables
            .jobs
            .iter()
            .filter(|(job, row)| self.versions.get(job) != Some(&row.version))
            .map(|(job, _)| *job)
            .chain(self.versions.keys().copied().filter(|job| !tables.jobs.contains_key(job)))
            .collect();
        stale.sort_unstable();
        for job in stale {
            self.read_job(tables, job);
        }
        (0..tables.nodes.len()).for_each(|node| self.read_node(tables, node));
    }

    /// The effects to carry out next. If `compares`, a plan that looks at everything must decide the same.
    pub fn plan(&mut self, true_ms: i64, compares: bool, violations: &mut Violations) -> Step {
        if true_ms - self.looked_at_all_ms > LOOK_AT_ALL_INTERVAL_MS {
            self.state.look_at_all();
            self.looked_at_all_ms = true_ms;
        }
        let now_ms = true_ms + self.clock_error_ms;
        let full = compares.then(|| plan(&self.state, now_ms));
        let step = plan_step(&mut self.state, now_ms, MAX_EFFECTS_PER_STEP);
        if let Some(full) = full.filter(|_| !step.is_cut) {
            let (full, step) = (sorted(&full), sorted(&step.effects));
            violations.check(full == step, || {
                let only = |these: &[String], others: &[String]| -> Vec<String> {
                    these.iter().filter(|effect| !others.contains(effect)).cloned().collect()
                };
                let (full_only, step_only) = (only(&full, &step), only(&step, &full));
                format!("at {true_ms} ms, only the full plan has {full_only:#?}; only the step has {step_only:#?}")
            });
        }
        step
    }

    /// Carries out an effect. Returns whether it changed a row.
    pub fn apply(
        &mut self,
        effect: &Effect,
        tables: &mut Tables,
        now_ms: i64,
        out: &mut Outgoing,
        violations: &mut Violations,
    ) -> bool {
        let job = job_index(effect.job());
        match effect {
            Effect::Place { attempt, node, boot, .. } => {
                let index = tables.node_index(node);
                let placed = tables.place(self.term, job, *attempt, index, *boot, now_ms);
                self.read_job(tables, job);
                out.extend(placed.map(|fence| (index, ToNode::Order(fence))));
                placed.is_some()
            }
            Effect::Resend { attempt, lease, node, .. } => {
                self.state.on_resent(job_id(job), *lease, now_ms);
                let fence = Fence { job, attempt: *attempt, lease: lease_number(*lease) };
                if tables.is_placed(fence) {
                    out.push((tables.node_index(node), ToNode::Order(fence)));
                }
                false
            }
            Effect::Unplace { attempt, lease, node, reason, .. } => {
                let fence = Fence { job, attempt: *attempt, lease: lease_number(*lease) };
                let end = match reason {
                    _ if self.is_grace => UnreportedEnd::Infrastructure,
                    UnplaceReason::NodeLost => UnreportedEnd::NodeLost,
                    UnplaceReason::NodeUnresponsive => UnreportedEnd::NotAccepted,
                };
                let changed = tables.unplace(self.term, fence, end, now_ms, violations);
                self.read_job(tables, job);
                match reason {
                    UnplaceReason::NodeUnresponsive => self.state.on_node_unresponsive(node, now_ms),
                    UnplaceReason::NodeLost => {}
                }
                changed
            }
            Effect::Fail { attempt, .. } => {
                let changed = tables.fail(self.term, job, *attempt, violations);
                self.read_job(tables, job);
                changed
            }
            Effect::NoteUnavailable { attempt, .. } => {
                let start = |row: &mut Job| row.first_failure_ms = row.first_failure_ms.or(Some(now_ms));
                let changed = tables.record_wait(self.term, job, *attempt, now_ms, start);
                self.read_job(tables, job);
                changed
            }
            Effect::Load { node, boot, model, .. } => {
                out.push((tables.node_index(node), ToNode::Load { model: tables.model_index(model) }));
                self.state.on_load_requested(node.clone(), *boot, model.clone(), now_ms);
                false
            }
            Effect::Explain { attempt, pending, no_node_ms, .. } => {
                let changed = tables.record_wait(self.term, job, *attempt, now_ms, |row| {
                    row.no_node_ms = *no_node_ms;
                    if pending.is_served() && row.is_unavailable_everywhere() {
                        row.first_failure_ms = None;
                    }
                });
                self.read_job(tables, job);
                if changed {
                    self.state.on_pending_explained(job_id(job), pending.clone(), now_ms);
                }
                changed
            }
        }
    }
}

/// Descriptions of the effects, in an order that does not depend on the order in which the jobs were looked at.
fn sorted(effects: &[Effect]) -> Vec<String> {
    let mut texts: Vec<String> = effects.iter().map(|effect| format!("{effect:?}")).collect();
    texts.sort();
    texts
}

/// Whether carrying out the effect again would change a row if no fence were compared.
pub fn is_fenced(effect: &Effect) -> bool {
    match effect {
        Effect::Place { .. } | Effect::Unplace { .. } | Effect::Fail { .. } => true,
        // These two write the same values again while the job is queued; the others write no row.
        Effect::NoteUnavailable { .. } | Effect::Explain { .. } | Effect::Resend { .. } | Effect::Load { .. } => false,
    }
}

/// The node and job of a placement.
pub fn placement(effect: &Effect) -> Option<(&NodeId, usize)> {
    match effect {
        Effect::Place { job, node, .. } => Some((node, job_index(*job))),
        Effect::Resend { .. }
        | Effect::Unplace { .. }
        | Effect::Fail { .. }
        | Effect::NoteUnavailable { .. }
        | Effect::Load { .. }
        | Effect::Explain { .. } => None,
    }
}
