//! Tests of a large job that waits for room, and of the jobs behind it.

use cfq_proto::ids::NodeId;
use cfq_proto::node::ModelState;
use cfq_proto::task::Priority;

use super::{carry_out, job, model, node, placements, state};
use crate::{Effect, Job, JobPhase, Node, PendingReason, PlannerState, plan, plan_step};

/// A node whose KV pool of 1,000 tokens has 400 left beside one running job.
fn half_full(name: &str) -> Node {
    node(name, vec![ModelState { running: 1, ..model(400, 4) }], 0)
}

/// A job of `max_tokens` and a prompt of 32 tokens. It generates 10 tokens per second, divided by the number of
/// sequences.
fn sized(max_tokens: u32, priority: Priority) -> Job {
    Job { prompt_bytes: 0, max_tokens, ..job(priority, 0) }
}

/// The job that the node's ledger counts: it holds 600 of the tokens and has 568 left to generate.
fn runs_on(node: &Node, accepted_ms: i64) -> Job {
    let phase = JobPhase::Running { node: node.id.clone(), boot: node.boot, accepted_ms };
    Job { attempt: 1, phase, ..sized(568, Priority::P2) }
}

fn step(state: &mut PlannerState, now_ms: i64) -> Vec<Effect> {
    let effects = plan_step(state, now_ms, usize::MAX).effects;
    carry_out(state, &effects, now_ms);
    effects
}

fn heartbeat(state: &mut PlannerState, nodes: &[Node], now_ms: i64) {
    nodes.iter().for_each(|node| state.on_node_row(Node { seen_ms: now_ms, ..node.clone() }));
}

#[test]
fn large_job_reserves_one_node_and_the_others_serve_on() {
    let (a, b) = (half_full("a"), half_full("b"));
    let large = sized(800, Priority::P0);
    let small: Vec<Job> = (0..2).map(|_| sized(300, Priority::P2)).collect();
    // The job on `b` began earlier, so the large job can start there first.
    let running = vec![runs_on(&a, -10_000), runs_on(&b, -20_000)];
    let mut s = state(vec![a.clone(), b], [running, vec![large], small.clone()].concat());
    assert_eq!(placements(&plan(&s, 0)), [(small[0].id, a.id.clone())], "only one has room on the other node");
    assert_eq!(placements(&step(&mut s, 0)), [(small[0].id, a.id)]);
}

#[test]
fn job_that_ends_before_the_large_one_can_start_is_backfilled() {
    let a = half_full("a");
    // The running job ends after 56.8 s at the earliest. With two sequences, 100 tokens take 20 s and 300 take 60 s.
    let (large, long, short) = (sized(800, Priority::P0), sized(300, Priority::P1), sized(100, Priority::P2));
    let s = state(vec![a.clone()], vec![runs_on(&a, -1), large, long, short.clone()]);
    assert_eq!(placements(&plan(&s, 1)), [(short.id, a.id)]);
}

#[test]
fn nothing_is_backfilled_once_the_large_job_is_late() {
    let a = half_full("a");
    let (large, short) = (sized(800, Priority::P0), sized(100, Priority::P2));
    let mut s = state(vec![a.clone()], vec![runs_on(&a, -1), large.clone()]);
    assert_eq!(placements(&step(&mut s, 1)), []);
    for now_ms in [40_000, 60_000, 600_000] {
        heartbeat(&mut s, std::slice::from_ref(&a), now_ms);
        s.on_job_row(Job { id: super::new_id(), ..short.clone() }, now_ms);
        assert_eq!(placements(&step(&mut s, now_ms)), [], "{now_ms}");
    }
    let running = s.jobs.values().find(|job| job.holder().is_some()).unwrap().id;
    s.on_job_ended(running, 600_001);
    assert_eq!(placements(&step(&mut s, 600_001))[0], (large.id, a.id));
}

#[test]
fn reservation_stays_until_the_node_is_gone() {
    let nodes = [half_full("a"), half_full("b")];
    let [a, b] = &nodes;
    let (large, small) = (sized(800, Priority::P0), sized(300, Priority::P2));
    let mut s = state(nodes.to_vec(), vec![runs_on(a, -20_000), runs_on(b, -10_000), large.clone()]);
    let reserved = |s: &PlannerState| s.reservations.values().map(|r| (r.job, r.node.clone())).collect::<Vec<_>>();
    step(&mut s, 0);
    assert_eq!(reserved(&s), [(large.id, a.id.clone())]);
    // The other node is now the better one, because a job there was cancelled; but a later job has taken the room.
    heartbeat(&mut s, &nodes, 1_000);
    s.on_job_row(
        Job {
            phase: JobPhase::Placed {
                node: b.id.clone(),
                boot: b.boot,
                lease: super::new_id(),
                placed_ms: 0,
                preparing_ms: None,
            },
            ..small
        },
        1_000,
    );
    step(&mut s, 1_000);
    assert_eq!(reserved(&s), [(large.id, a.id.clone())]);
    s.on_node_gone(&a.id);
    step(&mut s, 1_001);
    assert_eq!(reserved(&s), [(large.id, b.id.clone())]);
    s.on_job_ended(large.id, 1_002);
    assert_eq!(reserved(&s), []);
}

#[test]
fn job_that_fits_on_no_node_at_all_reserves_none() {
    // The pool is idle and has 400 tokens; the prompt alone needs more.
    let idle = node("a", vec![model(400, 4)], 0);
    let (huge, small) = (Job { prompt_bytes: 10_000, ..job(Priority::P0, 0) }, sized(300, Priority::P2));
    let s = state(vec![idle.clone()], vec![huge, small.clone()]);
    assert_eq!(placements(&plan(&s, 0)), [(small.id, idle.id)]);
}

#[test]
fn job_that_can_never_start_does_not_stop_the_others_of_its_class() {
    let idle = node("a", vec![model(400, 4)], 0);
    // Both need about 600 tokens; the long prompt of the first never fits, the output of the second is cut at the pool.
    let never = Job { prompt_bytes: 1_600, max_tokens: 200, ..job(Priority::P0, 0) };
    let fits = sized(600, Priority::P2);
    let mut s = state(vec![idle.clone()], vec![never, fits.clone()]);
    assert_eq!(placements(&step(&mut s, 0)), [(fits.id, idle.id)]);
}

#[test]
fn pending_reason_names_the_reserved_node() {
    let a = half_full("a");
    let large = sized(800, Priority::P0);
    let mut s = state(vec![a.clone()], vec![runs_on(&a, -1), large.clone()]);
    assert_eq!(step(&mut s, 1), [], "most large jobs wait for a short time only");
    heartbeat(&mut s, std::slice::from_ref(&a), 3_001);
    let effects = step(&mut s, 3_001);
    let [Effect::Explain { job, pending, .. }] = effects.as_slice() else { panic!("{effects:?}") };
    assert_eq!((*job, pending), (large.id, &PendingReason::ReservedNode { node: NodeId::new("a").unwrap() }));
    assert!(pending.to_string().starts_with("waits for room on a, which is reserved for it"), "{pending}");
    assert_eq!(step(&mut s, 3_002), [], "recorded once");
}
