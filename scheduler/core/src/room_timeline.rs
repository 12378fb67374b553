//! The free capacity of a model on a node over time, as the jobs there end.

use cfq_proto::node::ModelState;

use crate::candidates::Candidate;
use crate::capacity::ModelCapacity;
use crate::cost::{PlacementCost, placement_cost};
use crate::job::{Job, JobPhase};
use crate::state::PlannerState;

/// When a job can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StartEstimate {
    pub at_ms: i64,
    /// False if the node also runs sequences that are not in the cache, so that their ends are unknown. The job can
    /// then start later than estimated.
    pub is_certain: bool,
}

/// A placement that is planned but not carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub end_ms: i64,
    pub tokens: u64,
    /// Time to compute its prompt, in ms.
    pub prefill_ms: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct RoomTimeline {
    capacity: ModelCapacity,
    /// When each job on the model ends, and the tokens that it frees then; in the order of the ends.
    ends: Vec<(i64, u64)>,
    /// Time of `capacity`.
    at_ms: i64,
    max_sequences: u32,
}

impl RoomTimeline {
    /// The timeline from now on. `planned` are the placements that are planned for the model.
    pub fn of(state: &PlannerState, (node, model): Candidate<'_>, now_ms: i64, planned: &[Planned]) -> Self {
        let mut capacity = state.capacity(node, model);
        let held = state.held_jobs(&node.id);
        let held = held.filter(|held| held.holder() == Some((&node.id, node.boot)) && held.model == model.model);
        let tokens = state.held_tokens(node, model);
        let mut ends: Vec<(i64, u64)> = held
            .map(|held| (expected_end_ms(held, model, now_ms).max(now_ms), tokens(held)))
            .chain(planned.iter().map(|planned| (planned.end_ms, planned.tokens)))
            .collect();
        ends.sort_unstable();
        for planned in planned {
            capacity = capacity.after_admitting(planned.tokens);
        }
        Self { capacity, ends, at_ms: now_ms, max_sequences: model.max_sequences }
    }

    /// The timeline of a model that is loaded at `loaded_ms`, with as much room as a job may need.
    pub fn after_load(loaded_ms: i64, max_sequences: u32) -> Self {
        let max_sequences = max_sequences.max(1);
        let capacity = ModelCapacity { tokens: u64::MAX, slots: max_sequences, concurrent: 0 };
        Self { capacity, ends: Vec::new(), at_ms: loaded_ms, max_sequences }
    }

    /// When a job of this cost has room. `None` if it does not even after all others have ended.
    pub fn start(&self, cost: &PlacementCost) -> Option<StartEstimate> {
        let (capacity, at_ms, _) = self.advance(cost);
        let is_certain = capacity.reservation_for(cost).is_some();
        (is_certain || capacity.concurrent > 0).then_some(StartEstimate { at_ms, is_certain })
    }

    /// Adds a job of this cost, which runs for `duration_ms` once it has room. Jobs that are added later start no earlier.
    pub fn add(&mut self, cost: &PlacementCost, duration_ms: i64) {
        let (capacity, at_ms, ended) = self.advance(cost);
        let tokens = capacity.reservation_for(cost).unwrap_or(cost.reserved_tokens);
        self.ends.drain(..ended);
        (self.capacity, self.at_ms) = (capacity.after_admitting(tokens), at_ms);
        let end = (at_ms.saturating_add(duration_ms), tokens);
        self.ends.insert(self.ends.partition_point(|before| *before <= end), end);
    }

    /// The capacity at the time when a job of this cost has room, or when all others have ended; that time; and the
    /// number of jobs that have ended by then.
    fn advance(&self, cost: &PlacementCost) -> (ModelCapacity, i64, usize) {
        let (mut capacity, mut at_ms, mut ended) = (self.capacity, self.at_ms, 0);
        for (end_ms, tokens) in &self.ends {
            if capacity.reservation_for(cost).is_some() {
                break;
            }
            at_ms = (*end_ms).max(at_ms);
            ended += 1;
            capacity = ModelCapacity {
                tokens: capacity.tokens.saturating_add(*tokens),
                slots: (capacity.slots + 1).min(self.max_sequences),
                concurrent: capacity.concurrent.saturating_sub(1),
            };
        }
        (capacity, at_ms, ended)
    }
}

/// Time at which the job has generated the maximum number of tokens if it runs alone on the model and nothing of its
/// prompt was cached; a queued job would begin now. With more sequences it ends later, so that a job that reserves its
/// room does not count on it too late.
pub(crate) fn expected_end_ms(job: &Job, model: &ModelState, now_ms: i64) -> i64 {
    let began_ms = match &job.phase {
        JobPhase::Queued => now_ms,
        JobPhase::Placed { placed_ms, .. } => *placed_ms,
        JobPhase::Running { accepted_ms, .. } => *accepted_ms,
    };
    began_ms.saturating_add(placement_cost(job, model, 0, 0).total_ms() as i64)
}
