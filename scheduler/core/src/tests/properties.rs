//! Property tests of the planner on random clusters.

use cfq_proto::ids::JobId;
use cfq_proto::task::Priority;
use proptest::prelude::*;

use super::{carry_out, job, model, node, placements, state};
use crate::cost::{kv_reservation, prompt_tokens};
use crate::room_timeline::expected_end_ms;
use crate::{Job, MAX_OVERTAKING_MS, Node, order_key, plan};

prop_compose! {
    pub(super) fn any_job()(
        priority in 0i16..4,
        created_ms in 0i64..100_000,
        prompt_bytes in 0u64..20_000,
        max_tokens in 1u32..2_000,
        deadline_ms in prop::option::of(0i64..1_000_000),
    ) -> Job {
        Job { prompt_bytes, max_tokens, deadline_ms, ..job(Priority::try_from(priority).unwrap(), created_ms) }
    }
}

prop_compose! {
    pub(super) fn any_node(name: &'static str)(
        free in 0u64..20_000,
        slots in 0u32..5,
        running in 0u32..5,
        prefill in 0.0f64..500.0,
        decode in 0.0f64..50.0,
    ) -> Node {
        let mut m = model(free, slots);
        (m.running, m.prefill_rate, m.decode_rate) = (running.min(slots), prefill, decode);
        node(name, vec![m], 100_000)
    }
}

/// The first job is placed alone although its estimate exceeds all tokens. Its end frees no more tokens than there are,
/// so the second one never fits there.
#[test]
fn job_that_was_placed_alone_frees_no_more_tokens_than_the_node_has() {
    let now = 100_500;
    let mut b = model(1_958, 2);
    b.running = 1;
    let nodes = vec![node("a", vec![model(4_231, 1)], 100_000), node("b", vec![b], 100_000)];
    let sizes = [(12_394, 1_472), (13_994, 1), (0, 1)];
    let jobs = sizes.map(|(prompt_bytes, max_tokens)| Job { prompt_bytes, max_tokens, ..job(Priority::P0, 0) });
    let mut s = state(nodes, jobs.to_vec());
    let effects = plan(&s, now);
    assert_eq!(placements(&effects).len(), 1, "{effects:?}");
    carry_out(&mut s, &effects, now);
    assert_eq!(plan(&s, now), vec![]);
}

proptest! {
    #[test]
    fn plan_stays_within_the_ledger_and_planning_twice_changes_nothing(
        a in any_node("a"), b in any_node("b"), jobs in prop::collection::vec(any_job(), 0..30),
    ) {
        let now = 100_500;
        let mut s = state(vec![a.clone(), b.clone()], jobs.clone());
        let effects = plan(&s, now);
        for n in [&a, &b] {
            let m = &n.ledger.models[0];
            let here: Vec<&Job> = placements(&effects).into_iter().filter(|(_, on)| *on == n.id)
                .map(|(id, _)| jobs.iter().find(|j| j.id == id).unwrap()).collect();
            prop_assert!(here.len() as u32 <= m.max_sequences.saturating_sub(m.running));
            let tokens: u64 = here.iter().map(|j| kv_reservation(j, m)).sum();
            let alone_on_idle = here.len() == 1 && m.running == 0 && prompt_tokens(here[0], m) < m.kv_tokens_free;
            prop_assert!(tokens <= m.kv_tokens_free || alone_on_idle, "{tokens} of {}", m.kv_tokens_free);
        }
        carry_out(&mut s, &effects, now);
        prop_assert_eq!(plan(&s, now), vec![]);
        // A new leader that loads the same rows places nothing either.
        let mut reloaded = state(vec![a, b], vec![]);
        s.jobs.values().for_each(|j| reloaded.on_job_row(j.clone(), now));
        prop_assert_eq!(placements(&plan(&reloaded, now)), vec![]);
    }

    /// The first job that waits, although the node could run it, is passed only by jobs that end before it can start:
    /// before the last of the jobs ahead of it has ended.
    #[test]
    fn waiting_job_is_passed_only_by_jobs_that_end_before_it_can_start(
        a in any_node("a"), jobs in prop::collection::vec(any_job(), 1..30),
    ) {
        let now = 100_500;
        let places = |jobs: &[Job]| -> Vec<JobId> {
            placements(&plan(&state(vec![a.clone()], jobs.to_vec()), now)).into_iter().map(|(j, _)| j).collect()
        };
        let placed = places(&jobs);
        let m = &a.ledger.models[0];
        let may_run = |job: &Job| m.running > 0 || !places(std::slice::from_ref(job)).is_empty();
        let waiting = jobs.iter().filter(|j| !placed.contains(&j.id) && may_run(j)).min_by_key(|j| order_key(j));
        let Some(waiting) = waiting else { return Ok(()) };
        let of_placed = || jobs.iter().filter(|j| placed.contains(&j.id));
        let ahead = of_placed().filter(|j| order_key(j) < order_key(waiting));
        let last_end_ms = ahead.map(|j| expected_end_ms(j, m, now)).max().unwrap_or(now);
        for passing in of_placed().filter(|j| order_key(j) > order_key(waiting)) {
            prop_assert!(expected_end_ms(passing, m, now) <= last_end_ms);
        }
    }

    /// The order of two jobs does not depend on when the plan is made, so a job that waits never falls behind another.
    #[test]
    fn order_of_placements_does_not_depend_on_the_time(
        jobs in prop::collection::vec(any_job(), 1..20), later_ms in 0i64..10_000_000,
    ) {
        let first_placed = |now_ms: i64| {
            let n = node("a", vec![model(20_000, 1)], now_ms);
            placements(&plan(&state(vec![n], jobs.clone()), now_ms))
        };
        prop_assert_eq!(first_placed(100_000), first_placed(100_000 + later_ms));
    }

    /// With one slot, and a new P0 job with an early deadline each time the slot is free, a P3 job is still placed
    /// within the documented time.
    #[test]
    fn no_job_starves(work_ms in 1_000i64..120_000) {
        let patient = job(Priority::P3, 0);
        let mut now = 0;
        let mut s = state(vec![node("a", vec![model(4096, 1)], 0)], vec![patient.clone()]);
        s.on_job_row(Job { deadline_ms: Some(1), ..job(Priority::P0, 0) }, 0);
        loop {
            let effects = plan(&s, now);
            let placed = placements(&effects);
            if placed.iter().any(|(j, _)| *j == patient.id) {
                break;
            }
            prop_assert!(now <= MAX_OVERTAKING_MS + work_ms, "still waiting at {now}");
            carry_out(&mut s, &effects, now);
            now += work_ms;
            placed.iter().for_each(|(j, _)| s.on_job_ended(*j, now));
            s.on_job_row(Job { deadline_ms: Some(1), ..job(Priority::P0, now) }, now);
            let mut n = Node::clone(s.nodes.values().next().unwrap());
            n.seen_ms = now;
            s.on_node_row(n);
        }
    }
}
