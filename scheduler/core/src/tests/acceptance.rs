//! Tests of placements that a node does not accept.

use cfq_proto::task::Priority;

use super::{TIMING, carry_out, job, model, new_id, node, placements, state};
use crate::{Effect, Job, JobPhase, Node, UnplaceReason, plan};

#[test]
fn placed_job_is_resent_twice_then_unplaced_from_an_unresponsive_node() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    let mut seen = Vec::new();
    for now in (0..20_000).step_by(500) {
        n.seen_ms = now;
        s.on_node_row(n.clone());
        let effects = plan(&s, now);
        seen.extend(effects.iter().map(|e| match e {
            Effect::Place { .. } => (now, "place"),
            Effect::Resend { .. } => (now, "resend"),
            Effect::Unplace { reason: UnplaceReason::NodeUnresponsive, .. } => (now, "unplace"),
            other => panic!("{other:?}"),
        }));
        carry_out(&mut s, &effects, now);
    }
    assert_eq!(seen, vec![(0, "place"), (3_000, "resend"), (6_000, "resend"), (9_000, "unplace")]);
    n.ledger.version = 2;
    s.on_node_row(n);
    assert_eq!(placements(&plan(&s, 20_000)).len(), 1, "its ledger changed: it gets work again");
}

#[test]
fn placed_job_of_a_lost_or_restarted_node_is_requeued_at_once() {
    let n = node("a", vec![model(4096, 1)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    let is_unplaced = |effects: &[Effect]| matches!(effects, [Effect::Unplace { reason: UnplaceReason::NodeLost, .. }]);
    assert!(is_unplaced(&plan(&s, 6_001)));
    s.on_node_row(Node { boot: new_id(), seen_ms: 1_000, ..n });
    assert!(is_unplaced(&plan(&s, 1_000)));
}

#[test]
fn clock_set_back_revives_no_dead_node_and_delays_no_resend() {
    let hour = 3_600_000;
    let dead = node("a", vec![model(4096, 1)], hour);
    assert!(!dead.alive(1_000, TIMING.lease_ttl_ms));
    let live = node("b", vec![model(4096, 1)], 1_000);
    let placed = Job {
        phase: JobPhase::Placed { node: live.id.clone(), boot: live.boot, lease: new_id(), placed_ms: hour },
        ..job(Priority::P2, 0)
    };
    assert!(matches!(plan(&state(vec![live], vec![placed]), 1_000).as_slice(), [Effect::Resend { .. }]));
}
