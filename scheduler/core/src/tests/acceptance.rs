//! Tests of placements that a node does not accept.

use cfq_proto::task::Priority;

use super::{TIMING, carry_out, job, model, new_id, node, placements, state};
use crate::{Effect, Job, JobPhase, Node, PlannerState, UnplaceReason, plan};

/// The effects on a placed job until the time `to`, in steps of 500 ms, with their times. Its node sends heartbeats, and
/// reports at the times that `reports` selects that it prepares the prompt. Returns the node and the state too.
fn effects_until(to: i64, reports: impl Fn(i64) -> bool) -> (Vec<(i64, &'static str)>, Node, PlannerState) {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    let mut seen = Vec::new();
    for now in (0..to).step_by(500) {
        n.seen_ms = now;
        s.on_node_row(n.clone());
        let mut row = s.jobs[&waiting.id].clone();
        if let JobPhase::Placed { preparing_ms, .. } = &mut row.phase
            && reports(now)
        {
            *preparing_ms = Some(now);
            s.on_job_row(row, now);
        }
        let effects = plan(&s, now);
        seen.extend(effects.iter().map(|e| match e {
            Effect::Place { .. } => (now, "place"),
            Effect::Resend { .. } => (now, "resend"),
            Effect::Unplace { reason: UnplaceReason::NodeUnresponsive, .. } => (now, "unplace"),
            other => panic!("{other:?}"),
        }));
        carry_out(&mut s, &effects, now);
    }
    (seen, n, s)
}

#[test]
fn placed_job_is_resent_twice_then_unplaced_from_an_unresponsive_node() {
    let (seen, mut n, mut s) = effects_until(20_000, |_| false);
    assert_eq!(seen, [(0, "place"), (3_000, "resend"), (6_000, "resend"), (9_000, "unplace")]);
    n.ledger.version = 2;
    s.on_node_row(n);
    assert_eq!(placements(&plan(&s, 20_000)).len(), 1, "its ledger changed: it gets work again");
}

#[test]
fn node_that_prepares_the_prompt_keeps_its_placement() {
    let (seen, ..) = effects_until(30_000, |now| now <= 20_000);
    assert_eq!(seen, [(0, "place"), (23_000, "resend"), (26_000, "resend"), (29_000, "unplace")]);
}

#[test]
fn lost_report_of_a_preparation_does_not_use_up_the_resends() {
    let (seen, ..) = effects_until(15_000, |now| now % 7_000 == 0);
    assert_eq!(seen, [(0, "place"), (3_000, "resend"), (6_000, "resend"), (10_000, "resend"), (13_000, "resend")]);
}

#[test]
fn report_of_a_preparation_adds_no_expected_prefill() {
    let n = node("a", vec![model(4096, 4)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n], vec![waiting.clone()]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    let before = s.prefix_index.clone();
    let mut row = s.jobs[&waiting.id].clone();
    let JobPhase::Placed { preparing_ms, .. } = &mut row.phase else { panic!("{row:?}") };
    *preparing_ms = Some(500);
    s.on_job_row(row, 500);
    assert_eq!(s.prefix_index, before);
}

#[test]
fn preparation_without_end_is_not_waited_for() {
    let (seen, ..) = effects_until(70_000, |_| true);
    assert_eq!(seen, [(0, "place"), (63_000, "resend"), (66_000, "resend"), (69_000, "unplace")]);
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
        phase: JobPhase::Placed {
            node: live.id.clone(),
            boot: live.boot,
            lease: new_id(),
            placed_ms: hour,
            preparing_ms: None,
        },
        ..job(Priority::P2, 0)
    };
    let mut s = state(vec![live.clone()], vec![placed]);
    let mut seen = Vec::new();
    for now in (1_000..12_000).step_by(500) {
        s.on_node_row(Node { seen_ms: now, ..live.clone() });
        let effects = plan(&s, now);
        seen.extend(effects.iter().map(|effect| (now, matches!(effect, Effect::Resend { .. }))));
        carry_out(&mut s, &effects, now);
    }
    assert_eq!(seen[..3], [(1_000, true), (4_000, true), (7_000, false)], "two resends, then the end of the placement");
}
