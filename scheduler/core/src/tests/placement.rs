//! Tests of which queued job is placed on which node.

use cfq_proto::job::JobFailure;
use cfq_proto::node::Residency;
use cfq_proto::task::Priority;

use super::{carry_out, job, model, model_id, node, placements, state};
use crate::{BackoffPolicy, Effect, Exclusion, Job, JobPhase, plan};

#[test]
fn p0_is_placed_before_p3() {
    let (low, high) = (job(Priority::P3, 0), job(Priority::P0, 1_000));
    let s = state(vec![node("a", vec![model(4096, 1)], 1_000)], vec![low, high.clone()]);
    assert_eq!(placements(&plan(&s, 1_000)).iter().map(|(j, _)| *j).collect::<Vec<_>>(), vec![high.id]);
}

#[test]
fn capacity_is_reserved_for_a_large_higher_ranked_job() {
    let mut m = model(1_000, 4);
    m.running = 1;
    let large = Job { max_tokens: 3_000, ..job(Priority::P1, 0) };
    let small = Job { max_tokens: 10, ..job(Priority::P2, 0) };
    let s = state(vec![node("a", vec![m], 0)], vec![large, small]);
    assert_eq!(placements(&plan(&s, 0)), vec![]);
}

#[test]
fn capacity_is_corrected_in_both_directions_between_heartbeats() {
    let first = job(Priority::P2, 0);
    let second = job(Priority::P2, 1);
    let n = node("a", vec![model(4096, 1)], 1_000);
    let mut s = state(vec![n.clone()], vec![first.clone(), second.clone()]);
    let effects = plan(&s, 1_000);
    carry_out(&mut s, &effects, 1_000);
    // The job is accepted, but the ledger is older: the job's capacity is still subtracted.
    let running = Job {
        attempt: 1,
        phase: JobPhase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 1_100 },
        ..first.clone()
    };
    s.on_job_row(running, 1_100);
    assert_eq!(placements(&plan(&s, 1_200)), vec![]);
    // The ledger of a heartbeat after the acceptance counts the job. Its slot is not subtracted a second time, and no
    // slot is free.
    let mut counted = n.clone();
    (counted.seen_ms, counted.ledger.version, counted.ledger.models[0].running) = (2_000, 2, 1);
    s.on_node_row(counted.clone());
    assert_eq!(placements(&plan(&s, 2_100)), vec![]);
    // The job has ended: its slot is free although the ledger still counts the job.
    s.on_job_ended(first.id, 2_500);
    assert_eq!(placements(&plan(&s, 2_500)), vec![(second.id, n.id.clone())]);
    // The ledger of the next heartbeat no longer counts the job: its slot is not added a second time.
    (counted.seen_ms, counted.ledger.version, counted.ledger.models[0].running) = (4_000, 3, 0);
    s.on_node_row(counted);
    assert_eq!(placements(&plan(&s, 4_000)), vec![(second.id, n.id)]);
}

/// The node reports the end of a sequence when it happens; the result is written later.
#[test]
fn freed_slot_is_counted_once_if_the_ledger_shows_it_before_the_result_is_written() {
    let mut n = node("a", vec![model(2_000, 2)], 1_000);
    n.ledger.models[0].running = 1;
    let on_it = |accepted_ms| JobPhase::Running { node: n.id.clone(), boot: n.boot, accepted_ms };
    let ended = Job { attempt: 1, phase: on_it(500), ..job(Priority::P2, 0) };
    let still_runs = Job { attempt: 1, phase: on_it(500), ..job(Priority::P2, 0) };
    let waiting = [job(Priority::P2, 1), job(Priority::P2, 2)];
    let rows = vec![ended.clone(), still_runs, waiting[0].clone(), waiting[1].clone()];
    let mut s = state(vec![n.clone()], rows);
    s.on_job_ended(ended.id, 1_010);
    assert_eq!(placements(&plan(&s, 1_010)), vec![(waiting[0].id, n.id)]);
}

#[test]
fn node_that_answered_not_now_is_excluded_until_its_ledger_changes() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    n.exclusions.insert(model_id(), Exclusion { version: 3, at_ms: 0 });
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    assert_eq!(placements(&plan(&s, 100)), vec![]);
    n.ledger.version = 3;
    s.on_node_row(n.clone());
    assert_eq!(placements(&plan(&s, 100)), vec![]);
    n.ledger.version = 4;
    s.on_node_row(n.clone());
    assert_eq!(placements(&plan(&s, 100)), vec![(waiting.id, n.id)]);
}

#[test]
fn job_refused_by_every_node_fails_with_their_reasons() {
    let n = node("a", vec![model(4096, 1)], 0);
    let mut refused = job(Priority::P2, 0);
    refused.refused_by.insert(n.id.clone(), "a model of another architecture".into());
    let effects = plan(&state(vec![n], vec![refused]), 0);
    let [Effect::Fail { failure: JobFailure::Rejected { reason }, .. }] = effects.as_slice() else {
        panic!("{effects:?}")
    };
    assert!(reason.contains("a: a model of another architecture"), "{reason}");
}

#[test]
fn failed_job_moves_at_once_and_returns_only_after_the_backoff() {
    let (a, b) = (node("a", vec![model(4096, 1)], 0), node("b", vec![model(4096, 1)], 0));
    let mut failed = job(Priority::P2, 0);
    failed.first_failure_ms = Some(0);
    failed.node_failures.record(failed.id, a.id.clone(), 0, BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 });
    let only_a = state(vec![a.clone()], vec![failed.clone()]);
    assert_eq!(placements(&plan(&only_a, 1)), vec![]);
    assert_eq!(placements(&plan(&only_a, 1_000)), vec![(failed.id, a.id.clone())]);
    assert_eq!(placements(&plan(&state(vec![a, b.clone()], vec![failed.clone()]), 1)), vec![(failed.id, b.id)]);
}

#[test]
fn draining_and_loading_nodes_get_no_work() {
    let mut draining = node("a", vec![model(4096, 1)], 0);
    draining.ledger.draining = true;
    let mut loading = node("b", vec![model(4096, 1)], 0);
    loading.ledger.models[0].residency = Residency::Loading;
    assert_eq!(placements(&plan(&state(vec![draining, loading], vec![job(Priority::P0, 0)]), 0)), vec![]);
}
