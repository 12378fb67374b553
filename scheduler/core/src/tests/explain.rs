//! Explanations agree with the plan.

use cfq_proto::http::NodeVerdict;
use cfq_proto::node::Residency;
use cfq_proto::task::Priority;
use proptest::prelude::*;

use super::properties::{any_job, any_node};
use super::{carry_out, job, model, node, placements, state};
use crate::{Job, JobPhase, NodeBackoff, NodeFailures, explain_job, order_key, plan, plan_step, queue_estimates};

proptest! {
    /// The first job of the queue is placed on the cheapest node that has room according to its explanation, and nowhere
    /// if no node has.
    #[test]
    fn first_job_is_placed_where_its_explanation_says(
        a in any_node("a"), b in any_node("b"), jobs in prop::collection::vec(any_job(), 1..10),
    ) {
        let now = 100_500;
        let s = state(vec![a, b], jobs.clone());
        let first = jobs.iter().min_by_key(|job| order_key(job)).unwrap();
        let explained = explain_job(&s, first.id, now).unwrap();
        prop_assert_eq!(explained.position.unwrap().before, 0);
        let best = explained.nodes.iter().find(|node| node.verdict == NodeVerdict::HasRoom);
        let placed = placements(&plan(&s, now)).into_iter().find(|(job, _)| *job == first.id).map(|(_, node)| node);
        // The explanation is rounded to ms, so of nodes with nearly the same cost either may come first.
        let cost = |id| explained.nodes.iter().find(|n| n.node == id).and_then(|n| n.cost).map(|c| c.total_ms());
        match (best, placed) {
            (Some(best), Some(placed)) => {
                let gap = cost(placed).unwrap().abs_diff(best.cost.unwrap().total_ms());
                prop_assert!(gap <= 4, "{gap} ms: {explained:?}");
            }
            (None, None) => {}
            other => prop_assert!(false, "{other:?}: {explained:?}"),
        }
    }

    /// Jobs are expected to start in their order, on nodes that can run them.
    #[test]
    fn estimated_starts_follow_the_order_on_each_node(
        a in any_node("a"), b in any_node("b"), jobs in prop::collection::vec(any_job(), 1..30),
    ) {
        let now = 100_500;
        let s = state(vec![a, b], jobs.clone());
        let estimates = queue_estimates(&s, &jobs[0].model, now);
        let mut last = std::collections::BTreeMap::new();
        let mut in_order: Vec<&Job> = jobs.iter().collect();
        in_order.sort_by_key(|job| order_key(job));
        for estimate in in_order.iter().filter_map(|job| estimates.get(&job.id)) {
            prop_assert!(estimate.start_ms >= now && estimate.end_ms >= estimate.start_ms);
            let before = last.insert(estimate.node.clone(), estimate.start_ms);
            prop_assert!(before.is_none_or(|before| before <= estimate.start_ms));
        }
    }
}

/// With one slot, each call of 200 tokens at 10 tokens per second takes 20 s, and its prompt of 332 tokens 3.3 s more.
#[test]
fn wait_is_the_sum_of_the_calls_before() {
    let jobs: Vec<Job> = (0..3).map(|n| job(Priority::P2, n)).collect();
    let mut s = state(vec![node("a", vec![model(4096, 1)], 0)], jobs.clone());
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    let call_ms = 23_320;
    for (waiting, before) in [(&jobs[1], 0), (&jobs[2], 1)] {
        let explained = explain_job(&s, waiting.id, 0).unwrap();
        let (position, estimate) = (explained.position.unwrap(), explained.estimate.unwrap());
        assert_eq!((position.before, position.queued), (before, 2));
        let start_ms = (before + 1) * call_ms;
        assert_eq!(
            (estimate.start_in_ms, estimate.end_in_ms, estimate.is_certain),
            (start_ms, start_ms + call_ms, true)
        );
        assert_eq!(explained.nodes[0].verdict, NodeVerdict::NoFreeSlot);
        assert_eq!(explained.nodes[0].start_in_ms, Some(call_ms), "without the jobs before it");
    }
    let running = explain_job(&s, jobs[0].id, 1_000).unwrap();
    assert_eq!((running.position, running.estimate.unwrap().end_in_ms), (None, call_ms - 1_000));
}

#[test]
fn job_behind_many_others_is_extrapolated() {
    let jobs: Vec<Job> = (0..600).map(|n| job(Priority::P2, n)).collect();
    let s = state(vec![node("a", vec![model(4096, 1)], 0)], jobs.clone());
    let start_in_ms = |n: usize| explain_job(&s, jobs[n].id, 0).unwrap().estimate.unwrap().start_in_ms as f64;
    assert_eq!(start_in_ms(10), 10.0 * 23_320.0);
    assert!((start_in_ms(500) / (500.0 * 23_320.0) - 1.0).abs() < 0.01, "{}", start_in_ms(500));
}

