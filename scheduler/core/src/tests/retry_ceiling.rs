//! Tests of when a job fails because it gets no answer or because no node has its model.

use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::Priority;

use super::{carry_out, job, model, model_id, node, placements, state};
use crate::{BackoffPolicy, Effect, Exclusion, Job, JobPhase, Node, PendingReason, PlannerState, plan, plan_step};

#[test]
fn unusable_endpoint_fails_the_job_at_the_ceiling_and_not_before() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    let mut s = state(vec![n.clone()], vec![job(Priority::P2, 0)]);
    let effects = plan(&s, 0);
    assert!(matches!(effects.as_slice(), [Effect::NoteUnavailable { .. }]), "{effects:?}");
    carry_out(&mut s, &effects, 0);
    for now in [1, 599_999] {
        n.seen_ms = now;
        s.on_node_row(n.clone());
        let effects = plan(&s, now);
        assert!(effects.iter().all(|e| matches!(e, Effect::Explain { .. })), "{effects:?}");
    }
    n.seen_ms = 600_000;
    s.on_node_row(n);
    let effects = plan(&s, 600_000);
    assert!(
        matches!(effects.as_slice(), [Effect::Fail { failure: JobFailure::Unavailable { .. }, .. }]),
        "{effects:?}"
    );
}

/// The machine is suspended for an hour; after that, the clock has jumped.
#[test]
fn suspension_of_the_machine_does_not_count_toward_the_ceiling() {
    let (before_ms, after_ms) = (60_000, 3_660_000);
    let unusable = Residency::Unusable { reason: "connection refused".into() };
    let unknown: ModelId = "path:/other.gguf".parse().unwrap();
    for (model_of_job, residency) in [(model_id(), unusable), (unknown, Residency::Resident)] {
        let mut n = node("a", vec![model(4096, 1)], 0);
        n.ledger.models[0].residency = residency;
        let mut s = state(vec![n.clone()], vec![Job { model: model_of_job, ..job(Priority::P2, 0) }]);
        let effects = plan(&s, 0);
        carry_out(&mut s, &effects, 0);
        n.seen_ms = before_ms;
        s.on_node_row(n.clone());
        let effects = plan(&s, before_ms);
        carry_out(&mut s, &effects, before_ms);
        n.seen_ms = after_ms;
        s.on_node_row(n);
        s.on_clock_jump(after_ms - before_ms, after_ms);
        let effects = plan(&s, after_ms);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Fail { .. })), "{effects:?}");
    }
}

#[test]
fn recovered_endpoint_restarts_the_ceiling() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let mut other = job(Priority::P0, 0);
    let waiting = job(Priority::P2, 0);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    assert_eq!(s.jobs[&waiting.id].first_failure_ms, Some(0));
    // The endpoint has recovered, but another job has its only slot.
    (n.seen_ms, n.ledger.version, n.ledger.models[0].residency) = (60_000, 2, Residency::Resident);
    s.on_node_row(n.clone());
    other.phase = JobPhase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 60_000 };
    s.on_job_row(other, 60_000);
    let effects = plan(&s, 60_000);
    carry_out(&mut s, &effects, 60_000);
    assert_eq!(s.jobs[&waiting.id].first_failure_ms, None);
    // A failure after the recovery starts a new count.
    (n.seen_ms, n.ledger.version) = (700_000, 3);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    s.on_node_row(n);
    let effects = plan(&s, 700_000);
    assert!(matches!(effects.as_slice(), [Effect::NoteUnavailable { .. }]), "{effects:?}");
}

#[test]
fn full_or_draining_node_does_not_count_as_failing() {
    let n = node("a", vec![model(4096, 1)], 700_000);
    let mut failed_once = job(Priority::P2, 0);
    failed_once.first_failure_ms = Some(0);
    let policy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };
    failed_once.node_failures.record(failed_once.id, n.id.clone(), 0, policy);
    let excluded = Node { exclusions: [(model_id(), Exclusion { version: 1, at_ms: 699_000 })].into(), ..n.clone() };
    let mut draining = n.clone();
    draining.ledger.draining = true;
    for busy in [excluded, draining] {
        let effects = plan(&state(vec![busy], vec![failed_once.clone()]), 700_000);
        assert!(!effects.iter().any(|e| matches!(e, Effect::Fail { .. })), "{effects:?}");
    }
    assert_eq!(placements(&plan(&state(vec![n], vec![failed_once]), 700_000)).len(), 1);
}

