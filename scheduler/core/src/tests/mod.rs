//! Builders of rows and states, and the planner's tests by topic.

mod acceptance;
mod explain;
mod incremental;
mod occupancy;
mod placement;
mod properties;
mod reservation;
mod retry_ceiling;
mod yielding;

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::{JobFailure, JobRole};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use cfq_proto::task::Priority;

use crate::{Effect, Job, JobPhase, Node, NodeFailures, PlannerState, PlannerTiming, UnplaceReason, join_by_node};

pub(crate) const TIMING: PlannerTiming = PlannerTiming {
    lease_ttl_ms: 6_000,
    accept_timeout_ms: 3_000,
    prepare_timeout_ms: 50_000,
    retry_ceiling_ms: 600_000,
};

/// Returns a new id on each call; the sequence is the same in every run.
pub(crate) fn new_id<T: std::str::FromStr<Err: std::fmt::Debug>>() -> T {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    format!("{:032x}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)).parse().unwrap()
}

pub(crate) fn model_id() -> ModelId {
    "path:/m.gguf".parse().unwrap()
}

pub(crate) fn job(priority: Priority, created_ms: i64) -> Job {
    Job {
        id: new_id(),
        task: new_id(),
        role: JobRole::Alpha,
        model: model_id(),
        priority,
        deadline_ms: None,
        created_ms,
        prompt_bytes: 1_000,
        prefix: vec![],
        max_tokens: 200,
        counted_tokens: None,
        refused_by: BTreeMap::new(),
        node_failures: NodeFailures::default(),
        first_failure_ms: None,
        no_node_ms: 0,
        has_fallback: false,
        losses: 0,
        unaccepted: 0,
        suspicions: 0,
        last_failure: None,
        attempt: 0,
        phase: JobPhase::Queued,
    }
}

pub(crate) fn model(kv_tokens_free: u64, max_sequences: u32) -> ModelState {
    ModelState {
        model: model_id(),
        residency: Residency::Resident,
        device: "cpu".into(),
        need_bytes: 1,
        context_tokens: 8192,
        kv_tokens_free,
        kv_tiers: KvTiers::default(),
        running: 0,
        max_sequences,
        prefill_rate: 100.0,
        decode_rate: 10.0,
        load_rate: 0.0,
        tokens_per_byte: 0.3,
    }
}

pub(crate) fn node(name: &str, models: Vec<ModelState>, seen_ms: i64) -> Node {
    let ledger = Ledger { version: 1, models, ..Ledger::default() };
    Node {
        id: NodeId::new(name).unwrap(),
        boot: new_id(),
        ledger,
        seen_ms,
        cordoned: false,
        exclusions: BTreeMap::new(),
    }
}

pub(crate) fn state(nodes: Vec<Node>, jobs: Vec<Job>) -> PlannerState {
    let mut state = PlannerState::new(TIMING);
    nodes.into_iter().for_each(|n| state.on_node_row(n));
    jobs.into_iter().for_each(|j| state.on_job_row(j, 0));
    state
}

/// Applies a plan to the state as if every write to Postgres were committed.
pub(crate) fn carry_out(state: &mut PlannerState, effects: &[Effect], now_ms: i64) {
    for effect in effects {
        match effect.clone() {
            Effect::Place { job, attempt, node, boot, .. } => {
                let mut row = state.jobs[&job].clone();
                row.attempt = attempt;
                row.phase = JobPhase::Placed { node, boot, lease: new_id(), placed_ms: now_ms, preparing_ms: None };
                state.on_job_row(row, now_ms);
            }
            Effect::Resend { job, lease, .. } => state.on_resent(job, lease, now_ms),
            Effect::Unplace { job, node, reason, .. } => {
                let mut row = state.jobs[&job].clone();
                row.phase = JobPhase::Queued;
                state.on_job_row(row, now_ms);
                match reason {
                    UnplaceReason::NodeUnresponsive => state.on_node_unresponsive(&node, now_ms),
                    UnplaceReason::NodeLost => {}
                }
            }
            Effect::Fail { job, .. } => state.on_job_ended(job, now_ms),
            Effect::Load { node, boot, model, .. } => state.on_load_requested(node, boot, model, now_ms),
            Effect::NoteUnavailable { job, reports, .. } => {
                let mut row = state.jobs[&job].clone();
                row.first_failure_ms = Some(now_ms);
                row.last_failure = Some(JobFailure::Unavailable { reason: join_by_node(&reports) });
                state.on_job_row(row, now_ms);
            }
            Effect::Explain { job, pending, no_node_ms, .. } => {
                let mut row = state.jobs[&job].clone();
                row.no_node_ms = no_node_ms;
                if pending.is_served() && row.is_unavailable_everywhere() {
                    row.first_failure_ms = None;
                }
                state.on_job_row(row, now_ms);
                state.on_pending_explained(job, pending, now_ms);
            }
        }
    }
}

/// The jobs that a plan places, each with its node.
pub(crate) fn placements(effects: &[Effect]) -> Vec<(JobId, NodeId)> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Place { job, node, .. } => Some((*job, node.clone())),
            _ => None,
        })
        .collect()
}