#[test]
fn every_reason_of_a_node_is_named() {
    let waiting = job(Priority::P2, 0);
    let verdict = |change: &dyn Fn(&mut crate::Node, &mut Job)| {
        let (mut n, mut job) = (node("a", vec![model(4096, 1)], 100_000), waiting.clone());
        change(&mut n, &mut job);
        let s = state(vec![n], vec![job.clone()]);
        assert_eq!(placements(&plan(&s, 100_000)), [], "it cannot be placed");
        explain_job(&s, job.id, 100_000).unwrap().nodes[0].verdict.clone()
    };
    assert_eq!(verdict(&|n, _| n.seen_ms = 0), NodeVerdict::NotAlive { silent_ms: 100_000 });
    assert_eq!(verdict(&|n, _| n.ledger.models.clear()), NodeVerdict::NoModel);
    assert_eq!(verdict(&|n, _| n.ledger.draining = true), NodeVerdict::Draining);
    assert_eq!(verdict(&|n, _| n.ledger.models[0].residency = Residency::Loading), NodeVerdict::Loading);
    assert_eq!(verdict(&|n, _| n.ledger.models[0].residency = Residency::Available), NodeVerdict::NotLoaded);
    let unusable = Residency::Unusable { reason: "no file".into() };
    let expected = NodeVerdict::Unusable { reason: "no file".into() };
    assert_eq!(verdict(&|n, _| n.ledger.models[0].residency = unusable.clone()), expected);
    let yields = |n: &mut crate::Node, _: &mut Job| drop(n.ledger.yields.insert(super::model_id(), "game".into()));
    assert_eq!(verdict(&yields), NodeVerdict::Yielding { program: "game".into() });
    let refused = |n: &mut crate::Node, job: &mut Job| drop(job.refused_by.insert(n.id.clone(), "too long".into()));
    assert_eq!(verdict(&refused), NodeVerdict::Refused { reason: "too long".into() });
    let failed = |n: &mut crate::Node, job: &mut Job| {
        let backoff = NodeBackoff { failures: 1, until_ms: 101_500 };
        job.node_failures = NodeFailures([(n.id.clone(), backoff)].into());
    };
    assert_eq!(verdict(&failed), NodeVerdict::Backoff { left_ms: 1_500 });
    let excluded = |n: &mut crate::Node, _: &mut Job| {
        let exclusion = crate::Exclusion { version: n.ledger.version, at_ms: 100_000 };
        n.exclusions.insert(super::model_id(), exclusion);
    };
    assert_eq!(verdict(&excluded), NodeVerdict::RefusedForNow);
    let full =
        |n: &mut crate::Node, _: &mut Job| (n.ledger.models[0].running, n.ledger.models[0].max_sequences) = (1, 1);
    assert_eq!(verdict(&full), NodeVerdict::NoFreeSlot);
    let small = |n: &mut crate::Node, _: &mut Job| n.ledger.models[0].kv_tokens_free = 10;
    assert_eq!(verdict(&small), NodeVerdict::TooLarge);
    let busy = |n: &mut crate::Node, _: &mut Job| {
        let model = &mut n.ledger.models[0];
        (model.running, model.max_sequences, model.kv_tokens_free) = (1, 2, 10);
    };
    assert_eq!(verdict(&busy), NodeVerdict::TooFewFreeTokens);
}

#[test]
fn reservation_and_load_are_explained() {
    // One of two slots is in use; the large job needs the tokens of the running one.
    let mut n = node("a", vec![model(4096, 2)], 0);
    n.ledger.models[0].kv_tokens_free = 1_000;
    let held = Job {
        phase: JobPhase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: -1 },
        attempt: 1,
        max_tokens: 3_000,
        ..job(Priority::P2, 0)
    };
    n.ledger.models[0].running = 1;
    let large = Job { max_tokens: 2_000, ..job(Priority::P2, 1) };
    let small = Job { max_tokens: 600, prompt_bytes: 10, ..job(Priority::P2, 2) };
    let mut s = state(vec![n], vec![held, large.clone(), small.clone()]);
    plan_step(&mut s, 0, usize::MAX);
    let own = explain_job(&s, large.id, 0).unwrap();
    assert_eq!(own.reservation.as_ref().map(|r| (r.job, r.node.as_str())), Some((large.id, "a")), "{own:?}");
    assert_eq!(own.nodes[0].verdict, NodeVerdict::TooFewFreeTokens);
    let on_disk = crate::tests::node(
        "a",
        vec![cfq_proto::node::ModelState { residency: Residency::Available, need_bytes: 1_000_000_000, ..model(0, 1) }],
        0,
    );
    let s = state(vec![on_disk], vec![large.clone()]);
    let explained = explain_job(&s, large.id, 0).unwrap();
    let (cost, estimate) = (explained.nodes[0].cost.unwrap(), explained.estimate.unwrap());
    assert_eq!((cost.load_ms, estimate.start_in_ms, estimate.is_certain), (10_000, 10_000, false));
}