/// The job's attempts fail on one node, and the other node starts a load that never ends.
#[test]
fn load_that_takes_too_long_does_not_postpone_the_ceiling() {
    let mut failing = node("a", vec![model(4096, 1)], 0);
    let mut loading = node("b", vec![model(4096, 1)], 5_000);
    loading.ledger.models[0].residency = Residency::Loading;
    let mut failed_once = job(Priority::P2, 0);
    failed_once.first_failure_ms = Some(0);
    let policy = BackoffPolicy { base_ms: 900_000, cap_ms: 900_000 };
    failed_once.node_failures.record(failed_once.id, failing.id.clone(), 0, policy);
    let mut s = state(vec![failing.clone(), loading.clone()], vec![failed_once]);
    let mut fails_at = |now_ms| {
        (failing.seen_ms, loading.seen_ms) = (now_ms, now_ms);
        s.on_node_row(failing.clone());
        s.on_node_row(loading.clone());
        let effects = plan_step(&mut s, now_ms, usize::MAX).effects;
        carry_out(&mut s, &effects, now_ms);
        effects.iter().any(|effect| matches!(effect, Effect::Fail { .. }))
    };
    let times = [600_000, 604_999, 605_000];
    assert_eq!(times.map(&mut fails_at), [false, false, true]);
}

#[test]
fn unknown_model_fails_the_job_at_the_ceiling_but_not_without_nodes() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let other: ModelId = "path:/other.gguf".parse().unwrap();
    let mut s = state(vec![n.clone()], vec![Job { model: other, first_failure_ms: Some(0), ..job(Priority::P2, 0) }]);
    let explained = |effects: &[Effect]| {
        let [Effect::Explain { pending, .. }] = effects else { panic!("{effects:?}") };
        pending.clone()
    };
    // Time in which no node is up does not count, even if it exceeds the ceiling.
    let effects = plan(&s, 700_000);
    assert_eq!(explained(&effects), PendingReason::NoNodeUp);
    carry_out(&mut s, &effects, 700_000);
    assert_eq!(plan(&s, 9_000_000), vec![]);
    let began = 10_000_000;
    n.seen_ms = began;
    s.on_node_row(n.clone());
    let effects = plan(&s, began);
    assert!(matches!(explained(&effects), PendingReason::NoNodeHasModel { .. }));
    carry_out(&mut s, &effects, began);
    n.seen_ms = began + 600_000;
    s.on_node_row(n);
    assert!(plan(&s, began + 599_999).iter().all(|e| matches!(e, Effect::Explain { .. })));
    let effects = plan(&s, began + 600_000);
    let [Effect::Fail { failure: JobFailure::Unavailable { reason }, .. }] = effects.as_slice() else {
        panic!("{effects:?}")
    };
    assert!(reason.contains("model path:/other.gguf") && reason.contains("models served: path:/m.gguf"), "{reason}");
}

/// The leader is replaced every few minutes, and all nodes are down for an hour in between.
#[test]
fn new_leaders_and_downtime_neither_stop_nor_advance_the_count() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let mut row = Job { model: "path:/other.gguf".parse().unwrap(), ..job(Priority::P2, 0) };
    let (mut now, mut no_node_ms, mut leaders) = (0, 0, 0);
    let failed_after_ms = loop {
        leaders += 1;
        assert!(leaders < 10, "it waits forever");
        let mut s = state(vec![n.clone()], vec![row.clone()]);
        // The node counts as down until its next heartbeat; then this leader runs for three minutes.
        let effects = plan(&s, now);
        carry_out(&mut s, &effects, now);
        let until = now + 180_000;
        let failed = loop {
            n.seen_ms = now;
            s.on_node_row(n.clone());
            let effects = plan(&s, now);
            carry_out(&mut s, &effects, now);
            if !s.jobs.contains_key(&row.id) {
                break true;
            }
            if now >= until {
                break false;
            }
            (now, no_node_ms) = (now + 5_000, no_node_ms + 5_000);
        };
        if failed {
            break no_node_ms;
        }
        row = s.jobs[&row.id].clone();
        now += 3_600_000;
    };
    let expected = 600_000..=600_000 + 30_000 * leaders;
    assert!(expected.contains(&failed_after_ms), "{failed_after_ms} ms, {leaders} leaders");
}

/// The only job fails when it has waited for the lease time since 0 ms, and nothing ends its count before.
fn assert_fails_after_lease_time(mut s: PlannerState, mut node: Node) {
    let ttl_ms = i64::try_from(s.timing.lease_ttl_ms).unwrap();
    for (now, fails) in [(ttl_ms - 1, false), (ttl_ms, true)] {
        node.seen_ms = now;
        s.on_node_row(node.clone());
        let effects = plan(&s, now);
        assert_eq!(effects.iter().any(|effect| matches!(effect, Effect::Fail { .. })), fails, "{now}: {effects:?}");
        carry_out(&mut s, &effects, now);
    }
}

#[test]
fn job_with_a_fallback_fails_as_soon_as_no_node_can_run_it() {
    let with_fallback = || Job { has_fallback: true, ..job(Priority::P2, 0) };
    let is_failure = |effects: &[Effect]| matches!(effects, [Effect::Fail { failure: JobFailure::Unavailable { reason }, .. }] if !reason.contains("minutes of repeated"));
    // Its call failed on one of two nodes: the other one is tried.
    let nodes = ["a", "b"].map(|name| node(name, vec![model(4096, 1)], 0));
    let mut failed = with_fallback();
    failed.first_failure_ms = Some(0);
    let policy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };
    failed.node_failures.record(failed.id, nodes[0].id.clone(), 0, policy);
    let effects = plan(&state(nodes.to_vec(), vec![failed.clone()]), 1);
    assert_eq!(placements(&effects).len(), 1, "{effects:?}");
    // It failed on both, on the second one after the backoff of the first one.
    failed.node_failures.record(failed.id, nodes[1].id.clone(), 3_000, policy);
    let effects = plan(&state(nodes.to_vec(), vec![failed]), 3_000);
    assert!(is_failure(&effects), "{effects:?}");
    // The server of the only node is down, and does not come back.
    let mut unusable = nodes[0].clone();
    unusable.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    let mut s = state(vec![unusable.clone()], vec![with_fallback()]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    assert_fails_after_lease_time(s, unusable);
    // A node that has no room, or loads the model, has not failed.
    let mut loading = nodes[0].clone();
    loading.ledger.models[0].residency = Residency::Loading;
    let effects = plan(&state(vec![loading], vec![with_fallback()]), 0);
    assert!(effects.iter().all(|effect| matches!(effect, Effect::Explain { .. })), "{effects:?}");
}

#[test]
fn job_with_a_fallback_waits_for_a_node_that_restarts() {
    let n = node("a", vec![model(4096, 1)], 0);
    let unknown: ModelId = "path:/other.gguf".parse().unwrap();
    let waiting = Job { model: unknown, has_fallback: true, ..job(Priority::P2, 0) };
    let mut s = state(vec![n.clone()], vec![waiting]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    assert_fails_after_lease_time(s, n);
}

/// A node that is cordoned, draining or yielding to a game is not waited for, whether or not a call failed elsewhere.
#[test]
fn job_with_a_fallback_does_not_wait_for_a_withdrawn_node() {
    let withdrawals: [fn(&mut Node); 3] = [
        |n| n.cordoned = true,
        |n| n.ledger.draining = true,
        |n| {
            n.ledger.yields.insert(model_id(), "game".to_owned());
        },
    ];
    let policy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };
    for withdraw in withdrawals {
        let [a, mut b] = ["a", "b"].map(|name| node(name, vec![model(4096, 1)], 0));
        withdraw(&mut b);
        let mut failed = Job { has_fallback: true, first_failure_ms: Some(0), ..job(Priority::P2, 0) };
        failed.node_failures.record(failed.id, a.id.clone(), 0, policy);
        let effects = plan(&state(vec![a, b], vec![failed]), 3_000);
        assert!(matches!(effects[..], [Effect::Fail { .. }]), "{effects:?}");
    }
    for withdraw in [withdrawals[0], withdrawals[2]] {
        let mut n = node("a", vec![model(4096, 1)], 0);
        withdraw(&mut n);
        let mut s = state(vec![n.clone()], vec![Job { has_fallback: true, ..job(Priority::P2, 0) }]);
        let effects = plan(&s, 0);
        assert!(matches!(effects[..], [Effect::NoteUnavailable { .. }]), "{effects:?}");
        carry_out(&mut s, &effects, 0);
        assert_fails_after_lease_time(s, n);
    }
}
